"""`plan.memory`: a curve whose highest point is the plan's peak, in kinds that add up, with names that users know."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard import MeshSpec, Plan, PlanError, find_plan
from autoshard.demo import GPT, GPTConfig
from autoshard.plan.plan_memory import OUTLINE, MemoryTimeline
from passes.predict.prediction import KINDS, MemoryStep
from tests.profiles import slow_compute

GRID = MeshSpec({"dp": 2, "tp": 2})


def gpt(mesh: MeshSpec = GRID, layers: int = 4, **options: Any) -> Plan:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=512, context=64, width=64, heads=4, layers=layers))
        tokens = torch.zeros(8, 64, dtype=torch.int64)
    return find_plan(model, mesh, (tokens, tokens), profile=slow_compute(), **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return gpt(layers=2)


class Twice(nn.Module):
    """Two blocks, run under `checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def twice(recompute: str) -> Plan:
    return find_plan(
        Twice(), MeshSpec({"dp": 2}), (torch.zeros(256, 32),), profile=slow_compute(), recompute=recompute
    )


@pytest.fixture(scope="module")
def again() -> Plan:
    """With values computed again."""
    return twice("user")


def timeline(plan: Plan) -> MemoryTimeline:
    assert plan.memory is not None
    return plan.memory


@pytest.mark.parametrize("which", ["plan", "again"])
@pytest.mark.slow
def test_its_highest_point_is_the_peak(which: str, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(which)
    memory = timeline(plan)
    assert max(step.nbytes for step in memory.steps) == memory.peak.nbytes == plan.peak_memory
    assert memory.peak.node == plan.peak_node
    assert sum(memory.by_kind.values()) == plan.peak_memory
    assert len(memory.steps) == memory.count
    assert [step.place for step in memory.steps] == list(range(memory.count))
    for kind, nbytes in memory.by_kind.items():
        assert sum(row.nbytes for row in memory.at_peak if row.kind == kind) == nbytes
    sizes = [row.nbytes for row in memory.at_peak]
    assert sizes == sorted(sizes, reverse=True)


def test_an_uneven_split_is_of_the_fullest_rank() -> None:
    plan = gpt(MeshSpec({"dp": 3}), layers=1)
    assert timeline(plan).peak.nbytes == plan.peak_memory


def test_what_is_computed_again_takes_the_place_of_what_was_kept(again: Plan) -> None:
    kept = twice("auto")
    most = lambda plan, kind: max(step.of(kind) for step in timeline(plan).steps)
    assert again.planned.again and not kept.planned.again
    # Of one block at a time what GELU made, or what it read, of 128 rows: it fuses with what comes before.
    assert most(again, "again") == 4 * 128 * 128
    assert most(again, "kept") < most(kept, "kept") / 2
    # Both hold the same parameters, in shards of some size, with AdamW's two states each.
    assert timeline(again).by_kind["optimizer"] == 2 * timeline(again).by_kind["parameters"]


def test_by_hand() -> None:
    """Two products on one device, float32: x [32, 8], w1 [16, 8], w2 [4, 16]; the backward begins with dw2, for which h
    [32, 16] is kept, beside the given gradient of y [32, 4]; then comes dh, and of dh and x dw1."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    plan = find_plan(model, MeshSpec({"dp": 1}), (torch.zeros(32, 8),), profile="cpu", backend="eager")
    x, w1, w2, h, y = (4 * n for n in (32 * 8, 16 * 8, 4 * 16, 32 * 16, 32 * 4))
    held = {"parameters": w1 + w2, "optimizer": 2 * (w1 + w2), "inputs": x}
    steps: list[tuple[str, dict[str, int]]] = [
        ("forward", {**held}),
        ("forward", {**held, "kept": h}),
        ("forward", {**held, "kept": h, "working": y}),
        ("backward", {**held, "inputs": x + y, "kept": h, "gradients": w2}),
        ("backward", {**held, "inputs": x + y, "gradients": w2, "working": h}),
        ("backward", {**held, "gradients": w1 + w2, "working": h}),
    ]
    found = [
        (step.phase, {kind: nbytes for kind, nbytes in zip(KINDS, step.by_kind, strict=True) if nbytes})
        for step in timeline(plan).steps
    ]
    assert found == steps
    assert plan.peak_memory == x + 3 * (w1 + w2) + h + w1 + w2


def test_equal_layers_are_one_row(plan: Plan) -> None:
    rows = timeline(plan).at_peak
    weights = [row for row in rows if row.kind == "parameters" and row.name == "blocks.0-1.up.weight"]
    assert [row.count for row in weights] == [2]
    layout = plan.parameter_layouts["blocks.0.up.weight"]
    shape = layout.max_local_shape((256, 64), plan.mesh)
    assert weights[0].value == f"f32[{shape[0]}, {shape[1]}]"
    assert weights[0].nbytes == 2 * 4 * shape[0] * shape[1]


def test_a_file_holds_its_outline(plan: Plan) -> None:
    memory, data = timeline(plan), json.loads(json.dumps(plan.to_json()))
    loaded = Plan.from_json(data)
    assert loaded == plan and loaded.to_json() == plan.to_json()
    again = timeline(loaded)
    assert len(again.steps) <= OUTLINE < len(memory.steps)
    assert set(again.steps) <= set(memory.steps)
    assert (again.peak, again.at_peak, again.count) == (memory.peak, memory.at_peak, memory.count)
    turn = next(step for step in memory.steps if step.phase == "backward")
    assert turn in again.steps
    assert again.steps[0] == memory.steps[0] and again.steps[-1] == memory.steps[-1]
    assert loaded.explain() == plan.explain()
    size = lambda data: len(json.dumps(data))
    assert size(data["memory"]) < 0.08 * size(data)


def test_a_file_without_it_is_read() -> None:
    plan = find_plan(nn.Linear(8, 8), GRID, (torch.zeros(8, 8),), profile="cpu")
    data = plan.to_json()
    assert "memory at the peak" in plan.explain()
    del data["memory"]
    loaded = Plan.from_json(data)
    assert loaded.memory is None and loaded == plan
    assert "memory at the peak" not in loaded.explain()


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("count",), 1, "the steps of its memory are not in order, or beyond 1"),
        (("steps", 0, 3, 0), 2**40, "and its peak "),
        (("at_peak", 0, 5), 1, "what is alive at its peak has "),
        (("at_peak", 0, 0), "other", "Invalid enum value 'other'"),
        (("steps",), [], "length >= 1"),
    ],
    ids=["count", "peak", "sum", "kind", "empty"],
)
def test_a_damaged_one_is_refused(plan: Plan, place: tuple[Any, ...], value: Any, problem: str) -> None:
    data = json.loads(json.dumps(plan.to_json()))
    *path, last = place
    inside = data["memory"]
    for key in path:
        inside = inside[key]
    inside[last] = value
    with pytest.raises(PlanError, match="damaged plan") as caught:
        Plan.from_json(data)
    assert problem in str(caught.value)


def step(place: int, nbytes: int) -> MemoryStep:
    return MemoryStep(place, "forward", f"n{place}", (nbytes, *[0] * (len(KINDS) - 1)))


def test_the_outline_keeps_the_turns() -> None:
    """A line with one tooth and many small ones: the ends, the tooth and its feet stay."""
    curve = [1000 * place + place % 2 for place in range(400)]
    curve[200] = 10**6
    memory = MemoryTimeline(len(curve), tuple(step(i, n) for i, n in enumerate(curve)), ())
    outline = memory.outline()
    places = [one.place for one in outline.steps]
    assert len(places) == OUTLINE and places == sorted(set(places))
    assert {0, 199, 200, 201, 399} <= set(places)
    assert outline.peak == memory.peak and outline.outline() is outline


def test_as_text() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    plan = find_plan(model, MeshSpec({"dp": 1}), (torch.zeros(32, 8),), profile="cpu", backend="eager")
    text = str(plan.memory)
    first, bars, *rest = text.splitlines()
    assert first == "peak 6.144KB at contract_default_2, step 3 of 5, backward"
    # 3328, 5376, 5888 and three times 6144 bytes, in sevenths of the last.
    assert bars.strip() == "▄▇▇███"
    assert_expected_inline(
        "\n".join(rest),
        """\
  kept        2.048KB
  optimizer   1.536KB
  inputs      1.536KB
  parameters     768B
  gradients      256B
  the largest of what lives there
     2.048KB  kept        0 contract  f32[32, 16]
     1.024KB  optimizer   0.weight x 2  f32[16, 8]
     1.024KB  inputs      args[0]  f32[32, 8]
        512B  parameters  0.weight  f32[16, 8]
        512B  optimizer   1.weight x 2  f32[4, 16]
        512B  inputs      tangent 0  f32[32, 4]
        256B  parameters  1.weight  f32[4, 16]
        256B  gradients   1.weight  f32[4, 16]""",
    )
