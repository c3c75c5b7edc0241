"""Bytes that an op has for itself while it runs, beside its operands and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from cost_model.measure import own_collectives as own
from passes.ir.joint import node_value, results_nbytes
from passes.ops.uniform import UNIFORM_WORDS
from passes.predict.convolution_copies import convolution_copies
from passes.predict.step_events import COLLECTIVE_KINDS, AxesOf
from passes.strategies.prices import Prices
from passes.strategies.traffic import TrafficModel, eager_traffic

Value = Callable[[fx.Node], torch.Tensor]


def _no_bytes(node: fx.Node, value: Value = node_value) -> int:
    return 0


@dataclass(frozen=True)
class Workspaces:
    """of_op: while it runs, with such operands and result: (op, value of a node = its own) -> bytes. of_message: what
    moves a collective's data copies it into, from its start to its wait."""

    of_op: Callable[..., int] = _no_bytes
    of_message: Callable[[fx.Node], int] = _no_bytes


NONE = Workspaces()


def workspaces_of(prices: Prices, axes_of: AxesOf) -> Workspaces:
    """Of the devices that `prices` are of. axes_of: the mesh axes of a process group."""
    shared = lambda node: prices.shares_memory(axes_of(str(node.args[-1])))
    return workspaces_on(prices.mesh.device_type, prices.traffic, shared)


def workspaces_on(
    device_type: str, traffic: TrafficModel, shared: Callable[[fx.Node], bool] = lambda node: False
) -> Workspaces:
    """Of devices of that type. traffic: where all ops run op by op, random numbers have words of their own. shared:
    whether the ranks of a collective exchange its data through memory.

    NCCL moves data from and to the tensors themselves; its buffers, and those of CUDA's libraries, are in a plan's
    reserve.
    """
    on_cpu = device_type == "cpu"
    numbers = random_words if traffic is eager_traffic else _no_bytes
    kernels = convolution_copies if on_cpu else _no_bytes
    of_op = lambda node, value=node_value: numbers(node, value) + kernels(node, value)
    copies = lambda node: 0 if node.target not in COLLECTIVE_KINDS or shared(node) else _gloo_copies(node)
    return Workspaces(of_op, copies if on_cpu else _no_bytes)


def random_words(node: fx.Node, value: Value = node_value) -> int:
    """Of random numbers that are made op by op."""
    if node.target is not torch.ops.autoshard.uniform.default:
        return 0
    made = value(node)
    return made.numel() * (8 * UNIFORM_WORDS - made.element_size())


def _gloo_copies(node: fx.Node) -> int:
    """gloo gathers into a flat tensor of its own, and reduces a copy of what it scatters; it reduces for all in place.
    [torch/csrc/distributed/c10d/ProcessGroupGloo.cpp] Ranks that share memory read it where it is."""
    kind = COLLECTIVE_KINDS[node.target]
    (operand,) = node.all_input_nodes[:1]
    if kind == "all_gather":
        part, ranks = node_value(operand), int(node.args[1])  # type: ignore[arg-type]
        return 0 if own.in_one_round("all_gather", part, ranks) else results_nbytes(node)
    return results_nbytes(operand) if kind == "reduce_scatter" else 0
