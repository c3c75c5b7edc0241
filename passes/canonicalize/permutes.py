"""Products and the permutes around them: products name their loops, and read operands in their own order of dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import passes.ops.layer_ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::contract)
from passes.canonicalize.normalize_arguments import NO_DUPLICATES, ONE_SPELLING
from passes.ir.graph_pass import OpPass, call_like, emit, ints_at, replace, shape_of, tensor_at
from passes.ir.graph_properties import NO_DEAD_CODE, NO_USES, of_ops
from passes.ops.layer_ops import format_equation, parse_equation
from passes.ops.routed_ops import ROUTED

aten = torch.ops.aten


def _reads(op: Any, view: Any) -> Callable[[fx.Node], str | None]:
    """A complaint of an `op` that reads a `view`."""

    def complaint(node: fx.Node) -> str | None:
        read = [operand.name for operand in node.all_input_nodes if operand.target is view]
        return f"reads %{read[0]}, a {view.overloadpacket.__name__}" if node.target is op and read else None

    return complaint


PERMUTES_FUSED = of_ops("no permute reads a permute", _reads(aten.permute.default, aten.permute.default))
ONE_RESHAPE = of_ops("no reshape reads a reshape", _reads(aten.reshape.default, aten.reshape.default))
PERMUTES_ABSORBED = of_ops(
    "no contract reads a permute", _reads(torch.ops.autoshard.contract.default, aten.permute.default)
)


EQUATIONS: dict[Any, str] = {
    aten.mm.default: "m k, k n -> m n",
    aten.bmm.default: "b m k, b k n -> b m n",
    aten.mv.default: "m k, k -> m",
    aten.dot.default: "k, k -> ",
}


PRODUCTS_ARE_CONTRACTS = of_ops(
    "no product but contracts", lambda node: "is one" if node.target in EQUATIONS else None
)


class MatmulToContract(OpPass):
    """Write every matrix product as a `contract`, which names its loops.

        %y: f32[8, 32] = aten.mm(%x, %w)
        ->
        %y: f32[8, 32] = contract(%x, %w, "m k, k n -> m n")

    m: rows, n: columns, k: summed, b: batch. Later passes give the operands their dims back.
    """

    ensures = (PRODUCTS_ARE_CONTRACTS,)

    def rewrite(self, node: fx.Node) -> None:
        if node.target in EQUATIONS:
            node.args = (*node.args, EQUATIONS[node.target])
            node.target = torch.ops.autoshard.contract.default


class FusePermutes(OpPass):
    """Make a permute of a permute one permute, or none.

    %a: f32[16, 8] = aten.permute(%x, [1, 0])
    %b: f32[8, 16] = aten.permute(%a, [1, 0])
    ->
    %x itself
    """

    requires = (ONE_SPELLING, NO_USES)
    ensures = (PERMUTES_FUSED,)
    breaks = (NO_DUPLICATES, ONE_RESHAPE)

    def rewrite(self, node: fx.Node) -> None:
        if node.target is not aten.permute.default:
            return
        inner, order = tensor_at(node), ints_at(node, 1)
        if inner.target is aten.permute.default:
            first = ints_at(inner, 1)
            order = [first[d] for d in order]
            inner = tensor_at(inner)
            node.args = (inner, order)
        if order == sorted(order):
            replace(node, inner)


class AbsorbPermutes(OpPass):
    """Let a `contract` read its operands and write its result in their own dim order.

        %t: f32[16, 32]    = aten.permute(%w, [1, 0])                          // %w: f32[32, 16]
        %y: f32[2, 8, 32]  = contract(%x, %t, "m0 m1 k, k n -> m0 m1 n")
        %z: f32[32, 2, 8]  = aten.permute(%y, [2, 0, 1])
        ->
        %y: f32[32, 2, 8]  = contract(%x, %w, "m0 m1 k, n k -> n m0 m1")

    A weight and its gradient then appear in the order that the user gave them. The result's permute
    is taken in only where nothing else reads the product. Matrices of experts likewise: `turned`.
    """

    requires = (ONE_SPELLING, NO_USES, PRODUCTS_ARE_CONTRACTS)
    ensures = (PERMUTES_ABSORBED,)
    breaks = (NO_DUPLICATES,)

    def rewrite(self, node: fx.Node) -> None:
        if node.target is torch.ops.autoshard.contract.default:
            _absorb_operands(node)
            _absorb_result(node)
        elif node.target in ROUTED:
            _turn(node)


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


def _turn(node: fx.Node) -> None:
    """Read, or make, the matrices of experts with rows and columns as they are stored."""
    if node.target is torch.ops.autoshard.routed_mm.default:
        while (b := tensor_at(node, 1)).target is aten.permute.default and ints_at(b, 1) == [0, 2, 1]:
            node.update_arg(1, tensor_at(b))
            node.kwargs = {"turned": not node.kwargs.get("turned", False)}
    elif len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.permute.default and ints_at(user, 1) == [0, 2, 1]:
            a, b, *groups = node.args
            node.args = (b, a, *groups)
            node.meta["val"] = user.meta["val"]
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)


class DropUnitDims(OpPass):
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

    def rewrite(self, node: fx.Node) -> None:
        if node.target is aten.permute.default:
            _permute(node)
        elif node.target is torch.ops.autoshard.contract.default:
            _contract(node)


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
