"""Matrix products that carry more than two factors of a product: contract, addmm."""

from __future__ import annotations

from torch import fx

from passes.rules.core.assemble import assemble, dims
from passes.rules.core.emit_op import again, first_part
from passes.rules.core.notation import parse
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import LocalContext, OpRule
from passes.rules.plain.pointwise import linear_sets

__all__ = ["add_product", "contract"]


def contract(call: OpCall) -> OpRule:
    """autoshard::contract: the op carries its rule as an argument."""
    notation = parse(f"{_with_sums(call['equation'])}; linear: 0; linear: 1")
    return notation.bind([o.shape for o in call.operands], [call.result.shape])


def _with_sums(equation: str) -> str:
    """ "b k, n k -> n" with the sums said: also a letter of one operand alone is summed."""
    left, right = equation.split("->")
    gone = dict.fromkeys(word for word in left.replace(",", " ").split() if word not in right.split())
    return equation + "".join(f"; {word}: sum" for word in gone)


def add_product(bias: str, left: str, right: str, result: str) -> Builder:
    """addmm: "m n, m k, k n -> m n", the bias broadcast. With k split, one rank adds the bias."""

    def build(call: OpCall) -> OpRule:
        added, a, b = list(call.arguments)[:3]
        aligned = dims(bias)[len(dims(bias)) - call.tensor(added).ndim :]
        return assemble(
            call.shapes,
            [aligned, dims(left), dims(right)],
            [dims(result)],
            reductions={"k": "sum"},
            linear=linear_sets(call, f"{added} {a}", f"{added} {b}"),
            localize=_add_once,
        )

    return build


def _add_once(ctx: LocalContext) -> fx.Node:
    return again(ctx) if first_part(ctx, ["k"]) else again(ctx, beta=0)
