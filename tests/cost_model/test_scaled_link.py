"""Links of one level made slower or faster: modelled and measured prices change together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_model.collectives import CollectivePrices
from cost_model.measurements import CollectiveSamples
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile, scaled_link

NODE, CLUSTER = MeshSpec({"tp": 8}), MeshSpec({"dp": 4, "tp": 8})
SIZES = (2**14, 2**20, 2**28)
KINDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


def sampled(profile: Profile, mesh: MeshSpec, group: tuple[tuple[int, int], ...]) -> Profile:
    """`profile` with measurements that are just what its links say of large arrays: a line in nbytes."""
    prices = CollectivePrices(replace(profile, collectives=()), mesh)
    axes = tuple(mesh.names)
    curves: list[CollectiveSamples] = []
    for kind in KINDS:
        slope = (prices.seconds(kind, axes, 2**34) - prices.seconds(kind, axes, 2**33)) / 2**33
        times = tuple(1e-5 + slope * n for n in SIZES)
        curves.append(CollectiveSamples(kind, group, SIZES, times))
    return replace(profile, collectives=tuple(curves))


@pytest.mark.parametrize("factor", [1 / 16, 0.5, 1.0, 3.0, 16.0])
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    ("mesh", "group"), [(NODE, ((8, 1),)), (CLUSTER, ((32, 1),))], ids=["a node", "four"]
)
def test_measured_curves_scale_as_the_model_does(
    mesh: MeshSpec, group: tuple[tuple[int, int], ...], level: int, factor: float
) -> None:
    """Measuring on scaled links is scaling what was measured."""
    h100 = Profile.named("h100")
    scaled = scaled_link(sampled(h100, mesh, group), level, factor)
    again = sampled(scaled_link(h100, level, factor), mesh, group)
    assert scaled.links == again.links
    for one, other in zip(scaled.collectives, again.collectives, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=1e-6), one.kind


def test_modelled_bytes_take_longer_by_the_factor_and_starts_stay() -> None:
    h100 = Profile.named("h100")
    old, new = (CollectivePrices(p, NODE) for p in (h100, scaled_link(h100, 0, 0.25)))
    start = old.seconds("all_gather", ("tp",), 0)
    assert new.seconds("all_gather", ("tp",), 0) == start
    seconds = old.seconds("all_gather", ("tp",), 2**30) - start
    assert new.seconds("all_gather", ("tp",), 2**30) - start == pytest.approx(4 * seconds)


def test_links_that_a_group_does_not_use_change_nothing() -> None:
    h100 = sampled(Profile.named("h100"), NODE, ((8, 1),))
    assert scaled_link(h100, 1, 0.1).collectives == h100.collectives


def test_measurements_near_the_peak_stay_possible() -> None:
    """Faster than the links' usual rate by nearly as much as their peak allows; other levels then bind."""
    h100 = Profile.named("h100")
    peak = h100.links[1].peak_bytes_per_second
    times = tuple(31 / 32 / 8 / peak * n * 1.0001 for n in SIZES)
    fast = replace(h100, collectives=(CollectiveSamples("all_gather", ((32, 1),), SIZES, times),))
    for factor in (1 / 16, 2.0, 16.0):
        seconds = scaled_link(fast, 1, factor).collectives[0].seconds
        assert list(seconds) == sorted(seconds)
