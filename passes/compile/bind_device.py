"""A rank's graph where it runs: moved from the CPU, where all graphs are made, to its device; collectives' operands
written where their buckets are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

import passes.ops.layer_ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::contract)
from passes.compile.fuse_eager import VIEWS
from passes.compile.join_linears import OpWriter
from passes.ir.graph_pass import RankPass
from passes.ir.graph_properties import COLLECTIVES, FUNCTIONAL, is_start
from passes.ir.joint import node_value
from passes.ir.torch_compat import fakes_on


def bind_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """`module`, in place, on `device`: the values of all nodes, and the device arguments of ops that make tensors.

        %m: f32[8] = aten.full([8], 1.0, device=cpu)       // "val" on the CPU
        ->
        %m: f32[8] = aten.full([8], 1.0, device=cuda:1)    // "val" on cuda:1

    Sizes, strides and dtypes stay. The new values are fakes of one mode, and require no gradient: autograd cannot
    follow fakes of a device that this torch cannot drive.

    Requires: every value is on the CPU; no op depends on where it runs.
    Ensures:  every value and every device argument is `device`; nothing changes if that is the CPU.
    """
    if device.type == "cpu":
        return module
    nodes = list(module.graph.nodes)
    moved = iter(fakes_on(device, [value for node in nodes for value in _values(node)]))
    there = lambda item: device if isinstance(item, torch.device) else item
    for node in nodes:
        if "val" in node.meta:
            node.meta["val"] = _replaced(node.meta["val"], moved)
        if node.op == "call_function":
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), there)
    module.recompile()
    return module


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _replaced(value: Any, moved: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(next(moved) if isinstance(item, torch.Tensor) else item for item in value)
    return next(moved) if isinstance(value, torch.Tensor) else value


aten = torch.ops.aten

_INTO: Mapping[Any, Any] = {
    aten.add.Tensor: aten.add.out,
    aten.addmm.default: aten.addmm.out,
    aten.bmm.default: aten.bmm.out,
    aten.mm.default: aten.mm.out,
    aten.mul.Tensor: aten.mul.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
}
"""Overloads, and those that write the same result where they are told. Of other ops torch makes such overloads by a
copy."""
_CONTRACT = torch.ops.autoshard.contract.default
"""Becomes a product of matrices; where that is turned afterwards, its value is not contiguous."""


class WriteIntoBuckets(RankPass):
    """A bucket is made before what it joins, and that is computed in its place there instead of being copied.

        %g: f32[8, 4] = mm(%a, %b)                %c: f32[48]   = empty([48])
        %v: f32[32]   = view(%g, [32])            %p: f32[8, 4] = as_strided(%c, [8, 4], [4, 1], 0)
        %c: f32[48]   = cat(%v, %n)        ->     %g: f32[8, 4] = mm.out(%a, %b, out=%p)
        %r: f32[48]   = all_reduce_(%c)           %q: f32[16]   = as_strided(%c, [16], [1], 32)
                                                  _foreach_copy_([%q], [%n])
                                                  %r: f32[48]   = all_reduce_(%c)

    Legal where nothing but the bucket reads what is written. The last of the passes: afterwards the graph is
    functional no more. Once it is full a bucket has no parts beside it, but it is there, whole, from the first on.
    """

    breaks = (FUNCTIONAL,)
    keeps = (COLLECTIVES,)

    def rewrite(self, graph: fx.Graph) -> None:
        place = {node: i for i, node in enumerate(graph.nodes)}
        for bucket in list(graph.nodes):
            written = written_into(bucket)
            if written:
                first = min(written.values(), key=place.__getitem__)
                _write(graph, bucket, written, first)
        graph.lint()


def written_into(bucket: fx.Node) -> Mapping[int, fx.Node]:
    """Place among the parts of `bucket` -> the op that writes it there; none where it stays a copy of all. Of ATen ops,
    and of those that become them."""
    if bucket.target is not aten.cat.default or list(map(is_start, bucket.users)) != [True]:
        return {}
    parts: Sequence[fx.Node] = bucket.args[0]  # type: ignore[assignment]
    whole = node_value(bucket)
    if whole.ndim != 1 or len(set(parts)) < len(parts):
        return {}
    found: dict[int, fx.Node] = {}
    start = 0
    for place, part in enumerate(parts):
        made = _made(part)
        if made is not None and _fits(node_value(made), whole, start):
            found[place] = made
        start += node_value(part).numel()
    saved = sum(node_value(made).numel() for made in found.values()) * whole.element_size()
    # Bytes that are not copied, for each part of a bucket that still is: a copy of its own costs an
    # interpreter about as much as these.
    return found if saved >= 2**16 * max(1, len(parts) - len(found)) else {}


def _made(part: fx.Node) -> fx.Node | None:
    """The op whose result `part` is, flattened, if nothing else reads it."""
    node = part
    while node.target in VIEWS and len(node.users) == 1:
        (node,) = node.all_input_nodes
    writes = node.target in _INTO or node.target is _CONTRACT
    return node if writes and len(node.users) == 1 else None


def _fits(value: Tensor, bucket: Tensor, start: int) -> bool:
    alike = value.dtype == bucket.dtype and value.is_contiguous()
    # Kernels are slower where a result begins between two multiples of 16 bytes.
    return alike and start * bucket.element_size() % 16 == 0


def _write(graph: fx.Graph, bucket: fx.Node, written: Mapping[int, fx.Node], first: fx.Node) -> None:
    write = OpWriter(graph)
    value = node_value(bucket)
    with graph.inserting_before(first):
        like: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        empty = graph.call_function(aten.empty.memory_format, ([value.numel()],), like)
        empty.meta = dict(bucket.meta)
    parts: Sequence[fx.Node] = bucket.args[0]  # type: ignore[assignment]
    copied: list[tuple[fx.Node, fx.Node]] = []
    start = 0
    for place, part in enumerate(parts):
        made = written.get(place)
        shape = list(node_value(part if made is None else made).shape)
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        with graph.inserting_before(bucket if made is None else made):
            into = write(part, aten.as_strided.default, empty, shape, strides, start)
            if made is not None:
                out = graph.call_function(_INTO[made.target], made.args, {**made.kwargs, "out": into})
                out.meta = dict(made.meta)
            else:
                copied.append((into, part))
        start += math.prod(shape)
    if copied:
        with graph.inserting_before(bucket):
            copy = graph.call_function(
                aten._foreach_copy_.default, tuple(map(list, zip(*copied, strict=True)))
            )
            copy.meta = {**bucket.meta, "val": [node_value(into) for into, _ in copied]}
    bucket.replace_all_uses_with(empty)
    graph.erase_node(bucket)
    for place, made in written.items():
        node = parts[place]
        while node is not made:
            (viewed,) = node.all_input_nodes
            graph.erase_node(node)
            node = viewed
        graph.erase_node(made)
