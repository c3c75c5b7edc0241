"""`Profile.measure` and `recheck` on ranks. Times are scripted wherever a value is asserted."""

from __future__ import annotations

import math

import pytest

from cost_model.collectives import CollectivePrices
from cost_model.measurements import PLAN_KINDS
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from tests.cost_model import measured
from tests.ranks import RankPool


def test_every_rank_gets_the_same_profile(ranks: RankPool) -> None:
    """Really timed."""
    (profile, told), (other, _) = ranks.run(measured.measure, {"x": 2}, None, world=2)
    assert profile == other
    assert Profile.from_json(profile.to_json(), "text") == profile
    assert not profile.nominal and profile.name == "here" and profile.device_type == "cpu"
    assert profile.command == "a test (2 ranks, mesh (x=2))"
    assert profile.hardware.startswith("1 host of 2 ranks: ") and "1 thread" in profile.hardware
    software = dict(profile.software)
    assert software["backend"] == "gloo" and software["torch"] and software["python"]
    assert {(s.kind, s.group) for s in profile.collectives} == {(kind, ((2, 1),)) for kind in PLAN_KINDS}
    assert all(s.nbytes == (4096, 16384) and len(s.spread) == 2 for s in profile.collectives)
    assert {"launch", "memory", "all_reduce over 2 ranks, stride 1", "all_reduce alone"} <= set(told)
    assert profile.lateness is not None and profile.lateness.seconds[0] == 0.0
    prices = CollectivePrices(profile, MeshSpec({"x": 2}))
    assert prices.confidence("all_gather", ("x",), 8192) == "measured"


def test_scripted_times_by_hand(ranks: RankPool) -> None:
    runs = ranks.run(measured.measure, {"a": 2, "b": 2}, 1e-3, world=4)
    profile = runs[0][0]
    assert all(other == profile for other, _ in runs)
    assert len(profile.collectives) == 3 * len(PLAN_KINDS)
    # The slowest rank counts where ranks wait for each other: 1 ms, of which 0.4 is the pause before. Computing,
    # the median: 0.5 ms.
    assert all(s.seconds == pytest.approx((0.6e-3, 0.6e-3)) for s in profile.collectives)
    assert profile.device.launch_seconds == pytest.approx(0.5e-3 / 50)
    for rates in profile.device.matmul:
        times = [flops / rate for flops, rate in zip(rates.flops, rates.flops_per_second, strict=True)]
        assert times == pytest.approx([0.25e-3] * len(times))  # two products at a time
    assert profile.overlap_efficiency == 1.0  # both together took as long as each alone
    assert profile.lateness is None  # more computing took no longer


def test_one_rank_measures_its_kernels(ranks: RankPool) -> None:
    ((profile, _),) = ranks.run(measured.measure, {"x": 1}, None, world=1)
    assert profile.collectives == () and profile.overlap_efficiency == 0.0 and profile.lateness is None
    assert profile.links == Profile.named("cpu").links and "nominal" in profile.sources[0]


@pytest.mark.parametrize(
    ("factor", "spread", "off"),
    [
        (1.0, 0.0, ()),
        (1.2, 0.0, ()),
        (1.3, 0.0, ("x", "products", "memory")),
        (1.3, 0.2, ("products", "memory")),
    ],
)
def test_recheck(ranks: RankPool, factor: float, spread: float, off: tuple[str, ...]) -> None:
    points, other = ranks.run(measured.check, 1e-3, factor, spread, world=2)
    assert points == other
    assert {point.name.split()[-1] for point in points if not point.holds} == set(off)
    assert len(points) > 6 * 2 and math.isclose(points[-1].measured, 0.6e-3 * factor)


@pytest.mark.parametrize(
    ("kind", "shape", "value"),
    [
        ("all_gather", (2, 128), 1.0),
        ("reduce_scatter", (2, 64), 2.0),
        ("all_to_all", (4, 64), 1.0),
        ("all_reduce", (256,), 2.0),
        ("point_to_point", (256,), 1.0),
    ],
)
def test_collectives_move_what_they_are_priced_for(
    ranks: RankPool, kind: str, shape: tuple[int, ...], value: float
) -> None:
    assert ranks.run(measured.results, kind, 1024, world=2) == [(shape, value)] * 2


def test_messages_go_to_both_neighbours(ranks: RankPool) -> None:
    heard = ranks.run(measured.heard_by, world=4)
    assert heard == [[[1.0], [3.0]], [[2.0], [0.0]], [[3.0], [1.0]], [[0.0], [2.0]]]


def test_a_failure_on_one_rank_is_an_error_on_all(ranks: RankPool) -> None:
    for text in ranks.run(measured.one_cannot, world=2):
        assert text.startswith("measuring work failed on rank 1: MemoryError: none left\n  try: ")


def test_groups_can_be_made_again(ranks: RankPool) -> None:
    """Groups that found the addresses of those before them in the store would never connect."""
    assert ranks.run(measured.sums_along, ("a",), world=4) == [[2.0] * 2, [4.0] * 2, [2.0] * 2, [4.0] * 2]


def test_a_mesh_must_hold_every_process(ranks: RankPool) -> None:
    for text in ranks.run(measured.too_small, world=2):
        assert text.startswith("mesh (x=1) has 1 devices, and 2 process(es) run\n  try: ")


def test_arguments(ranks: RankPool) -> None:
    for text in ranks.run(measured.bad_arguments, world=1)[0]:
        assert text.startswith(("time_budget is 0", "largest_nbytes is 4096")) and "\n  try: " in text
