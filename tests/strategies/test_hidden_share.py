"""What of a collective hides behind computing, by who carries it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.plan.judged import prices_of
from cost_model.measurements import LinkLevel
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile

MESH = MeshSpec({"hosts": 2, "ranks": 2})


@pytest.mark.parametrize(
    ("kind", "axes", "hidden"),
    [
        ("all_reduce", ("ranks",), 0.0),
        ("all_gather", ("ranks",), 0.0),
        ("reduce_scatter", ("ranks",), 0.0),
        ("all_to_all", ("ranks",), 0.75),  # messages, also within a host
        ("point_to_point", ("ranks",), 0.75),
        ("all_reduce", ("hosts",), 0.75),
        ("all_reduce", ("hosts", "ranks"), 0.75),
    ],
)
def test_what_goes_through_memory_is_waited_for(kind: str, axes: tuple[str, ...], hidden: float) -> None:
    inside = LinkLevel("inside a host", 2, 1e-6, 1e10, 2e10, shares_memory=True)
    between = LinkLevel("between hosts", None, 1e-5, 1e9, 2e9)
    profile = replace(Profile.named("cpu"), links=(inside, between), overlap_efficiency=0.75)
    assert prices_of(profile, MESH).hidden_share(kind, axes) == hidden
    alone = replace(profile, links=(replace(inside, shares_memory=False), between))
    assert prices_of(alone, MESH).hidden_share(kind, axes) == 0.75
