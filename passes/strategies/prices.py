"""Seconds of ops under layouts: of one op under each of its strategies, and everything that a mesh is priced by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import fx

from cost_model.compute import ComputePrices
from cost_model.groups import group_shape
from cost_model.measurements import MEMORY_KINDS, Lateness
from cost_model.memory import ADAMW, Optimizer
from cost_model.mesh import MeshSpec
from cost_model.timed import KernelKey, KernelWork, Priced
from passes.ir.joint import first_value, node_value, node_values, tensor_operands
from passes.ir.op_traits import fuses, is_view, op_signature
from passes.ir.op_work import (
    NARROW_PRODUCTS,
    arithmetic_kind,
    global_flops,
    kernel_form,
    kernel_key,
    local_key,
    operand_orders,
    routed_products,
)
from passes.ir.routing import rows_share
from passes.layout.layout import FactorSplit, JoinedAxes, Layout, NodeLayouts, first_part
from passes.redistribution.redistribute import Redistributor
from passes.rules.core.rule import Exchange, OpRule
from passes.rules.core.rule_registry import rule_for
from passes.strategies.traffic import OpTraffic, TrafficModel, fused_traffic

T = TypeVar("T")


def local_nbytes(layout: Layout, node: fx.Node, index: int, mesh: MeshSpec) -> int:
    """Bytes of the largest shard of result `index` of `node` under `layout`."""
    value = node_value(node, index)
    count = math.prod(layout.max_local_shape(value.shape, mesh)) * value.element_size()
    return math.ceil(count * _rows_share(layout, node, mesh)) if layout.partial else count


def _rows_share(layout: Layout, node: fx.Node, mesh: MeshSpec) -> float:
    """What part of a shard counts on the fullest rank. node: what makes or reads its rows."""
    return rows_share(layout.partial, mesh, partial(_fullest, node))


def _fullest(node: fx.Node, ways: Sequence[int]) -> float:
    rows = node.meta.get("rows")
    return 1.0 / math.prod(ways) if rows is None else rows.fullest(ways)


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
    dtype = _rate_name(node)
    operands = tensor_operands(node)
    results = [i for i, value in enumerate(node_values(node)) if value is not None] if flow.writes else []
    form = None if prices.timed is None else _timed_form(node, flow)
    known: dict[Hashable, Any] = {}

    def once(make: Callable[..., T], one: object, *others: Any) -> T:
        """Strategies share layouts and splits: of each once."""
        key = make, id(one), *others
        if key not in known:
            known[key] = make(one, *others)
        return known[key]

    share_of = lambda split: _share(split, node, rule, mesh)
    shape_of = lambda layout, i: layout.max_local_shape(node_value(operands[i]).shape, mesh)
    read = lambda layout, i: (
        math.prod(once(shape_of, layout, i))
        * node_value(operands[i]).element_size()
        * _rows_share(layout, node, mesh)
    )
    grouped = node.target in routed_products()
    made = lambda strategy, i: strategy.results[i].max_local_shape(node_value(node, i).shape, mesh)
    written = lambda layout, i: local_nbytes(layout, node, i, mesh)

    def seconds(strategy: NodeLayouts) -> float:
        shares = [once(share_of, split) for split in strategy.splits]
        calls = list(map(math.prod, itertools.product(*shares)))
        held = strategy.operands
        nbytes = sum([once(read, held[i], i) for i, reads in enumerate(flow.reads) if reads])
        stored = sum([once(written, strategy.results[i], i) for i in results])
        local_shape = lambda i: once(shape_of, held[i], i)
        kind = arithmetic_kind(node, local_shape)
        key = None if form is None or len(calls) > 1 else kernel_key(node, form, local_shape)
        groups = product_groups(node, local_shape, partial(made, strategy)) if grouped else 1
        moved = (nbytes + stored) / len(calls), dtype, kind, stored / len(calls), flow.writes, groups
        return sum([priced((flops * share, *moved), key) for share in calls])

    def priced(work: tuple[Any, ...], key: KernelKey | None) -> float:
        if (work, key) not in known:
            known[work, key] = flow.runs * prices.work_seconds(KernelWork(*work), key)
        return known[work, key]

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
    local_shape = lambda i: node_value(tensor_operands(node)[i]).shape
    kind = arithmetic_kind(node, local_shape)
    grouped = node.target in routed_products()
    groups = product_groups(node, local_shape, lambda i: node_value(node, i).shape) if grouped else 1
    return KernelWork(flops, loaded + stored, _rate_name(node), kind, stored, flow.writes, groups)


def product_groups(
    node: fx.Node, operand: Callable[[int], Sequence[int]], result: Callable[[int], Sequence[int]]
) -> int:
    """Of experts' products, with how many matrices a rank multiplies, or how many it makes. operand, result: position
    of one -> its shape as the rank has it."""
    ours = torch.ops.autoshard
    of_rank = node.target is ours.grouped_mm.default
    makes = node_value(node).ndim == 3 if of_rank else node.target is ours.routed_outer.default
    return max(1, result(0)[0] if makes else operand(1)[0])


def _share(split: FactorSplit, node: fx.Node, rule: OpRule, mesh: MeshSpec) -> Sequence[float]:
    """Of the op's operations, those of the largest shard of the factor, of each call that it takes; of experts, of the
    rank with the most rows."""
    if split.factor in rule.by_expert and node.meta["rows"].routing.numbers:
        return (_fullest(node, [mesh.size(axis) for axis in split.axes]),)
    way = rule.splitting([split.factor])
    length = way.sizes[split.factor]
    if split.factor in way.work:
        return max((way.work[split.factor](*part) for part in split.parts(length, mesh)), key=sum)
    spans = split.spans or ((0, first_part(length, mesh, split.axes)),)
    return (max(hi - lo for lo, hi in spans) / length,)


@dataclass(frozen=True)
class Prices:
    """Everything that turns layouts into seconds on one mesh."""

    mesh: MeshSpec
    compute: ComputePrices
    redistributor: Redistributor
    merged: Redistributor  # of gradients on their way to their parameters, which share buckets
    optimizer_seconds: Callable[[int], float]  # bytes of a parameter's shard -> seconds of its update
    traffic: TrafficModel = fused_traffic
    overlap_efficiency: float = 0.0
    optimizer: Optimizer = ADAMW
    lateness: Lateness | None = None  # of ranks, where they meet
    links: MeshSpec | None = None  # where the ranks sit, if `mesh` is one stage of a larger mesh
    shares_memory: Callable[[tuple[str, ...]], bool] = lambda axes: False  # whether groups along axes do
    moved_nbytes: float = math.inf  # that transfers may hold at once, where memory is short
    flows: dict[fx.Node, OpTraffic] = field(default_factory=dict, repr=False, compare=False)
    known: dict[Hashable, tuple[object, object, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    alike: dict[tuple[fx.Node, int], tuple[NodeLayouts, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def joined(self) -> JoinedAxes:
        """Axes that layouts use together."""
        return self.redistributor.joined

    def joining(self, joined: JoinedAxes) -> Prices:
        """The same prices, for layouts that use the axes `joined` together."""
        if joined == self.joined:
            return self
        ways = self.redistributor.joining(joined), self.merged.joining(joined)
        return replace(self, redistributor=ways[0], merged=ways[1])

    def avoiding(self, kinds: frozenset[str]) -> Prices:
        """The same prices, where no redistribution runs collectives of these kinds."""
        ways = self.redistributor.avoiding(kinds), self.merged.avoiding(kinds)
        return replace(self, redistributor=ways[0], merged=ways[1])

    def within(self, nbytes: float) -> Prices:
        """The same prices, where no redistribution has a rank hold more bytes of a tensor on its way."""
        ways = self.redistributor.within(nbytes), self.merged.within(nbytes)
        return replace(self, redistributor=ways[0], merged=ways[1])

    def holding(self, nbytes: float) -> Prices:
        """The same prices, where transfers merged or in flight together hold no more bytes; one alone may."""
        return replace(self, moved_nbytes=nbytes)

    def hidden_share(self, kind: str, axes: tuple[str, ...]) -> float:
        """`overlap_efficiency` beside a collective: nothing hides behind one that is waited for where it starts."""
        return 0.0 if kind in MEMORY_KINDS and self.shares_memory(axes) else self.overlap_efficiency

    def flow(self, node: fx.Node) -> OpTraffic:
        """`traffic` of an op of a global graph, which nothing changes once it is priced."""
        if node not in self.flows:
            self.flows[node] = self.traffic(node)
        return self.flows[node]

    def strategy_seconds(
        self, node: fx.Node, rule: OpRule, strategies: Sequence[NodeLayouts], flow: OpTraffic
    ) -> np.ndarray:
        """`strategy_seconds`, and what is exchanged within the op and not hidden behind its products."""
        found = strategy_seconds(node, rule, strategies, flow, self.mesh, self.compute)
        if all(way.exchange is None for way in rule.ways):
            return found
        more = [self._passing(node, rule, s, float(x)) for s, x in zip(strategies, found, strict=True)]
        return found + np.array(more)

    def _passing(self, node: fx.Node, rule: OpRule, strategy: NodeLayouts, computed: float) -> float:
        ring = self._ring(node, rule, strategy)
        if ring is None:
            return 0.0
        exchange, axes, nbytes = ring
        if told := exchange.gathered_nbytes(self.mesh.size(*axes), nbytes):  # a kernel before and one behind
            merging = 2.0 * self.compute.work_seconds(KernelWork(0.0, told, "float32", None))
            return merging + self.redistributor.collective_seconds("all_gather", axes, told)
        moved = lambda tensors: self.redistributor.collective_seconds("point_to_point", axes, nbytes(tensors))
        ranks, results = self.mesh.size(*axes), [t for t in exchange.swapped if t >= len(strategy.operands)]
        step, late = moved(exchange.round), moved(t for t in exchange.round if t in results)
        hidden = self.hidden_share("point_to_point", axes) * min(step, computed / ranks)
        # Results of a round are added to those before; what is swapped is copied out of one message and into another.
        copied = 3.0 * (ranks - 1) * nbytes(results) + 4.0 * nbytes(exchange.swapped)
        written = self.compute.kernel_seconds(0.0, copied, "float32", None)
        return (ranks - 1) * (step - hidden) + late + written + 0.5 * moved(exchange.swapped)

    def ring_nbytes(self, node: fx.Node, strategy: NodeLayouts) -> int:
        """That an op which exchanges within itself holds besides, at least: a message on its way, or what all found."""
        ring = self._ring(node, rule_for(node), strategy)
        return 0 if ring is None else ring[0].held_nbytes(self.mesh.size(*ring[1]), ring[2])

    def _ring(
        self, node: fx.Node, rule: OpRule, strategy: NodeLayouts
    ) -> tuple[Exchange, tuple[str, ...], Callable[[Iterable[int]], int]] | None:
        """What is exchanged within the op, over which axes, and the bytes of a rank's part of its tensors."""
        exchange = rule.splitting([split.factor for split in strategy.splits]).exchange
        if exchange is None:
            return None
        (axes,) = (split.axes for split in strategy.splits if split.factor == exchange.factor)
        values = [*map(node_value, tensor_operands(node)), *node_values(node)]
        part = lambda t: (
            math.prod(strategy.tensors[t].max_local_shape(values[t].shape, self.mesh))
            * values[t].element_size()
        )
        return exchange, axes, lambda tensors: sum(map(part, tensors))

    def op_seconds(self, node: fx.Node, layouts: NodeLayouts) -> float:
        """Seconds of `node` of a global graph under `layouts`, as `strategy_seconds` has them; once for ops alike.

        Layers share their layouts, so these count as alike only if they are the same object.
        """
        alike = self.alike.get((node, id(layouts)))
        if alike is not None:
            return alike[1]
        seconds = self._op_seconds(node, layouts)
        self.alike[node, id(layouts)] = layouts, seconds
        return seconds

    def _op_seconds(self, node: fx.Node, layouts: NodeLayouts) -> float:
        rule, flow = rule_for(node), self.flow(node)
        key = (id(layouts), id(rule), flow, op_signature(node), self.orders(node))
        if key not in self.known:
            (found,) = self.strategy_seconds(node, rule, [layouts], flow)
            self.known[key] = layouts, rule, float(found)  # with both, so that their ids stay their own
        return self.known[key][-1]

    def orders(self, node: fx.Node) -> tuple[tuple[int, ...], ...]:
        """Where kernels are timed, what an op takes besides by: the order of its operands' strides. Else nothing."""
        return () if self.compute.timed is None else operand_orders(node)

    def op_priced(self, node: fx.Node, layouts: NodeLayouts) -> Priced:
        """Where `op_seconds` comes from."""
        return strategy_priced(node, layouts, self.flow(node), self.mesh, self.compute)

    def collective_priced(self, kind: str | None, axes: tuple[str, ...], nbytes: int) -> Priced:
        """Where the price of a collective comes from; without a kind nothing moves."""
        timed = self.compute.timed
        if timed is None or kind is None:
            return "modelled"
        return timed.collective_priced(kind, group_shape(self.links or self.mesh, axes), nbytes)


def _rate_name(node: fx.Node) -> str:
    """By which a profile has the op's rate: its dtype, "float8" of all of 8 bits; of a product of these, theirs."""
    narrow = node.target in NARROW_PRODUCTS
    dtype = (node_value(tensor_operands(node)[0]) if narrow else first_value(node)).dtype
    return "float8" if dtype.is_floating_point and dtype.itemsize == 1 else str(dtype).removeprefix("torch.")
