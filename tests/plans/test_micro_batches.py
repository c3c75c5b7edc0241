"""Plans of a batch in pieces: found, written, read, verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import InfeasibleError, MeshSpec, Plan, PlanError, ShardingError, find_plan, verify
from autoshard.plan.micro_batches import fastest_in_pieces
from autoshard.planning import canonical_capture
from cost_model.deadline import Deadline
from cost_model.mesh import simulated_groups
from passes.capture import Captured
from passes.lower.piecewise import split_pieces
from passes.lower.rank_program import rank_program
from passes.micro_batches.cut_batch import cut_batch
from tests.micro_batches.test_in_pieces import MODELS
from tests.profiles import slow_compute

SQUARE = MeshSpec({"dp": 2, "tp": 2})


def planned(name: str, batch: int, mesh: MeshSpec = SQUARE, **options: Any) -> tuple[Any, Any, Plan]:
    torch.manual_seed(0)
    build, make = MODELS[name]
    model, x = build().double(), make(batch)
    return model, x, find_plan(model, mesh, (x,), profile=slow_compute(), backend="eager", **options)


@pytest.mark.parametrize(
    ("name", "batch", "count"), [("tokens", 8, 5), ("attention", 7, 3), ("images", 8, 4), ("a row", 6, 3)]
)
def test_verified_and_the_same_from_a_file(name: str, batch: int, count: int, tmp_path: Path) -> None:
    model, x, plan = planned(name, batch, micro_batches=count)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == plan and read.micro_batches == count
    assert f"in {count} pieces" in read.explain()
    report = verify(model, read, (x,))
    assert report.ok and report.max_error < 1e-12


def test_a_wrong_layout_in_pieces_of_another_size_is_found(tmp_path: Path) -> None:
    model, x, plan = planned("tokens", 8, micro_batches=5)
    data = plan.to_json()
    (other,) = data["other_sizes"]
    cut = next(node for node in other if node["op"] == "piece")
    cut["results"][0]["layout"]["dims"][1] = ["dp"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="damaged"):
        verify(model, Plan.load(tmp_path / "plan.json"), (x,))


def test_a_plan_of_a_whole_batch_says_nothing_of_pieces() -> None:
    _, _, plan = planned("tokens", 8)
    assert not {"micro_batches", "other_sizes"} & plan.to_json().keys()


def test_pieces_keep_less_alive() -> None:
    peaks = [planned("tokens", 64, micro_batches=count)[2].peak_memory for count in (1, 4)]
    assert peaks[1] < 0.6 * peaks[0]


def test_auto_takes_pieces_where_the_whole_does_not_fit() -> None:
    _, _, whole = planned("tokens", 64, micro_batches="auto")
    assert whole.micro_batches == 1
    limit = int(0.6 * whole.peak_memory)
    with pytest.raises(InfeasibleError):
        planned("tokens", 64, memory_limit=limit, recompute="user")
    _, _, plan = planned("tokens", 64, memory_limit=limit, recompute="user", micro_batches="auto")
    assert plan.micro_batches > 1 and plan.peak_memory <= limit


@pytest.mark.parametrize("given", [0, -1, 2.0, True, "all", None])
def test_what_is_no_number_of_pieces(given: Any) -> None:
    with pytest.raises(ShardingError, match="micro_batches"):
        planned("tokens", 8, micro_batches=given)


def gathers(module: fx.GraphModule) -> int:
    """Of parameters; a bucket of several says so."""
    nodes = [node for node in module.graph.nodes if "all_gather_into_tensor" in str(node.target)]
    return sum(".weight" in str(node.meta["serves"]) for node in nodes)


def test_a_parameter_is_gathered_once_for_all_pieces() -> None:
    """Its weights are stored in parts, and read whole: once a step costs less than once a piece."""
    mesh, pins = MeshSpec({"dp": 2}), {"*.weight": [Shard(0)], "*.bias": [Replicate()]}
    model, x, plan = planned("tokens", 64, mesh, micro_batches=4, constraints=pins)
    joint = cut_batch(canonical_capture(model, (x,), {}).joint, 4)
    (graph, first), *_ = plan.of_pieces(joint)
    program = rank_program(graph, first, mesh, 0, simulated_groups(mesh))
    parts = split_pieces(program)
    backward = parts.piece.phases.backward
    assert backward is not None and plan.parameters["up.weight"] == (Shard(0),)
    assert gathers(parts.before) >= 1
    assert gathers(parts.piece.phases.forward) == gathers(backward.module) == 0


@pytest.mark.parametrize(("count", "graphs"), [(4, 1), (5, 2)])
def test_pieces_of_one_size_are_planned_as_one(count: int, graphs: int) -> None:
    """8 samples in 4 pieces of 2; in 5, of 2 and of 1."""
    captured = canonical_capture(nn.Linear(6, 1), (torch.randn(8, 6),), {})
    asked: list[int] = []

    def planned(cut: Captured, until: Deadline) -> Plan:
        asked.append(1 + len(cut.joint.others))
        raise InfeasibleError("none\n  try: another")

    with pytest.raises(InfeasibleError, match="none"):
        fastest_in_pieces(captured, count, None, planned, Deadline.after(60.0))
    assert asked == [graphs]
