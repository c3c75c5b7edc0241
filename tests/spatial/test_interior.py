"""Interiors computed while a halo travels: the same values, whatever parts the rules are asked for."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, find_plan, verify
from autoshard.planning import canonical_capture
from cost_model.mesh import simulated_groups
from passes.lower.op_on_rank import in_parts
from passes.lower.rank_program import rank_program
from tests.one_search import ONE_SEARCH
from tests.profiles import slow_compute
from tests.spatial.networks import network

EVERY_TIME = mock.patch("passes.plan.decide._gain", lambda *given: 1.0)
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
CONVOLUTION = torch.ops.aten.convolution.default


@pytest.mark.parametrize(
    ("name", "axes"), [("unet", {"a": 3}), ("vit", {"a": 3}), ("weather", {"a": 5})], ids=str
)
def test_simulated(name: str, axes: dict[str, int]) -> None:
    model, x = network(name, 1, torch.float64)
    with EVERY_TIME:
        plan = find_plan(model, MeshSpec(axes), (x,), profile=slow_compute())
    with mock.patch("passes.lower.partition.in_parts", wraps=in_parts) as made:
        report = verify(model, plan, (x,))
    assert made.call_count > 0
    assert report.ok, report


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def forward_of(rank: int) -> fx.GraphModule:
    model, x, mesh = Layer(), torch.randn(1, 2, 30), MeshSpec({"a": 3})
    ends = {"in_placements": [Shard(2)], "out_placements": [Shard(2)]}
    with EVERY_TIME, ONE_SEARCH:
        plan = find_plan(model, mesh, (x[..., :10],), profile=slow_compute(), **ends)  # type: ignore[arg-type]
    joint = canonical_capture(model, (x,), {}).joint
    groups = simulated_groups(mesh)
    return rank_program(joint, plan.planned, mesh, rank, groups).phases.forward


@pytest.mark.parametrize(("rank", "parts"), [(0, [8, 2]), (1, [6, 2, 2]), (2, [8, 2])], ids=str)
def test_the_interior_runs_between_start_and_wait(rank: int, parts: list[int]) -> None:
    """Ten rows a rank, of which two at each cut need a neighbour's."""
    nodes = list(forward_of(rank).graph.nodes)
    (start,) = (n for n in nodes if n.target is ALL_TO_ALL)
    (wait,) = (n for n in start.users if n.target is WAIT)
    first, *others = (n for n in nodes if n.target is CONVOLUTION)
    assert nodes.index(start) < nodes.index(first) < nodes.index(wait) < nodes.index(others[0])
    assert [n.meta["val"].shape[2] for n in (first, *others)] == parts
