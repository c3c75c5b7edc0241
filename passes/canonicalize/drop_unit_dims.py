from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from passes.canonicalize.matmul_to_contract import PRODUCTS_ARE_CONTRACTS
from passes.canonicalize.merge_duplicates import NO_DUPLICATES
from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.ir.graph_pass import GraphPass
from passes.ir.graph_properties import NO_DEAD_CODE
from passes.ir.joint import JointGraph
from passes.ir.rewrite import call_like, emit, ints_at, replace, shape_of, tensor_at
from passes.ops.contract import format_equation, parse_equation

__all__ = ["DropUnitDims"]

aten = torch.ops.aten


@dataclass(frozen=True)
class DropUnitDims(GraphPass):
    """Take dims of size 1 out of permutes, where that can help, and of products that batch over them.

        %p: f32[16, 1, 8]  = aten.permute(%x, [2, 0, 1])                    // %x: f32[1, 8, 16]
        %y: f32[1, 16, 32] = contract(%a, %b, "b m k, b k n -> b m n")
        ->
        %q: f32[8, 16]     = aten.reshape(%x, [8, 16])
        %r: f32[16, 8]     = aten.permute(%q, [1, 0])
        %p: f32[16, 1, 8]  = aten.reshape(%r, [16, 1, 8])
        %y                 = likewise "m k, k n -> m n" between reshapes

    `einsum` and packed attention put such dims in and take them out again; as reshapes the two ends
    cancel, and the permute can go into a product. Left alone: a permute that does not move its dims
    of size 1 and has no reshape next to it.
    """

    requires = (ONE_SPELLING, PRODUCTS_ARE_CONTRACTS)
    breaks = (NO_DEAD_CODE, NO_DUPLICATES)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in list(joint.graph.nodes):
            if node.target is aten.permute.default:
                _permute(node)
            elif node.target is torch.ops.autoshard.contract.default:
                _contract(node)
        return joint


def _reshaped(node: fx.Node, x: fx.Node, shape: list[int]) -> fx.Node:
    return emit(node, aten.reshape.default, x, shape)


def _permute(node: fx.Node) -> None:
    x, order = tensor_at(node), ints_at(node, 1)
    shape = shape_of(x)
    moves = any(shape[d] == 1 and d != i for i, d in enumerate(order))
    if not moves and not (1 in shape and any(n.target is aten.reshape.default for n in (x, *node.users))):
        return
    kept = [d for d in range(len(shape)) if shape[d] != 1]
    moved = [kept.index(d) for d in order if d in kept]
    value = _reshaped(node, x, [shape[d] for d in kept])
    if moved != sorted(moved):
        value = emit(node, aten.permute.default, value, moved)
    replace(node, _reshaped(node, value, list(shape_of(node))))


def _contract(node: fx.Node) -> None:
    a, b = tensor_at(node, 0), tensor_at(node, 1)
    terms = parse_equation(str(node.args[2]))
    sizes = dict(zip(terms[0], shape_of(a), strict=True))
    gone = {word for word in terms[0] if sizes[word] == 1 and word in terms[1] and word in terms[2]}
    if not gone:
        return
    left = [tuple(word for word in term if word not in gone) for term in terms]
    operands: list[fx.Node] = []
    for x, term in zip((a, b), terms[:2], strict=True):
        kept = [size for word, size in zip(term, shape_of(x), strict=True) if word not in gone]
        operands.append(_reshaped(node, x, kept))
    product = call_like(node, *operands, format_equation(*left))
    replace(node, _reshaped(node, product, list(shape_of(node))))
