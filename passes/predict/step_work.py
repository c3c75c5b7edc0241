"""The distinct kernels and collectives of a rank's step: what could be timed of it, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cost_model.timed import KernelKey, KernelWork
from passes.ir.joint import first_value, map_operands, node_value, tensor_operands
from passes.ir.op_traits import is_view, storage_root
from passes.lower.phases import Phases
from passes.predict.memory_walk import memory_walk
from passes.predict.step_events import (
    COLLECTIVE_KINDS,
    Axes,
    AxesOf,
    collective_kind,
    collective_nbytes,
    copies_of_collectives,
)
from passes.predict.workspaces import workspaces_on
from passes.strategies.kernel_keys import local_key, may_be_timed
from passes.strategies.prices import Prices
from passes.strategies.pricing import eager_traffic, local_seconds, local_work

__all__ = ["CollectiveCase", "KernelCase", "StepWork", "TensorLook", "step_work"]

LARGEST_NBYTES = 2**31
"""Of operands and results of a kernel that is timed: its program may need the rest of the memory."""


@dataclass(frozen=True)
class TensorLook:
    """Stands for a tensor operand of a kernel."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its storage."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (reach + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class KernelCase:
    """One kernel, as it can be called without its program.

    op: "aten.add.Tensor". args, kwargs: of the call, a `TensorLook` for each tensor. cold: per operand, whether it was
    left by another phase, or is a parameter, and so in no cache. seconds: predicted, of all calls of a step. kept:
    whether its result outlives its phase: it is written where nothing was lately. step_nbytes: that the step holds at
    its peak, and so about what is touched between two uses of what is cold.
    """

    key: KernelKey
    work: KernelWork
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[TensorLook, ...]
    cold: tuple[bool, ...]
    seconds: float
    kept: bool = False
    step_nbytes: int = 0


@dataclass(frozen=True)
class CollectiveCase:
    """nbytes: as `cost_model.collectives` counts. seconds: as for kernels."""

    kind: str
    axes: Axes
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class StepWork:
    """Those that take most of a step first."""

    kernels: tuple[KernelCase, ...] = ()
    collectives: tuple[CollectiveCase, ...] = ()


def step_work(phases: Phases, prices: Prices, axes_of: AxesOf) -> StepWork:
    """Of the rank whose programs `phases` are, in the order in which they run."""
    workspaces = workspaces_on(prices.mesh.device_type, prices.traffic)
    memory = memory_walk(phases, prices.traffic, prices.optimizer, workspaces)
    found = _Collected(prices, axes_of, memory.peak.nbytes)
    found.add_graph(phases.forward)
    if phases.backward is not None:
        found.add_graph(phases.backward.module)
    longest = lambda cases: tuple(sorted(cases, key=lambda case: -case.seconds))
    return StepWork(longest(found.kernels.values()), longest(found.collectives.values()))


class _Collected:
    """Cases by what makes them distinct."""

    def __init__(self, prices: Prices, axes_of: AxesOf, step_nbytes: int) -> None:
        self._prices = prices
        self._step_nbytes = step_nbytes
        self._axes_of = axes_of
        self._fused = prices.traffic is not eager_traffic
        self.kernels: dict[KernelKey, KernelCase] = {}
        self.collectives: dict[tuple[str, Axes, int], CollectiveCase] = {}

    def add_graph(self, module: fx.GraphModule) -> None:
        paid = copies_of_collectives(module.graph)
        kept = {storage_root(node) for node in module.graph.output_node().all_input_nodes}
        for node in module.graph.nodes:
            if node.op != "call_function" or node in paid or is_view(node):
                continue
            if node.target in COLLECTIVE_KINDS:
                self._add_collective(node)
            else:
                self._add_kernel(node, node in kept)

    def _add_collective(self, node: fx.Node) -> None:
        axes = self._axes_of(str(node.args[-1]))
        key = kind, axes, nbytes = collective_kind(node), axes, collective_nbytes(node)
        if nbytes:
            seconds = self._prices.redistributor.collective_seconds(kind, axes, nbytes)
            case = self.collectives.get(key, CollectiveCase(kind, axes, nbytes, 0.0))
            self.collectives[key] = replace(case, seconds=case.seconds + seconds)

    def _add_kernel(self, node: fx.Node, kept: bool) -> None:
        flow = self._prices.traffic(node)
        seconds = local_seconds(node, flow, self._prices.compute)
        if not may_be_timed(node, self._fused) or not _fits(node):
            return
        key = local_key(node)
        case = self.kernels.get(key) or self._case(key, node, kept)
        self.kernels[key] = replace(case, seconds=case.seconds + seconds)

    def _case(self, key: KernelKey, node: fx.Node, kept: bool) -> KernelCase:
        operands, work = tensor_operands(node), local_work(node, self._prices.traffic(node))
        looks = tuple(_looks(operands))
        args, kwargs = map_operands(node, looks)
        cold = tuple(storage_root(operand).op == "placeholder" for operand in operands)
        return KernelCase(
            key, work, str(node.target), args, kwargs, looks, cold, 0.0, kept, self._step_nbytes
        )


def _looks(operands: Sequence[fx.Node]) -> Iterator[TensorLook]:
    for operand in operands:
        value = node_value(operand)
        yield TensorLook(tuple(value.shape), tuple(value.stride()), value.dtype)


def _fits(node: fx.Node) -> bool:
    """Whether there is something to compute, and not too much to hold beside all else."""
    values = [*(node_value(operand) for operand in tensor_operands(node)), first_value(node)]
    nbytes = [value.numel() * value.element_size() for value in values]
    return all(nbytes) and sum(nbytes) <= LARGEST_NBYTES
