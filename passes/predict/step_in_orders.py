"""The step of one assignment, its transfers in one order or another: how long, and how much it holds."""

from __future__ import annotations

from dataclasses import replace

from passes.ir.collector import collector_paused
from passes.ir.joint import CPU, JointGraph
from passes.lower.orders import Orders
from passes.plan.planned_graph import PlannedGraph
from passes.predict.predict_step import predict_phases, predicted_step, slowest_ranks, slowest_step
from passes.predict.prediction import Prediction
from passes.simulate.lockstep import simulated_group_axes, simulated_groups
from passes.strategies.prices import Prices
from passes.strategies.traffic import eager_traffic


class StepInOrders:
    """`predicted_step` of programs that differ in the order of their transfers, each of which is made but once."""

    def __init__(self, joint: JointGraph) -> None:
        self._joint = replace(joint, device=CPU)
        self._orders: dict[int, Orders] = {}

    @collector_paused()
    def predicted(self, planned: PlannedGraph, prices: Prices) -> Prediction:
        """Of the slowest rank. planned: under `prices`."""
        if self._joint.pieces > 1:
            return predicted_step(self._joint, planned, prices)
        return slowest_step(
            predict_phases(
                self._of_rank(rank, planned, prices).program(planned).usual(), prices, simulated_group_axes
            )
            for rank in slowest_ranks(planned.layouts, prices.mesh)
        )

    def _of_rank(self, rank: int, planned: PlannedGraph, prices: Prices) -> Orders:
        known = self._orders.get(rank)
        if known is not None and known.has(planned):
            return known
        mesh, joined = prices.mesh, prices.traffic is eager_traffic
        self._orders[rank] = Orders(self._joint, planned, mesh, rank, simulated_groups(mesh), joined=joined)
        return self._orders[rank]
