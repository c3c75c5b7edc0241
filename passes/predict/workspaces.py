"""Bytes that an op has for itself while it runs, beside its operands and results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from cost_model.measure import timed_messages as messages
from passes.ir.joint import node_value, results_nbytes
from passes.ops.uniform import UNIFORM_WORDS
from passes.predict.step_events import COLLECTIVE_KINDS
from passes.strategies.pricing import TrafficModel, eager_traffic

__all__ = ["Copies", "copies_on", "no_copies", "workspace"]

Copies = Callable[[fx.Node], int]
"""Bytes that whoever moves a collective's data copies it into, from its start to its wait."""


def workspace(node: fx.Node, traffic: TrafficModel) -> int:
    """Of an op that runs as several, where they run op by op: of random numbers."""
    if traffic is not eager_traffic or node.target is not torch.ops.autoshard.uniform.default:
        return 0
    value = node_value(node)
    return value.numel() * (8 * UNIFORM_WORDS - value.element_size())


def copies_on(device_type: str) -> Copies:
    """Of collectives between devices of that type."""
    return _gloo_copies if device_type == "cpu" else no_copies


def no_copies(node: fx.Node) -> int:
    """NCCL moves data from and to the tensors themselves; its buffers are in a plan's reserve."""
    return 0


def _gloo_copies(node: fx.Node) -> int:
    """gloo gathers into a flat tensor of its own, and reduces a copy of what it scatters; it reduces for all in place.
    [torch/csrc/distributed/c10d/ProcessGroupGloo.cpp]"""
    kind = COLLECTIVE_KINDS.get(node.target)
    (operand,) = node.all_input_nodes[:1]
    if kind == "all_gather":
        part, ranks = node_value(operand), int(node.args[1])  # type: ignore[arg-type]
        return 0 if messages.in_one_round("all_gather", part, ranks) else results_nbytes(node)
    return results_nbytes(operand) if kind == "reduce_scatter" else 0
