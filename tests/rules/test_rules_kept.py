"""Rules and seconds are found once for ops alike: what makes ops unlike must be part of what they are known by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from passes.ir.op_traits import op_signature
from passes.rules.check.trial import call_node
from passes.rules.core.assemble import whole_rule
from passes.rules.core.rule import OpCall, OpRule
from passes.rules.core.rule_registry import RuleTable, rule_for

aten = torch.ops.aten
X, Y = torch.ones(4, 6), torch.ones(6, 8)


def _sum(*args: Any, x: torch.Tensor = X) -> fx.Node:
    return call_node(aten.sum.dim_IntList, (x, *args))


UNLIKE: dict[str, tuple[Callable[[], fx.Node], Callable[[], fx.Node]]] = {
    "op": (lambda: call_node(aten.add.Tensor, (X, X)), lambda: call_node(aten.sub.Tensor, (X, X))),
    "shape of an operand": (lambda: _sum([0]), lambda: _sum([0], x=torch.ones(4, 7))),
    "dtype of an operand": (lambda: _sum([0]), lambda: _sum([0], x=X.double())),
    "an argument": (lambda: _sum([0]), lambda: _sum([1])),
    "type of an argument": (lambda: _sum([0], True), lambda: _sum([0], 1)),
    "place of a tensor": (
        lambda: call_node(aten.add.Tensor, (X, torch.ones(6))),
        lambda: call_node(aten.add.Tensor, (torch.ones(6), X)),
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_ops_unlike_are_told_apart(what: str) -> None:
    one, two = UNLIKE[what]
    assert op_signature(one()) == op_signature(one())
    assert op_signature(one()) != op_signature(two())


def test_a_rule_is_made_once_for_ops_alike_and_again_for_another_builder() -> None:
    table = RuleTable()
    calls: list[str] = []

    def builder(name: str) -> Callable[[OpCall], OpRule]:
        def build(call: OpCall) -> OpRule:
            calls.append(name)
            return whole_rule(call)

        return build

    def ask() -> OpRule:
        return rule_for(call_node(aten.mm.default, (X, Y)), table)

    table.register("aten::mm", builder("first"))
    assert ask() is ask()
    table.register("aten::mm", builder("second"))
    ask()
    assert calls == ["first", "second"]
