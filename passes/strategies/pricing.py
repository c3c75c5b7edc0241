"""Seconds of one op under each of its strategies, from measured compute prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from cost_model.compute import ComputePrices
from cost_model.mesh import MeshSpec
from cost_model.timed import KernelWork, Priced
from passes.ir.joint import first_value, node_value, node_values, tensor_operands
from passes.ir.op_traits import fuses, is_either, is_reduction, is_view, storage_root
from passes.ir.op_work import arithmetic_kind, global_flops, reads_values
from passes.layout.assignment import FactorSplit, NodeLayouts
from passes.layout.layout import Layout
from passes.rules.core.rule import OpRule
from passes.strategies.kernel_keys import kernel_form, kernel_key, local_key

__all__ = [
    "OpTraffic",
    "TrafficModel",
    "eager_traffic",
    "fused_traffic",
    "local_nbytes",
    "local_seconds",
    "local_work",
    "strategy_priced",
    "strategy_seconds",
    "traffic_model",
    "uncompiled_traffic",
]


@dataclass(frozen=True)
class OpTraffic:
    """Which of an op's tensors go through memory; the rest stay in the registers of a fused loop.

    reads: per operand; writes: whether the results are stored. group: what is computed in the same loop, by which it
    was timed (`passes.strategies.fused_groups`); "": nothing, or it is not known.
    """

    reads: tuple[bool, ...]
    writes: bool
    group: str = ""


TrafficModel = Callable[[fx.Node], OpTraffic]
"""How the compiled graph moves an op's tensors."""


def traffic_model(backend: str) -> TrafficModel:
    """How a `torch.compile` backend fuses: "eager" runs op by op; every other one is taken to fuse as Inductor does."""
    return eager_traffic if backend == "eager" else fused_traffic


def eager_traffic(node: fx.Node) -> OpTraffic:
    """Every op that is no view reads its operands and stores its results."""
    moves = not is_view(node)
    return OpTraffic(tuple(moves and read for read in reads_values(node)), writes=moves)


def fused_traffic(node: fx.Node) -> OpTraffic:
    """Fusion as Inductor does it: a pointwise op reads what a non-fusing op stored, and is itself
    stored only where something that cannot fuse with it, or the other phase, reads it."""
    if is_view(node):
        return OpTraffic((False,) * len(tensor_operands(node)), writes=False)
    reads = tuple(
        read and not fuses(storage_root(operand))
        for operand, read in zip(tensor_operands(node), reads_values(node), strict=True)
    )
    # A draw fuses, but hashing an index takes about as long as storing the result.
    draws = node.target is torch.ops.autoshard.uniform.default
    return OpTraffic(reads, writes=not fuses(node) or draws or _is_stored(node))


def uncompiled_traffic(node: fx.Node) -> OpTraffic:
    """The model as torch runs it, neither compiled nor taken apart: what capture makes of one line of one module, in
    one phase, is one of torch's own kernels (a norm, a softmax, a loss). It reads what comes from elsewhere once
    and stores what is read elsewhere; products and all else that does not fuse read and store everything.

    For predictions of runs of others: a model written so that each line is one call.
    """
    if is_view(node):
        return OpTraffic((False,) * len(tensor_operands(node)), writes=False)
    line = _line(node)
    reads = tuple(
        read and (line is None or (_line(storage_root(operand)) != line and _reads_first(node, operand)))
        for operand, read in zip(tensor_operands(node), reads_values(node), strict=True)
    )
    return OpTraffic(reads, writes=line is None or any(_line(user) != line for user in _readers(node)))


def _line(node: fx.Node) -> tuple[object, ...] | None:
    """What nodes of one kernel of torch have in common; None: the node is a kernel of its own."""
    if not (fuses(node) or is_reduction(node)):
        return None
    line = tuple(node.meta.get(key) for key in ("phase", "module", "source"))
    return line if line[-1] else None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads the value, directly or through views."""
    for user in node.users:
        yield from _readers(user) if is_view(user) else (user,)


def _reads_first(node: fx.Node, operand: fx.Node) -> bool:
    """Whether `node`, among the nodes of one line that read a value, is the one for which it is counted."""
    line = _line(node)
    return next(reader for reader in _readers(storage_root(operand)) if _line(reader) == line) is node


def _is_stored(node: fx.Node) -> bool:
    for user in node.users:
        if is_either(user) and user.args[0] is node:  # stored or not: the search has yet to say
            continue
        if user.op == "output" or user.meta.get("phase") != node.meta.get("phase"):
            return True
        if is_view(user):
            if _is_stored(user):
                return True
        elif not fuses(user) and not is_reduction(user):
            return True
    return False


def local_nbytes(layout: Layout, node: fx.Node, index: int, mesh: MeshSpec) -> int:
    """Bytes of the largest shard of result `index` of `node` under `layout`."""
    value = node_value(node, index)
    return math.prod(layout.max_local_shape(value.shape, mesh)) * value.element_size()


def strategy_seconds(
    node: fx.Node,
    rule: OpRule,
    strategies: Sequence[NodeLayouts],
    flow: OpTraffic,
    mesh: MeshSpec,
    prices: ComputePrices,
) -> np.ndarray:
    """Seconds of `node` per strategy on the rank with the largest shards: float64[len(strategies)].

    Launch + max(operations / rate, bytes / memory bandwidth). A fused op that stores nothing has no
    launch of its own, and one operation an element: little, but less where it is split.
    """
    if is_view(node):
        return np.zeros(len(strategies))
    flops = float(first_value(node).numel()) if fuses(node) else global_flops(node)
    dtype = _dtype_name(node)
    operands = tensor_operands(node)
    results = [i for i, value in enumerate(node_values(node)) if value is not None]
    form = None if prices.timed is None else _timed_form(node, flow)

    def seconds(strategy: NodeLayouts) -> float:
        share = math.prod(_share(split, rule, mesh) for split in strategy.splits)
        nbytes = sum(
            local_nbytes(layout, operand, 0, mesh)
            for layout, operand, read in zip(strategy.operands, operands, flow.reads, strict=True)
            if read
        )
        stored = sum(local_nbytes(strategy.results[i], node, i, mesh) for i in results) if flow.writes else 0
        local_shape = lambda i: strategy.operands[i].max_local_shape(node_value(operands[i]).shape, mesh)
        kind = arithmetic_kind(node, local_shape)
        work = KernelWork(flops * share, nbytes + stored, dtype, kind, stored, flow.writes)
        return prices.work_seconds(work, None if form is None else kernel_key(node, form, local_shape))

    return np.array([seconds(strategy) for strategy in strategies])


def strategy_priced(
    node: fx.Node, strategy: NodeLayouts, flow: OpTraffic, mesh: MeshSpec, prices: ComputePrices
) -> Priced:
    """Where the seconds of `node` under the strategy come from."""
    form = None if prices.timed is None or is_view(node) else _timed_form(node, flow)
    if form is None:
        return "modelled"
    operands = tensor_operands(node)
    local_shape = lambda i: strategy.operands[i].max_local_shape(node_value(operands[i]).shape, mesh)
    return prices.priced(kernel_key(node, form, local_shape))


def local_seconds(node: fx.Node, flow: OpTraffic, prices: ComputePrices) -> float:
    """Seconds of `node` of one rank's graph, where values are local: as `strategy_seconds` prices it."""
    if is_view(node):
        return 0.0
    form = None if prices.timed is None else _timed_form(node, flow)
    return prices.work_seconds(local_work(node, flow), None if form is None else local_key(node, form))


def _timed_form(node: fx.Node, flow: OpTraffic) -> str | None:
    """By which it was timed; None: it is no kernel, but part of one, and that takes the rest of what was timed."""
    if flow.group:
        return flow.group
    return kernel_form(node) if flow.writes else None


def local_work(node: fx.Node, flow: OpTraffic) -> KernelWork:
    """What the model prices an op of one rank's graph by."""
    kept = [value for value in node_values(node) if value is not None]
    flops = float(kept[0].numel()) if fuses(node) else global_flops(node)
    read = [node_value(n) for n, reads in zip(tensor_operands(node), flow.reads, strict=True) if reads]
    loaded, stored = (
        sum(value.numel() * value.element_size() for value in values)
        for values in (read, kept if flow.writes else ())
    )
    kind = arithmetic_kind(node, lambda i: node_value(tensor_operands(node)[i]).shape)
    return KernelWork(flops, loaded + stored, _dtype_name(node), kind, stored, flow.writes)


def _dtype_name(node: fx.Node) -> str:
    return str(first_value(node).dtype).removeprefix("torch.")


def _share(split: FactorSplit, rule: OpRule, mesh: MeshSpec) -> float:
    """Of the op's operations, those of the largest shard of the factor."""
    way = rule.splitting([split.factor])
    length = way.sizes[split.factor]
    largest = max(hi - lo for lo, hi in split.parts(length, mesh))
    return largest / length * way.repeated.get(split.factor, 1.0)
