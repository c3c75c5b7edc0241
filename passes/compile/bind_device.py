"""A rank's graph where it runs: moved from the CPU, where all graphs are made, to its device; collectives' operands
written where their buckets are; and autoshard's own ops as the ATen ops they stand for, so that a compiler can fuse
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

import passes.ops.layer_ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::contract)
from passes.compile.fuse_eager import VIEWS
from passes.compile.join_linears import OpWriter
from passes.ir.graph_pass import RankPass
from passes.ir.graph_properties import COLLECTIVES, FUNCTIONAL, is_start
from passes.ir.joint import looks, map_operands, node_value, tensor_operands, tensors_of
from passes.ir.op_traits import is_collective, is_use
from passes.ir.process_state import autocast_off
from passes.ir.torch_compat import custom_op_body, fake_mode_of, lazy_module, ops_run_by
from passes.ir.torch_sizes import fakes_on, fresh_fakes
from passes.ops import (
    circular_pad,
    circular_pad_backward,
    neighborhood_attention,
    neighborhood_attention_backward,
    uniform_reference,
)
from passes.ops.attention_op import attention_backward_reference, attention_reference
from passes.ops.attention_table import Chip
from passes.ops.layer_ops import contract_reference
from passes.ops.routed_ops import (
    grouped_mm_reference,
    own_rows_reference,
    routed_mm_reference,
    routed_outer_reference,
    sum_rows_reference,
)


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
    moved = iter(fakes_on(device, [value for node in nodes for value in tensors_of(node)]))
    there = lambda item: device if isinstance(item, torch.device) else item
    value_there = lambda item: next(moved) if isinstance(item, torch.Tensor) else item
    for node in nodes:
        if "val" in node.meta:
            node.meta["val"] = map_aggregate(node.meta["val"], value_there)
        if node.op == "call_function":
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), there)
    module.recompile()
    return module


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


# Op -> the function that computes it in ATen ops.
_REFERENCES: dict[str, Callable[..., Any]] = {
    "autoshard.contract.default": contract_reference,
    "autoshard.grouped_mm.default": grouped_mm_reference,
    "autoshard.routed_mm.default": routed_mm_reference,
    "autoshard.routed_outer.default": routed_outer_reference,
    "autoshard.own_rows.default": own_rows_reference,
    "autoshard.sum_rows.default": sum_rows_reference,
    "autoshard.uniform.default": uniform_reference,
    "autoshard.circular_pad.default": custom_op_body(circular_pad),
    "autoshard.circular_pad_backward.default": custom_op_body(circular_pad_backward),
    "autoshard.neighborhood_attention.default": custom_op_body(neighborhood_attention),
    "autoshard.neighborhood_attention_backward.default": custom_op_body(neighborhood_attention_backward),
}


CALLED: Mapping[str, Callable[..., Any]] = {
    "autoshard.uniform.default": uniform_reference,
    "autoshard.grouped_mm.default": grouped_mm_reference,
}
"""What runs as well op by op when the function is simply called: no two calls are alike, and tracing each takes longer
than all else that eager needs; or how many rows there are is known at run time."""


@autocast_off()
def expand_ops(
    module: fx.GraphModule,
    chip: Chip | None = None,
    called: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    traced: dict[Any, fx.Graph] | None = None,
) -> fx.GraphModule:
    """A module without ops of the namespace `autoshard`, but for CTC losses and for grouped products that only a loop
    computes. Other nodes keep name and meta.

    chip: the CUDA device that the graph is for; None: the devices of its tensors are asked, where a kernel depends
    on them. called: ops that become calls of the functions given, as they are. traced: what other modules of the same
    `chip` and symbols have become, to which this one's ops are added.
    Raises UnsupportedOpError for an attention whose operands break its kernel's contract, or whose device is
    not known here.

    %y: f32[4, 8, 32] = autoshard.contract(%x, %w, "b s k, n k -> b s n")
    ->
    %1: f32[16, 32] = view(%w, ...); ... ; %3 = mm(%1, %2); %y: f32[4, 8, 32] = view(%3, [4, 8, 32])
    """
    graph = fx.Graph()
    new: dict[fx.Node, Any] = {}
    traced = {} if traced is None else traced
    references = {
        **_REFERENCES,
        "autoshard.attention.default": partial(attention_reference, chip=chip),
        "autoshard.attention_backward.default": partial(attention_backward_reference, chip=chip),
    }
    unread: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(map_arg(node.args[0], new.__getitem__))
        elif is_use(node):
            new[node] = new[node.args[0]]  # type: ignore[index]
        elif str(node.target) in called:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].target = called[str(node.target)]
        elif str(node.target) in references:
            new[node] = _inline(graph, node, new, traced, references[str(node.target)])
            unread += [new[operand] for operand in tensor_operands(node)]
        elif isinstance(new.get(node.args[0] if node.args else None), tuple):  # type: ignore[arg-type]
            new[node] = new[node.args[0]][node.args[1]]  # type: ignore[index]  # getitem of an inlined op
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    _erase_unread(graph, unread)
    graph.lint()
    return lazy_module(graph)


def _erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """And what only they read. Not collectives: a product of no rows reads nothing of what came, and other ranks wait
    for what this one sends."""
    left = list(dict.fromkeys(nodes))
    while left:
        node = left.pop()
        if node.op == "call_function" and not node.users and not is_collective(node):
            operands = node.all_input_nodes
            graph.erase_node(node)
            left += operands


def _inline(
    graph: fx.Graph,
    node: fx.Node,
    new: dict[fx.Node, Any],
    traced: dict[Any, fx.Graph],
    reference: Callable[..., Any],
) -> Any:
    operands = tensor_operands(node)
    key = (node.target, looks((node.args, node.kwargs)))
    if key not in traced:
        traced[key] = _trace(reference, node, [n.meta["val"] for n in operands])
    inlined = traced[key]
    places = [n for n in inlined.nodes if n.op == "placeholder"]
    inner: dict[fx.Node, Any] = {p: new[o] for p, o in zip(places, operands, strict=True)}
    result = graph.graph_copy(inlined, inner)
    for old, made in inner.items():
        if old.op == "call_function":
            made.meta = {**node.meta, "val": old.meta["val"]}
            if made is not result:
                made.meta.pop("timed", None)  # it runs if the result does
    return tuple(result) if isinstance(result, (tuple, list)) else result


def _trace(reference: Callable[..., Any], node: fx.Node, values: list[torch.Tensor]) -> fx.Graph:
    def run(*tensors: torch.Tensor) -> Any:
        args, kwargs = map_operands(node, tensors)
        return reference(*args, **kwargs)

    fakes = fresh_fakes(values)
    with fake_mode_of(tuple(fakes)):  # for what the reference creates itself
        starts = [_started(fake, value) for fake, value in zip(fakes, values, strict=True)]
        graph = ops_run_by(run, starts)
    # torch's kernels return None and numbers beside tensors: getitems without "val", which nothing reads.
    graph.eliminate_dead_code()
    return graph


def _started(fake: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`fake` at the start in its storage that `value` has: a kernel may want aligned addresses."""
    start = value.storage_offset()
    if start == 0 or value.numel() == 0:
        return fake
    span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    return fake.new_empty(start + span).as_strided(value.shape, value.stride(), start)
