from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from passes.canonicalize.matmul_to_contract import PRODUCTS_ARE_CONTRACTS
from passes.canonicalize.merge_duplicates import NO_DUPLICATES
from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.canonicalize.view_properties import PERMUTES_ABSORBED
from passes.ir.graph_pass import GraphPass
from passes.ir.graph_properties import NO_USES
from passes.ir.joint import JointGraph
from passes.ir.rewrite import erase_dead, ints_at, tensor_at
from passes.ops.contract import format_equation, parse_equation

__all__ = ["AbsorbPermutes"]

aten = torch.ops.aten


@dataclass(frozen=True)
class AbsorbPermutes(GraphPass):
    """Let a `contract` read its operands and write its result in their own dim order.

        %t: f32[16, 32]    = aten.permute(%w, [1, 0])                          // %w: f32[32, 16]
        %y: f32[2, 8, 32]  = contract(%x, %t, "m0 m1 k, k n -> m0 m1 n")
        %z: f32[32, 2, 8]  = aten.permute(%y, [2, 0, 1])
        ->
        %y: f32[32, 2, 8]  = contract(%x, %w, "m0 m1 k, n k -> n m0 m1")

    A weight and its gradient then appear in the order that the user gave them. The result's permute
    is taken in only where nothing else reads the product.
    """

    requires = (ONE_SPELLING, NO_USES, PRODUCTS_ARE_CONTRACTS)
    ensures = (PERMUTES_ABSORBED,)
    breaks = (NO_DUPLICATES,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in list(joint.graph.nodes):
            if node.target is torch.ops.autoshard.contract.default:
                _absorb_operands(node)
                _absorb_result(node)
        erase_dead(joint.graph)
        return joint


def _absorb_operands(node: fx.Node) -> None:
    terms = list(parse_equation(str(node.args[2])))
    operands = [tensor_at(node, 0), tensor_at(node, 1)]
    for position, operand in enumerate(operands):
        while operand.target is aten.permute.default:
            words = dict(zip(ints_at(operand, 1), terms[position], strict=True))
            terms[position] = tuple(words[d] for d in range(len(words)))
            operand = tensor_at(operand)
        operands[position] = operand
    node.args = (*operands, format_equation(*terms))


def _absorb_result(node: fx.Node) -> None:
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is not aten.permute.default:
            return
        a, b, result = parse_equation(str(node.args[2]))
        reordered = [result[d] for d in ints_at(user, 1)]
        node.args = (*node.args[:2], format_equation(a, b, reordered))
        node.meta["val"] = user.meta["val"]
        user.replace_all_uses_with(node)
        node.graph.erase_node(user)
