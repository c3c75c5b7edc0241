"""Where a call's graph is cut into stages: ops priced as if split evenly over a stage's ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autoshard.plan.task import Task
from passes.ir.joint import JointGraph, repeats, results_nbytes
from passes.ir.op_traits import is_view
from passes.stages.choose_cut import ChosenCut, Fits, choose_cut
from passes.stages.cut_costs import CutCosts, CutPlace, Segment, cut_costs, narrow_places
from passes.strategies.pricing import local_work

__all__ = ["StageCutter", "transfer_price"]


def transfer_price(task: Task, axis: str) -> Callable[[float], float]:
    """Bytes of one rank -> seconds in which all ranks of a stage send so much to the next."""
    prices = task.prices.redistributor
    return lambda nbytes: prices.collective_seconds("point_to_point", (axis,), math.ceil(nbytes))


@dataclass(frozen=True)
class StageCutter:
    """joint: of the call, in pieces. task: of the whole mesh, of which `axis` holds stages.

    An op's seconds are those of its share of operations and bytes, were it split evenly over the ranks of a stage:
    equal layers get equal seconds, whatever layouts each stage's search will choose, and the embedding and the head,
    which are uneven, are weighed against them. What stages communicate inside is not counted.
    """

    task: Task
    joint: JointGraph
    axis: str

    @cached_property
    def ranks(self) -> int:
        """Of one stage."""
        return self.task.mesh.device_count // self.task.mesh.size(self.axis)

    @cached_property
    def costs(self) -> CutCosts:
        return cut_costs(self.joint, self._op_seconds)

    @cached_property
    def places(self) -> tuple[CutPlace, ...]:
        return narrow_places(self.costs)

    def cut(self, stages: int) -> ChosenCut:
        """Raises InfeasibleError."""
        price = transfer_price(self.task, self.axis)
        places = self.places if len(self.places) >= stages - 1 else None
        return choose_cut(
            self.costs, stages, lambda nbytes: price(nbytes / self.ranks), places=places, fits=self._fits()
        )

    def _op_seconds(self, node: fx.Node) -> float:
        if is_view(node):
            return 0.0
        prices = self.task.prices
        work = local_work(node, prices.traffic(node))
        share = replace(
            work,
            flops=work.flops / self.ranks,
            nbytes=work.nbytes / self.ranks,
            stored=work.stored / self.ranks,
        )
        return repeats(node) / self.joint.pieces * prices.compute.work_seconds(share)

    def _fits(self) -> Fits | None:
        """By what every plan of a stage holds: parameters, gradients and the optimizer's states, split over all."""
        limit = self.task.memory_limit
        if limit is None:
            return None
        room = limit - self.task.reserve((), None)
        trained, optimizer = self.joint.trained, self.task.prices.optimizer

        def held(node: fx.Node) -> int:
            nbytes = results_nbytes(node)
            size = node.meta["val"].element_size()
            return nbytes + (nbytes + optimizer.state_nbytes(nbytes, size) if node in trained else 0)

        kinds = zip(self.joint.placeholders, self.joint.inputs, strict=True)
        parameters = {node for node, spec in kinds if spec.kind == "param"}

        def fits(segment: Segment, stage: int) -> bool:
            return sum(held(node) for node in segment.held if node in parameters) / self.ranks <= room

        return fits
