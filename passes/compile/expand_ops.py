"""Replace autoshard's own ops by the ATen ops they stand for, so that a compiler can fuse them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.ir.fake_calls import looks
from passes.ir.joint import map_operands, tensor_operands
from passes.ir.op_traits import is_collective, is_use
from passes.ir.process_state import autocast_off
from passes.ir.torch_compat import custom_op_body, fake_mode_of, fresh_fakes, lazy_module, ops_run_by
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
