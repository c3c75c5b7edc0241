"""Running passes verified: what a pass may get wrong, each with its error; and the order of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import fx

from passes.canonicalize import PIPELINE
from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.ir.graph_pass import GraphPass, emit, properties_after, run_passes
from passes.ir.graph_properties import NO_DEAD_CODE, NO_USES, BrokenGraphError
from passes.ir.joint import GraphInput, JointGraph
from tests.verification.written import Written

aten = torch.ops.aten


def ends(graph: JointGraph) -> tuple[fx.Node, fx.Node]:
    """The input and the op of `relu_of_view`."""
    return graph.placeholders[0], next(n for n in graph.graph.nodes if n.target is aten.relu.default)


def relu_of_view() -> JointGraph:
    g = Written()
    return g.returning(g.call(aten.relu.default, g.call(aten.view.default, g.input(4, 4), [16])))


@dataclass(frozen=True)
class Nothing(GraphPass):
    """The graph as it is."""

    def __call__(self, joint: JointGraph) -> JointGraph:
        return joint


class Needy(Nothing):
    requires = (ONE_SPELLING,)


class Liar(Nothing):
    ensures = (ONE_SPELLING,)


class Tidy(Nothing):
    ensures = (NO_DEAD_CODE,)


class Litters(Nothing):
    """Emits an op that nothing reads."""

    def __call__(self, joint: JointGraph) -> JointGraph:
        x, relu = ends(joint)
        emit(relu, aten.exp.default, x)
        return joint


class Confesses(Litters):
    breaks = (NO_DEAD_CODE,)


class ForgetsWhereFrom(Nothing):
    def __call__(self, joint: JointGraph) -> JointGraph:
        del ends(joint)[1].meta["source"]
        return joint


class ReturnsAnother(Nothing):
    def __call__(self, joint: JointGraph) -> JointGraph:
        joint.output_node.args = ((ends(joint)[0],),)
        return joint


class AddsInput(Nothing):
    def __call__(self, joint: JointGraph) -> JointGraph:
        with joint.graph.inserting_after(joint.placeholders[-1]):
            added = joint.graph.placeholder("more")
        added.meta["val"] = joint.placeholders[0].meta["val"].new_empty((), dtype=torch.int64)
        return replace(joint, inputs=(*joint.inputs, GraphInput("input", "more", 1)))


class AddsSeed(AddsInput):
    def __call__(self, joint: JointGraph) -> JointGraph:
        added = super().__call__(joint)
        return replace(added, inputs=(*added.inputs[:-1], GraphInput("seed", "seed")))


WRONG: list[tuple[list[GraphPass], str]] = [
    (
        [Needy()],
        "needy requires: views, dims and sizes have one spelling\n"
        "  %view = aten.view.default(%x0), up, model.py:7: with ([16],) {} where aten.reshape.default has ([16],) {}",
    ),
    (
        [Liar()],
        "liar breaks: views, dims and sizes have one spelling\n"
        "  %view = aten.view.default(%x0), up, model.py:7: with ([16],) {} where aten.reshape.default has ([16],) {}",
    ),
    (
        [Tidy(), Nothing(), Litters()],
        "litters breaks: every op is read\n  %exp_default = aten.exp.default(%x0), up, model.py:7: nothing reads it",
    ),
    (
        [ForgetsWhereFrom()],
        "forgets-where-from breaks: every op has meta val, phase, module, source\n"
        "  %relu = aten.relu.default(%view), up: has no meta source",
    ),
    (
        [ReturnsAnother()],
        "returns-another keeps: inputs, outputs, their shapes and dtypes\n"
        "  was output y0 (0): torch.float32[16]\n  is  output y0 (0): torch.float32[4, 4]",
    ),
    (
        [AddsInput()],
        "adds-input keeps: inputs, outputs, their shapes and dtypes\n"
        "  was output y0 (0): torch.float32[16]\n  is  input more (1): torch.int64[]",
    ),
]


@pytest.mark.parametrize(("passes", "said"), WRONG, ids=[case[0][-1].name for case in WRONG])
def test_a_wrong_pass_is_named(passes: list[GraphPass], said: str) -> None:
    with pytest.raises(BrokenGraphError) as error:
        run_passes(relu_of_view(), passes)
    assert str(error.value).rpartition("\n  try: ")[0] == said


@pytest.mark.parametrize("graph_pass", [AddsSeed(), Nothing()], ids=lambda p: p.name)
def test_a_right_pass_passes(graph_pass: GraphPass) -> None:
    run_passes(relu_of_view(), [Tidy(), graph_pass])


def test_what_a_pass_says_that_it_breaks_need_not_hold() -> None:
    run_passes(relu_of_view(), [Tidy(), Confesses(), Nothing()])


def test_the_first_pass_is_given_a_graph_that_is_checked() -> None:
    joint = ForgetsWhereFrom()(relu_of_view())
    with pytest.raises(BrokenGraphError, match=r"^nothing requires: every op has meta"):
        run_passes(joint, [Nothing()])


@pytest.mark.parametrize("value", ["0", "", None])
def test_only_when_asked(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("AUTOSHARD_VERIFY")
    else:
        monkeypatch.setenv("AUTOSHARD_VERIFY", value)
    run_passes(relu_of_view(), [Liar()])


def test_every_pass_of_the_pipeline_gets_what_it_requires() -> None:
    assert not list(_unmet(PIPELINE))


def test_an_order_that_would_not_do() -> None:
    by_name = {graph_pass.name: graph_pass for graph_pass in PIPELINE}
    order = [by_name[name] for name in ("write-conjugates", "remove-noops", "normalize-arguments")]
    assert list(_unmet(order)) == ["remove-noops: views, dims and sizes have one spelling"]


def _unmet(passes: list[GraphPass] | tuple[GraphPass, ...]) -> list[str]:
    """What passes require that none before ensures, or that one breaks in between."""
    held, found = (NO_USES,), []
    for graph_pass in passes:
        found += [f"{graph_pass.name}: {p.name}" for p in graph_pass.requires if p not in held]
        held = properties_after(graph_pass, held)
    return found


def test_what_holds_of_a_canonical_graph() -> None:
    held = (NO_USES,)
    for graph_pass in PIPELINE:
        held = properties_after(graph_pass, held)
    assert {stated.name for stated in held} == {
        "conjugates are written out",
        "views, dims and sizes have one spelling",
        "constants are `full`, ranges `arange.start_step`",
        "nothing draws from a generator",
        "no scatter sets one element per row",
        "a convolution's gradients of input and weight are ops of their own",
        "no product but contracts",
        "no permute reads a permute",
        "no contract reads a permute",
        "every op is read",
        "the readers of a value in one phase read one use of it",
    }
