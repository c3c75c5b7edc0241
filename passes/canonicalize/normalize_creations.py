from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.ir.graph_pass import GraphPass
from passes.ir.graph_properties import NO_DEAD_CODE
from passes.ir.joint import JointGraph
from passes.ir.op_schema import named_arguments
from passes.ir.properties import of_ops

__all__ = ["FILLS", "PLAIN_CREATIONS", "RANGES", "NormalizeCreations"]

aten = torch.ops.aten


def _creates_otherwise(node: fx.Node) -> str | None:
    plain = node.target in (aten.full.default, aten.arange.start_step)
    if not plain:
        return "a constant or a range in other words" if node.target in {*FILLS, *RANGES} else None
    return None if {"dtype", "device"} <= set(node.kwargs) else "leaves dtype or device to a default"


PLAIN_CREATIONS = of_ops("constants are `full`, ranges `arange.start_step`", _creates_otherwise)


@dataclass(frozen=True)
class NormalizeCreations(GraphPass):
    """Make every constant tensor a `full` and every range an `arange.start_step`.

        %z: f32[8, 16] = aten.zeros_like(%x)
        %r: i64[16]    = aten.arange(16)
        ->
        %z: f32[8, 16] = aten.full([8, 16], 0, dtype=float32, device=cpu)
        %r: i64[16]    = aten.arange(0, 16, 1, dtype=int64, device=cpu)

    A creation reads no tensor, so it can be made in any layout for nothing; `zeros_like(%x)` would
    tie it to the layout of %x and keep %x alive. Uninitialised memory becomes zeros.
    """

    ensures = (PLAIN_CREATIONS,)
    breaks = (NO_DEAD_CODE,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in joint.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target in FILLS:
                _to_full(node, FILLS[node.target](node))
            elif node.target in RANGES:
                _to_arange(node)
        return joint


def _to_full(node: fx.Node, value: Any) -> None:
    like = node.meta["val"]
    node.target = aten.full.default
    node.args = (list(like.shape), value)
    node.kwargs = {"dtype": like.dtype, "device": like.device}


def _to_arange(node: fx.Node) -> None:
    like, given = node.meta["val"], named_arguments(node.target, node.args, node.kwargs)
    node.target = aten.arange.start_step
    node.args = (given.get("start", 0), given["end"], given.get("step", 1))
    node.kwargs = {"dtype": like.dtype, "device": like.device}


def _argument(name: str) -> Callable[[fx.Node], Any]:
    return lambda node: named_arguments(node.target, node.args, node.kwargs)[name]


_ZEROS = (
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.zero.default,
)
FILLS: dict[Any, Callable[[fx.Node], Any]] = {
    **dict.fromkeys(_ZEROS, lambda node: 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda node: 1),
    aten.full.default: _argument("fill_value"),
    aten.full_like.default: _argument("fill_value"),
    aten.new_full.default: _argument("fill_value"),
    aten.fill.Scalar: _argument("value"),
    aten.scalar_tensor.default: _argument("s"),
}


RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
