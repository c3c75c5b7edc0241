"""Everything that turns layouts into seconds on one mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from torch import fx

from cost_model.compute import ComputePrices
from cost_model.groups import group_shape
from cost_model.lateness import Lateness
from cost_model.measurements import MEMORY_KINDS
from cost_model.memory import ADAMW, Optimizer
from cost_model.mesh import MeshSpec
from cost_model.timed import Priced
from passes.ir.op_signature import op_signature
from passes.layout.assignment import NodeLayouts
from passes.layout.joined_axes import JoinedAxes
from passes.redistribution.redistribute import Redistributor
from passes.rules.core.rule_registry import rule_for
from passes.strategies.kernel_keys import operand_orders
from passes.strategies.pricing import TrafficModel, fused_traffic, strategy_priced, strategy_seconds

__all__ = ["Prices"]


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
    known: dict[Hashable, tuple[object, object, float]] = field(
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

    def holding(self, nbytes: float) -> Prices:
        """The same prices, where transfers merged or in flight together hold no more bytes; one alone may."""
        return replace(self, moved_nbytes=nbytes)

    def hidden_share(self, kind: str, axes: tuple[str, ...]) -> float:
        """`overlap_efficiency` beside a collective: nothing hides behind one that is waited for where it starts."""
        return 0.0 if kind in MEMORY_KINDS and self.shares_memory(axes) else self.overlap_efficiency

    def op_seconds(self, node: fx.Node, layouts: NodeLayouts) -> float:
        """Seconds of `node` of a global graph under `layouts`, as `strategy_seconds` has them; once for ops alike.

        Layers share their layouts, so these count as alike only if they are the same object.
        """
        rule, flow = rule_for(node), self.traffic(node)
        key = (id(layouts), id(rule), flow, op_signature(node), self.orders(node))
        if key not in self.known:
            (found,) = strategy_seconds(node, rule, [layouts], flow, self.mesh, self.compute)
            self.known[key] = layouts, rule, float(found)  # with both, so that their ids stay their own
        return self.known[key][-1]

    def orders(self, node: fx.Node) -> tuple[tuple[int, ...], ...]:
        """Where kernels are timed, what an op takes besides by: the order of its operands' strides. Else nothing."""
        return () if self.compute.timed is None else operand_orders(node)

    def op_priced(self, node: fx.Node, layouts: NodeLayouts) -> Priced:
        """Where `op_seconds` comes from."""
        return strategy_priced(node, layouts, self.traffic(node), self.mesh, self.compute)

    def collective_priced(self, kind: str | None, axes: tuple[str, ...], nbytes: int) -> Priced:
        """Where the price of a collective comes from; without a kind nothing moves."""
        timed = self.compute.timed
        if timed is None or kind is None:
            return "modelled"
        return timed.collective_priced(kind, group_shape(self.links or self.mesh, axes), nbytes)
