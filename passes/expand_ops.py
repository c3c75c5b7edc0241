"""Replace autoshard's own ops by the ATen ops they stand for, so that a compiler can fuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from passes.ops import (
    attention,
    attention_backward,
    circular_pad,
    circular_pad_backward,
    neighborhood_attention,
    neighborhood_attention_backward,
    uniform_reference,
)
from passes.ops.contract import contract_reference
from passes.torch_compat import custom_op_body, fake_mode_of, fresh_fakes

__all__ = ["expand_ops"]

# Op -> the function that computes it in ATen ops.
_REFERENCES: dict[str, Callable[..., Any]] = {
    "autoshard.contract.default": contract_reference,
    "autoshard.uniform.default": uniform_reference,
    "autoshard.attention.default": custom_op_body(attention),
    "autoshard.attention_backward.default": custom_op_body(attention_backward),
    "autoshard.circular_pad.default": custom_op_body(circular_pad),
    "autoshard.circular_pad_backward.default": custom_op_body(circular_pad_backward),
    "autoshard.neighborhood_attention.default": custom_op_body(neighborhood_attention),
    "autoshard.neighborhood_attention_backward.default": custom_op_body(neighborhood_attention_backward),
}


def expand_ops(module: fx.GraphModule) -> fx.GraphModule:
    """A module without ops of the namespace `autoshard`; other nodes keep name and meta.

    %y: f32[4, 8, 32] = autoshard.contract(%x, %w, "b s k, n k -> b s n")
    ->
    %1: f32[16, 32] = view(%w, ...); ... ; %3 = mm(%1, %2); %y: f32[4, 8, 32] = view(%3, [4, 8, 32])
    """
    graph = fx.Graph()
    new: dict[fx.Node, Any] = {}
    traced: dict[Any, fx.Graph] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(map_arg(node.args[0], new.__getitem__))
        elif str(node.target) == "autoshard.use.default":
            new[node] = new[node.args[0]]  # type: ignore[index]
        elif str(node.target) in _REFERENCES:
            new[node] = _inline(graph, node, new, traced)
        elif isinstance(new.get(node.args[0] if node.args else None), tuple):  # type: ignore[arg-type]
            new[node] = new[node.args[0]][node.args[1]]  # type: ignore[index]  # getitem of an inlined op
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def _inline(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, Any], traced: dict[Any, fx.Graph]) -> Any:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    values = [n.meta["val"] for n in operands]
    described = tuple(_described(leaf) for leaf in leaves)
    key = (node.target, described, spec)
    if key not in traced:
        traced[key] = _trace(_REFERENCES[str(node.target)], leaves, spec, values)
    inlined = traced[key]
    places = [n for n in inlined.nodes if n.op == "placeholder"]
    inner: dict[fx.Node, Any] = {p: new[o] for p, o in zip(places, operands, strict=True)}
    result = graph.graph_copy(inlined, inner)
    for old, made in inner.items():
        if old.op == "call_function":
            made.meta = {**node.meta, "val": old.meta["val"]}
    return tuple(result) if isinstance(result, (tuple, list)) else result


def _described(leaf: Any) -> Any:
    """What decides the trace: of a tensor its shape, strides, dtype and device, else the value."""
    if not isinstance(leaf, fx.Node):
        return leaf
    value = leaf.meta["val"]
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _trace(
    reference: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec, values: list[torch.Tensor]
) -> fx.Graph:
    def run(*tensors: torch.Tensor) -> Any:
        queue = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(queue) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], spec
        )
        return reference(*args, **kwargs)

    fakes = fresh_fakes(values)
    with fake_mode_of(tuple(fakes)):  # for what the reference creates itself
        return make_fx(run)(*fakes).graph
