"""What a program that runs op by op computes in memory that is there already: by hand arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from autoshard import MeshSpec, find_plan
from autoshard.planning import canonical_capture
from cost_model.mesh import simulated_groups
from passes.lower.phases import Phases
from passes.lower.rank_program import rank_program
from passes.predict.memory_walk import memory_walk
from passes.predict.prediction import MemoryWalk
from passes.predict.step_events import copied_share, in_place
from passes.strategies.traffic import eager_traffic, fused_traffic

MESH = MeshSpec({"dp": 2})
FIRST, SECOND = 512 * 256 * 4, 128 * 512 * 4
"""Bytes of the two weights' gradients."""


class Pair(nn.Module):
    """Its last norm's gradients are copied into the bucket: what makes them makes more than one result."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 512, bias=False)
        self.down = nn.Linear(512, 128, bias=False)
        self.norm = nn.LayerNorm(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x).relu())).square().mean()


@pytest.fixture(scope="module")
def phases() -> Phases:
    """Of data parallelism, all gradients in one bucket."""
    model, x = Pair(), torch.randn(8192, 256)
    placed = {"*": [Replicate()]}
    plan = find_plan(model, MESH, (x,), backend="eager", constraints=placed)
    joint = canonical_capture(model, (x,), {}).joint
    program = rank_program(joint, plan.planned, MESH, 0, simulated_groups(MESH))
    return program.joined().usual()


def ops(phases: Phases) -> list[torch.fx.Node]:
    assert phases.backward is not None
    return [node for node in phases.backward.module.graph.nodes if node.op == "call_function"]


def bucket_of(phases: Phases) -> torch.fx.Node:
    (bucket,) = (node for node in ops(phases) if node.target is torch.ops.aten.cat.default)
    return bucket


def walked(phases: Phases) -> MemoryWalk:
    return memory_walk(phases, eager_traffic)


def test_products_are_parts_of_the_bucket_from_the_start(phases: Phases) -> None:
    found, bucket = in_place(ops(phases), eager_traffic), bucket_of(phases)
    assert sorted(tuple(node.meta["val"].shape) for node in found.written) == [(128, 512), (512, 256)]
    assert tuple(found.begins[bucket].meta["val"].shape) == (128, 512)
    assert len(found.reduced) == 1


def test_a_compiler_is_not_told(phases: Phases) -> None:
    found = in_place(ops(phases), fused_traffic)
    assert not found.written and not found.begins and not found.reduced
    assert copied_share(bucket_of(phases), fused_traffic) == 1.0


def test_only_what_is_copied_takes_time(phases: Phases) -> None:
    norm = 2 * 128 * 4
    assert copied_share(bucket_of(phases), eager_traffic) == pytest.approx(norm / (norm + FIRST + SECOND))


def test_a_bucket_has_its_bytes_once_from_its_first_part_to_the_update(phases: Phases) -> None:
    walk, bucket = walked(phases), bucket_of(phases)
    whole = FIRST + SECOND + 2 * 128 * 4
    names = [node for _, node in walk.steps]
    (reduced,) = in_place(ops(phases), eager_traffic).reduced
    first = in_place(ops(phases), eager_traffic).begins[bucket]
    own = {value.node: value for value in walk.values if value.node in (bucket.name, reduced.name)}
    assert own[bucket.name].nbytes == own[reduced.name].nbytes == whole
    assert names[own[bucket.name].first] == first.name
    assert names[own[reduced.name].first] == reduced.name
    assert own[bucket.name].last == own[reduced.name].first - 1
    assert own[reduced.name].last == len(names) - 1
    written = {node.name for node in in_place(ops(phases), eager_traffic).written}
    assert not written & {value.node for value in walk.values}
