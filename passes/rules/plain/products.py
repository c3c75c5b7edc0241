"""Matrix products: autoshard::contract."""

from __future__ import annotations

from passes.rules.core.notation import parse
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import OpRule

__all__ = ["contract"]


def contract(call: OpCall) -> OpRule:
    """autoshard::contract: the op carries its rule as an argument."""
    notation = parse(f"{_with_sums(call['equation'])}; linear: 0; linear: 1")
    return notation.bind([o.shape for o in call.operands], [call.result.shape])


def _with_sums(equation: str) -> str:
    """ "b k, n k -> n" with the sums said: also a letter of one operand alone is summed."""
    left, right = equation.split("->")
    gone = dict.fromkeys(word for word in left.replace(",", " ").split() if word not in right.split())
    return equation + "".join(f"; {word}: sum" for word in gone)
