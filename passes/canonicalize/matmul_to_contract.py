from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import passes.ops.contract  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::contract)
from passes.ir.graph_pass import GraphPass
from passes.ir.joint import JointGraph
from passes.ir.properties import of_ops

__all__ = ["EQUATIONS", "PRODUCTS_ARE_CONTRACTS", "MatmulToContract"]

aten = torch.ops.aten

EQUATIONS: dict[Any, str] = {
    aten.mm.default: "m k, k n -> m n",
    aten.bmm.default: "b m k, b k n -> b m n",
    aten.mv.default: "m k, k -> m",
    aten.dot.default: "k, k -> ",
}


PRODUCTS_ARE_CONTRACTS = of_ops(
    "no product but contracts", lambda node: "is one" if node.target in EQUATIONS else None
)


@dataclass(frozen=True)
class MatmulToContract(GraphPass):
    """Write every matrix product as a `contract`, which names its loops.

        %y: f32[8, 32] = aten.mm(%x, %w)
        ->
        %y: f32[8, 32] = contract(%x, %w, "m k, k n -> m n")

    m: rows, n: columns, k: summed, b: batch. Later passes give the operands their dims back.
    """

    ensures = (PRODUCTS_ARE_CONTRACTS,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in joint.graph.nodes:
            if node.op == "call_function" and node.target in EQUATIONS:
                node.args = (*node.args, EQUATIONS[node.target])
                node.target = torch.ops.autoshard.contract.default
        return joint
