"""What a plan says of its modules, and how it tells equal layers once. Expected lines are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from autoshard import MeshSpec, Plan, find_plan
from autoshard.plan.explain_part import explain_part
from autoshard.plan.plan_memory import fold_numbers
from autoshard.plan.plan_words import parameter_lines
from cost_model.errors import PlanError
from passes.layout.layout import Layout
from passes.plan.planned_graph import NodeRecord, OperandRecord, PlannedGraph, Reshard, ResultRecord
from passes.redistribution.steps import AllReduce

WHOLE = Layout(((), ()))
SPLIT = Layout((("tp",), ()))


def node(
    name: str, op: str, text: str, module: str, *reads: str, phase: str = "forward", moved: bool = False
) -> NodeRecord:
    transfers = (
        (Reshard.of(AllReduce(before=WHOLE, after=WHOLE, axes=("tp",), op="sum"), 64, 3e-6),) if moved else ()
    )
    operands = tuple(OperandRecord(read, 0, WHOLE, transfers, False) for read in reads)
    return NodeRecord(
        name, op, text, operands, (ResultRecord((8, 4), "f32", SPLIT),), (), 1e-6, phase, module, "model.py:3"
    )


def layers(count: int) -> list[NodeRecord]:
    found = [node("x", "input", "input x", "")]
    before = "x"
    for i in range(count):
        module = f"layers.{i}"
        found.append(node(f"w{i}", "param", f"param {module}.up.weight", module))
        found.append(node(f"product{i}", "aten.mm", "aten.mm({0}, {1})", f"{module}.up", before, f"w{i}"))
        found.append(node(f"relu{i}", "aten.relu", "aten.relu({0})", module, f"product{i}", moved=True))
        before = f"relu{i}"
    return found


def part_of(records: Sequence[NodeRecord], name: str) -> str:
    return explain_part(PlannedGraph(tuple(records)), name)


def test_a_module_is_all_that_it_holds() -> None:
    assert part_of(layers(4), "layers.3").splitlines() == [
        "layers.3: 2 nodes, 2 us forward, 0 ns backward",
        "collectives",
        "  forward  all_reduce     [tp] x1         64B      3 us  modelled",
        "parameters",
        "  layers.3.up.weight [@tp, -]",
        "nodes",
        "  %product3: f32[8@tp, 4] = aten.mm  // 1 us modelled model.py:3",
        "  %relu3: f32[8@tp, 4] = aten.relu  // 1 us modelled model.py:3",
        "      reads %product3 through all_reduce[tp](): 64B, 3 us modelled",
    ]


def test_a_parameter_is_brought_to_its_readers() -> None:
    cast = node("cast0", "aten._to_copy", "aten._to_copy({0})", "layers.0", "w0", moved=True)
    again = node("gradient", "aten.mm", "aten.mm({0}, {1})", "layers.0", "relu0", "cast0", phase="backward")
    assert part_of([*layers(2), cast, again], "layers.0.up.weight").splitlines() == [
        "%w0: f32[8@tp, 4] = param  // 1 us modelled model.py:3",
        "    read by %product0, forward: %w0 [-, -], as it is",
        "    read by %cast0, forward: %w0 [-, -], through all_reduce[tp](): 64B, 3 us modelled",
        "    read by %gradient, backward: %cast0 [-, -], as it is",
    ]


def test_equal_layers_are_told_once() -> None:
    assert part_of(layers(32), "layers").splitlines() == [
        "layers: 64 nodes, 64 us forward, 0 ns backward",
        "collectives",
        "  forward  all_reduce     [tp] x32    2.048KB     96 us  modelled",
        "parameters",
        "  layers.0-31.up.weight [@tp, -]  x 32",
        "nodes",
        "  layers.0-31  x 32",
        "  %product0: f32[8@tp, 4] = aten.mm  // 1 us modelled model.py:3",
        "  %relu0: f32[8@tp, 4] = aten.relu  // 1 us modelled model.py:3",
        "      reads %product0 through all_reduce[tp](): 64B, 3 us modelled",
    ]


def test_near_names_are_proposed() -> None:
    with pytest.raises(PlanError) as caught:
        part_of(layers(4), "layers.3.up.wieght")
    assert str(caught.value) == (
        "explain('layers.3.up.wieght'): the plan has no node, parameter or module of that name\n"
        "  try: layers.3.up.weight or layers.2.up.weight or layers.1.up.weight"
    )


def test_numbers_fold_where_all_else_is_equal() -> None:
    rows = [("a.0.w", 1), ("a.0.b", 5), ("a.1.w", 1), ("a.1.b", 6), ("a.3.w", 1), ("head", 1)]
    assert fold_numbers(rows) == [
        ("a.0-1.w", 1, 2),
        ("a.0.b", 5, 1),
        ("a.1.b", 6, 1),
        ("a.3.w", 1, 1),
        ("head", 1, 1),
    ]
    experts = [(f"a.{i}.e.{j}.w", 1) for i in range(4) for j in range(3)]
    assert fold_numbers(experts) == [("a.0-3.e.0-2.w", 1, 12)]


def test_parameters_of_equal_layers_share_a_line() -> None:
    layouts = {"emb": WHOLE, **{f"layers.{i}.w": SPLIT for i in range(12)}, "layers.12.w": WHOLE}
    assert parameter_lines(layouts) == [
        "parameters",
        "  emb           [-, -]",
        "  layers.0-11.w [@tp, -]  x 12",
        "  layers.12.w   [-, -]",
    ]


class Tied(nn.Module):
    """Embedding and head share a weight, whose first name is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x)))


@pytest.mark.parametrize("loaded", [False, True])
def test_a_tied_parameter_by_each_of_its_names(loaded: bool, tmp_path: Path) -> None:
    tokens = torch.zeros(4, 3, dtype=torch.int64)
    plan = find_plan(Tied(), MeshSpec({"x": 2}), (tokens,), profile="cpu")
    if loaded:
        plan.save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
    assert list(plan.parameters) == ["words.weight", "head.weight", "body.weight", "body.bias"]
    first = plan.explain("words.weight")
    assert first.startswith("%words_weight: f32[12")
    assert plan.explain("head.weight") == "head.weight is tied to words.weight\n" + first
    layout = plan.parameter_layouts["words.weight"]
    assert f"parameters\n  head.weight {layout}\nnodes\n" in plan.explain("head")
    with pytest.raises(PlanError, match=r"try: head\.weight"):
        plan.explain("head.weigth")


def test_no_name_is_no_name(plan: Plan) -> None:
    with pytest.raises(PlanError, match="no node, parameter or module"):
        plan.explain("")


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    return find_plan(model, MeshSpec({"x": 2}), (torch.ones(4, 8),), profile="cpu")


def test_a_plan_answers_for_its_modules(plan: Plan) -> None:
    first, *_ = plan.explain("3").splitlines()
    own = [r for r in plan.records if r.module == "3" and r.op != "param"]
    assert first.startswith(f"3: {len(own)} nodes, ")
    with pytest.raises(PlanError, match=r"try: 3\.weight or "):
        plan.explain("3.weigth")


def test_a_member_of_a_bucket_is_priced_as_one() -> None:
    """What two transfers take beside each other is not what one takes alone."""
    together = [
        structs.replace(
            record, operands=tuple(structs.replace(read, turn=(0, 1)) for read in record.operands)
        )
        if record.name in ("relu1", "relu2")
        else record
        for record in layers(4)
    ]
    moved = "reads %product1 through all_reduce[tp](): 64B, 3 us modelled"
    assert part_of(together, "relu1").splitlines()[1].strip() == f"{moved} more in a bucket of 2"
    assert part_of(together, "relu0").splitlines()[1].strip() == moved.replace("product1", "product0")
