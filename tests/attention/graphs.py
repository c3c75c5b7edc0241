"""One attention and its gradient as a graph of fakes on CUDA, as a rank's graph has them; and its kernels."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from passes import ops  # noqa: F401  # pyright: ignore[reportUnusedImport]
from passes.compile.bind_device import expand_ops
from passes.ir.torch_compat import fake_mode_of
from passes.ir.torch_tracing import fake_tensors
from passes.ops.attention_table import Chip

MaskShape = Literal["none", "bool", "float", "broadcast", "row", "turned", "sliced"]
MASKS: tuple[MaskShape, ...] = ("none", "bool", "float", "broadcast", "row", "turned", "sliced")
Order = Literal["bshd", "bhsd", "sliced", "turned"]

_KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "bmm": "math",
}
COPIES = ("clone", "constant_pad_nd", "contiguous", "_to_copy", "copy", "zeros", "full")
"""Ops that write a tensor which no kernel needed."""


@dataclass(frozen=True)
class Call:
    """Shapes and dtype of one attention; `order`: how q, k, v and the gradient lie in memory. g: heads of k and v."""

    dtype: torch.dtype
    mask: MaskShape = "none"
    causal: bool = False
    d: int = 64
    e: int | None = None
    s: int = 64
    t: int = 64
    order: Order = "bshd"
    b: int = 2
    h: int = 4
    g: int | None = None
    window: int = 0
    documents: bool = False


def empty(shape: Sequence[int], order: Order, like: Tensor) -> Tensor:
    """Of [b, h, s, d], in some order of memory. sliced: every row is part of a longer one, at an odd start."""
    b, h, s, d = shape
    if order == "bshd":
        return like.new_empty(b, s, h, d).transpose(1, 2)
    if order == "bhsd":
        return like.new_empty(b, h, s, d)
    if order == "turned":
        return like.new_empty(b, h, d, s).transpose(2, 3)
    return like.new_empty(b, h, s, d + 1).narrow(-1, 1, d)


def mask_of(call: Call, like: Tensor) -> Tensor | None:
    b, h, s, t = call.b, call.h, call.s, call.t
    match call.mask:
        case "none":
            return None
        case "bool":
            return like.new_empty(b, 1, s, t, dtype=torch.bool)
        case "float":
            return like.new_empty(b, h, s, t)
        case "broadcast":
            return like.new_empty(1, 1, s, 1, dtype=torch.bool)
        case "row":
            return like.new_empty(b, 1, 1, t)
        case "turned":  # the last dim is not contiguous
            return like.new_empty(b, h, t, s).transpose(2, 3)
        case "sliced":
            return like.new_empty(b, 1, s, t + 1).narrow(-1, 1, t)


def graph_of(call: Call, device: str = "cuda:0") -> fx.GraphModule:
    """placeholders q, k, v, mask?, grad; results out, gq, gk, gv. Every value is a fake of one mode."""
    start = fake_tensors([lambda: torch.empty(0, dtype=call.dtype, device=device)])[0]
    with fake_mode_of(start):
        width = call.d if call.e is None else call.e
        q = empty((call.b, call.h, call.s, call.d), call.order, start)
        groups = call.h if call.g is None else call.g
        k = empty((call.b, groups, call.t, call.d), call.order, start)
        v = empty((call.b, groups, call.t, width), call.order, start)
        grad = empty((call.b, call.h, call.s, width), call.order, start)
        graph = fx.Graph()
        operands = [_placeholder(graph, n, x) for n, x in (("q", q), ("k", k), ("v", v))]
        mask = mask_of(call, start)
        operands.append(None if mask is None else _placeholder(graph, "mask", mask))  # type: ignore[arg-type]
        tangent = _placeholder(graph, "grad", grad)
        flags: tuple[Any, ...] = (call.causal, 0.125, *[call.window] * bool(call.window))
        if call.documents:
            sizes = {"documents": call.s, "of_keys": call.t}
            ids = {name: start.new_empty((1, 1, size, 1), dtype=torch.int64) for name, size in sizes.items()}
            flags = (*flags, 0, *(_placeholder(graph, name, x) for name, x in ids.items()))
        forward = torch.ops.autoshard.attention.default
        out, lse = _emit(graph, forward, (*operands, *flags), 2)
        backward = torch.ops.autoshard.attention_backward.default
        gradients = _emit(graph, backward, (tangent, *operands, out, lse, *flags), 3)
    graph.output((out, *gradients))
    return fx.GraphModule(torch.nn.Module(), graph)


def expanded(call: Call, capability: tuple[int, int]) -> fx.GraphModule:
    return expand_ops(graph_of(call), Chip(capability))


def kernels_of(module: fx.GraphModule) -> tuple[str, ...]:
    """Of the attention calls, in order: "flash", "flash_backward", ...; of plain math ("math",)."""
    found: list[str] = []
    for node in module.graph.nodes:
        name = str(node.target).removeprefix("aten.").removesuffix(".default")
        kernel = _KERNELS.get(name.removesuffix("_backward"))
        if kernel is not None:
            found.append(kernel + ("_backward" if name.endswith("_backward") else ""))
    return ("math",) if set(found) == {"math"} else tuple(found)


def copies_of(module: fx.GraphModule) -> list[str]:
    return [n.name for n in module.graph.nodes if str(n.target).split(".")[1:2] and _is_copy(n)]


def _is_copy(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).split(".")[1] in COPIES


def _placeholder(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _emit(graph: fx.Graph, target: Any, args: tuple[Any, ...], count: int) -> list[fx.Node]:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    parts = [graph.call_function(operator.getitem, (node, i)) for i in range(count)]
    for i, part in enumerate(parts):
        part.meta["val"] = node.meta["val"][i]
    return parts
