"""Ops called by torch's own functions: what Python scripts call costs an interpreter less than `torch.ops`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

__all__ = ["call_directly"]

aten = torch.ops.aten

_FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.add.Tensor: torch.add,
        aten.addmm.default: torch.addmm,
        aten.cat.default: torch.cat,
        aten.clone.default: torch.clone,
        aten.convolution.default: torch.convolution,
        aten.div.Tensor: torch.div,
        aten.embedding.default: torch.embedding,
        aten.exp.default: torch.exp,
        aten.gather.default: torch.gather,
        aten.log.default: torch.log,
        aten.matmul.default: torch.matmul,
        aten.mm.default: torch.mm,
        aten.mul.Tensor: torch.mul,
        aten.native_layer_norm.default: torch.native_layer_norm,
        aten.neg.default: torch.neg,
        aten.permute.default: torch.permute,
        aten.relu.default: torch.relu,
        aten.reshape.default: torch.reshape,
        aten.rsqrt.default: torch.rsqrt,
        aten.select.int: torch.select,
        aten.sub.Tensor: torch.sub,
        aten.sum.dim_IntList: torch.sum,
        aten.view.default: torch.Tensor.view,
        aten.where.self: torch.where,
    }
)
"""Overloads, and functions that run them for the same arguments in the same places."""


def call_directly(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, in place, with overloads exchanged for torch's functions; the same kernels run.

    For a program that is about to run: passes know ops by their overloads.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in _FUNCTIONS:
            node.target = _FUNCTIONS[node.target]
    module.recompile()
    return module
