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
from passes.ir.op_work import local_key, may_be_timed
from passes.lower.phases import Phases
from passes.predict.memory_walk import memory_walk
from passes.predict.step_events import (
    COLLECTIVE_KINDS,
    Axes,
    AxesOf,
    collective_kind,
    collective_nbytes,
    copied_share,
    copies_of_collectives,
    run_in_phase,
)
from passes.predict.workspaces import workspaces_of
from passes.strategies.prices import Prices, local_seconds, local_work
from passes.strategies.traffic import FusedGroup, eager_traffic, fused_group

LARGEST_NBYTES = 2**31
"""Of operands and results of a kernel that is timed: its program may need the rest of the memory."""


@dataclass(frozen=True)
class TensorLook:
    """How a tensor operand of a kernel looks."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its storage."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (reach + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class Operand:
    """Stands for a tensor in a call of a kernel: one of the kernel's operands, or, at places beyond, the result of one
    of its calls."""

    place: int


@dataclass(frozen=True)
class OpCall:
    """One op of a kernel. args, kwargs: an `Operand` for each tensor."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class KernelCase:
    """One kernel, as it can be called without its program.

    calls: the ops that it computes, one but where it is of a fused group; the last one's result is the kernel's. cold:
    per operand, whether it was left by another phase, or is a parameter, and so in no cache. seconds: predicted, of all
    calls of a step. kept: whether its result outlives its phase: it is written where nothing was lately. step_nbytes:
    that the step holds at its peak, and so about what is touched between two uses of what is cold. fused: whether a
    compiler makes it. inner: what all of `calls` but the last is priced by.
    """

    key: KernelKey
    work: KernelWork
    calls: tuple[OpCall, ...]
    operands: tuple[TensorLook, ...]
    cold: tuple[bool, ...]
    seconds: float
    kept: bool = False
    step_nbytes: int = 0
    fused: bool = False
    inner: tuple[KernelWork, ...] = ()

    @property
    def op(self) -> str:
        """ "aten.add.Tensor"."""
        return self.calls[-1].op


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
    memory = memory_walk(phases, prices.traffic, prices.optimizer, workspaces_of(prices, axes_of))
    found = _Collected(prices, axes_of, memory.peak.nbytes)
    found.add_graph(phases.forward, "forward")
    if phases.backward is not None:
        found.add_graph(phases.backward.module, "backward")
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

    def add_graph(self, module: fx.GraphModule, phase: str) -> None:
        paid = copies_of_collectives(module.graph)
        kept = {storage_root(node) for node in module.graph.output_node().all_input_nodes}
        for node in run_in_phase(module, phase):
            if node in paid or is_view(node) or copied_share(node, self._prices.traffic) < 1.0:
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
        group = fused_group(node) if self._fused and flow.writes else None
        if group is None and not may_be_timed(node, self._fused):
            return
        operands = tensor_operands(node) if group is None else group.operands
        if not _fit(*operands, node):
            return
        key = local_key(node, group and group.form)
        case = self.kernels.get(key) or self._case(key, node, operands, kept, group)
        self.kernels[key] = replace(case, seconds=case.seconds + seconds)

    def _case(
        self, key: KernelKey, node: fx.Node, operands: Sequence[fx.Node], kept: bool, group: FusedGroup | None
    ) -> KernelCase:
        cold = tuple(storage_root(operand).op == "placeholder" for operand in operands)
        calls = tuple(_calls(operands, [node] if group is None else group.ops))
        inner = () if group is None else tuple(map(self._work, group.inner))
        looks, fused = tuple(_looks(operands)), group is not None
        return KernelCase(
            key, self._work(node), calls, looks, cold, 0.0, kept, self._step_nbytes, fused, inner
        )

    def _work(self, node: fx.Node) -> KernelWork:
        return local_work(node, self._prices.traffic(node))


def _calls(operands: Sequence[fx.Node], ops: Sequence[fx.Node]) -> Iterator[OpCall]:
    place = {node: Operand(i) for i, node in enumerate((*operands, *ops))}
    for node in ops:
        args, kwargs = map_operands(node, [place[operand] for operand in tensor_operands(node)])
        yield OpCall(str(node.target), args, kwargs)


def _looks(operands: Sequence[fx.Node]) -> Iterator[TensorLook]:
    for operand in operands:
        value = node_value(operand)
        yield TensorLook(tuple(value.shape), tuple(value.stride()), value.dtype)


def _fit(*values: fx.Node) -> bool:
    """Whether there is something to compute, and not too much to hold beside all else."""
    tensors = [first_value(node) for node in values]
    nbytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return all(nbytes) and sum(nbytes) <= LARGEST_NBYTES
