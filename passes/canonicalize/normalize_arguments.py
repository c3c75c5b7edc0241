"""One spelling of each op, and nothing computed twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import fx

from passes.ir.graph_pass import GraphPass, OpPass, int_at, ints_at, replace, shape_of, tensor_at
from passes.ir.graph_properties import NO_USES, Property, described, of_ops
from passes.ir.joint import JointGraph
from passes.ir.op_traits import draws, named_arguments, slice_ends

aten = torch.ops.aten


def _misspelled(node: fx.Node) -> str | None:
    normalize = _TABLE.get(node.target)
    found = None if normalize is None else normalize(node)
    if found is None or found == (node.target, node.args, node.kwargs):
        return None
    op, args, kwargs = found
    return f"with {node.args[1:]} {node.kwargs} where {op} has {args[1:]} {kwargs}"


ONE_SPELLING = of_ops("views, dims and sizes have one spelling", _misspelled)


class NormalizeArguments(OpPass):
    """Say one thing in one way: one op per kind of view, concrete sizes, dims counted from the left.

        %t: f32[16, 8]    = aten.permute(%w, [-1, 0])    // %w: f32[8, 16]
        %v: f32[4, 2, 16] = aten.view(%x, [4, -1, 16])   // %x: f32[8, 16]
        %s: f32[4, 2, 1]  = aten.sum(%v, [-1], True)
        ->
        %t: f32[16, 8]    = aten.permute(%w, [1, 0])
        %v: f32[4, 2, 16] = aten.reshape(%x, [4, 2, 16])
        %s: f32[4, 2, 1]  = aten.sum(%v, [2], True)

    `reshape`, not `view`: strides carry no meaning in a canonical graph, and a shard of a tensor need
    not be laid out like the tensor.
    """

    ensures = (ONE_SPELLING,)

    def rewrite(self, node: fx.Node) -> None:
        normalize = _TABLE.get(node.target)
        if normalize is not None:
            node.target, node.args, node.kwargs = normalize(node)


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _named(node: fx.Node) -> dict[str, Any]:
    return named_arguments(node.target, node.args, node.kwargs)


def _op(node: fx.Node) -> Callable[..., Any]:
    return cast(Callable[..., Any], node.target)


def _ndim(node: fx.Node) -> int:
    return len(shape_of(tensor_at(node)))


def _positive(dims: Sequence[int], ndim: int) -> list[int]:
    return [d % ndim if ndim else 0 for d in dims]


def _reshape(node: fx.Node) -> Call:
    return aten.reshape.default, (node.args[0], list(shape_of(node))), {}


def _permute(node: fx.Node) -> Call:
    return aten.permute.default, (node.args[0], _positive(ints_at(node, 1), _ndim(node))), {}


def _expand(node: fx.Node) -> Call:
    return aten.expand.default, (node.args[0], list(shape_of(node))), {}


def _slice(node: fx.Node) -> Call:
    x, dim, start, end, step = _named(node).values()
    dim %= _ndim(node)
    low, high = slice_ends(start, end, shape_of(x)[dim])
    return aten.slice.Tensor, (x, dim, low, high, step), {}


def _select(node: fx.Node) -> Call:
    x, dim = tensor_at(node), int_at(node, 1) % _ndim(node)
    return aten.select.int, (x, dim, int_at(node, 2) % shape_of(x)[dim]), {}


def _reduction(node: fx.Node) -> Call:
    """op(x, dims, keepdim): an empty or absent list of dims means all of them."""
    named, ndim = _named(node), _ndim(node)
    dims = _positive(named["dim"], ndim) if named["dim"] else list(range(ndim))
    kwargs = {k: v for k, v in node.kwargs.items() if k == "dtype" and v is not None}
    return _op(node), (node.args[0], dims, bool(named["keepdim"])), kwargs


def _dims_at(position: int, name: str = "dim") -> Callable[[fx.Node], Call]:
    """For an op whose argument `position`, of that name, is a dim, or dims, of its operand (or else its result)."""

    def normalize(node: fx.Node) -> Call:
        ndim = _ndim(node) if isinstance(node.args[0], fx.Node) else len(shape_of(node))
        given = _named(node)[name]
        dims = given % max(ndim, 1) if isinstance(given, int) else _positive(given, ndim)
        kwargs = {k: v for k, v in node.kwargs.items() if k != name}
        return _op(node), (*node.args[:position], dims, *node.args[position + 1 :]), kwargs

    return normalize


VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
REDUCTIONS = (aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.any.dims, aten.all.dims)
_ONE_DIM = (
    aten.gather.default,
    aten.scatter.value,
    aten.scatter.src,
    aten.scatter_add.default,
    aten.cumsum.default,
    aten.cat.default,
)


_TABLE: dict[Any, Callable[[fx.Node], Call]] = {
    **dict.fromkeys(VIEWS, _reshape),
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(_ONE_DIM, _dims_at(1)),
    aten.flip.default: _dims_at(1, "dims"),
    aten.roll.default: _dims_at(2, "dims"),
    aten.split_with_sizes.default: _dims_at(2),
}


def _identity(node: fx.Node) -> Hashable:
    return node.target, _key(node.args), _key(node.kwargs)


def _duplicate(joint: JointGraph) -> str | None:
    first: dict[Hashable, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.op == "call_function" and _mergeable(node):
            twin = first.setdefault(_identity(node), node)
            if twin is not node:
                return f"{described(node)}: computes what %{twin.name} does"
    return None


NO_DUPLICATES = Property("nothing is computed twice", _duplicate)


class MergeDuplicates(GraphPass):
    """Compute a common subexpression (same op, same arguments) once, where it first appears.

        %a: f32[8] = aten.exp(%x)
        %b: f32[8] = aten.exp(%x)
        %y: f32[8] = aten.add(%a, %b)
        ->
        %a: f32[8] = aten.exp(%x)
        %y: f32[8] = aten.add(%a, %a)

    An op of the backward and its twin in the forward become one of the forward: whether to save the value or to
    compute it again is
    decided when the phases are split. Not merged: random ops; `clone`, kept only where identity
    matters; constants with dims, which are free and should each take the layout of their reader.
    """

    requires = (ONE_SPELLING, NO_USES)
    ensures = (NO_DUPLICATES,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        first: dict[Hashable, fx.Node] = {}
        for node in list(joint.graph.nodes):
            if node.op != "call_function" or not _mergeable(node):
                continue
            twin = first.setdefault(_identity(node), node)
            if twin is not node:
                # The twin may stand first and yet be the backward's: tracing orders by use, not by phase.
                if node.meta["phase"] == "forward":
                    twin.meta["phase"] = "forward"
                replace(node, twin)
        return joint


def _mergeable(node: fx.Node) -> bool:
    if node.target is aten.full.default:
        return not node.args[0]
    return node.target is not aten.clone.default and not draws(node)


def _key(argument: Any) -> Hashable:
    """Equal keys mean the same argument: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in sorted(argument.items()))
    if isinstance(argument, float):
        return float, repr(argument)
    return type(argument), argument
