"""Where a call's graph is cut into stages: ops priced as if split evenly over a stage's ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autoshard.plan.task import Task
from cost_model.errors import InfeasibleError
from cost_model.memory import format_bytes
from passes.ir.joint import JointGraph, repeats, results_nbytes
from passes.ir.op_traits import is_view
from passes.stages.cut_costs import (
    ChosenCut,
    CutCosts,
    CutPlace,
    Fits,
    Segment,
    alike_places,
    choose_cut,
    cut_costs,
    narrow_places,
    places_between_products,
)
from passes.strategies.prices import local_work

_EVEN = 0.02
"""Share by which the longest stage may be longer than it must be, where stages are more even for that."""
_SHORTER = 0.2
"""Share by which the longest stage must be shorter for a cut at places where more passes."""


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

    def cut(self, stages: int, costs: CutCosts | None = None) -> ChosenCut:
        """At narrow places, and of those between equal layers, unless that makes the longest stage longer by more than
        `_EVEN`: stages that are alike are planned once. Between any two products, or anywhere, where that makes it
        shorter by `_SHORTER`, or there are too few. costs: in place of the estimated ones. Raises InfeasibleError."""
        try:
            return self._best(stages, costs or self.costs)
        except InfeasibleError as error:
            raise InfeasibleError(f"{self._asked()}: {error}") from None

    def _asked(self) -> str:
        """The arguments that a cut has to do with."""
        limit = self.task.memory_limit
        within = "" if limit is None else f", memory_limit={format_bytes(limit)}"
        return f"stages={self.axis!r}{within}"

    def _best(self, stages: int, costs: CutCosts) -> ChosenCut:
        best: ChosenCut | None = None
        for places in (self.places, places_between_products(self.costs), self.costs.places):
            enough = best is not None and best.gap <= _SHORTER
            if enough or (len(places) < stages - 1 and places is not self.costs.places):
                continue
            found = self._cut(stages, costs, places)
            if best is None or max(found.seconds) < (1.0 - _SHORTER) * max(best.seconds):
                best = found
        assert best is not None
        alike = self._cut_alike(stages, costs)
        even = alike is not None and max(alike.seconds) <= (1.0 + _EVEN) * max(best.seconds)
        return alike if alike is not None and even else best

    def _cut_alike(self, stages: int, costs: CutCosts) -> ChosenCut | None:
        places = alike_places(self.costs)
        if len(places) < stages - 1:
            return None
        with suppress(InfeasibleError):
            return self._cut(stages, costs, places)
        return None

    def _cut(self, stages: int, costs: CutCosts, places: Sequence[CutPlace]) -> ChosenCut:
        price = transfer_price(self.task, self.axis)
        return choose_cut(
            costs,
            stages,
            lambda nbytes: price(nbytes / self.ranks),
            within=_EVEN,
            places=places,
            fits=self._fits,
        )

    def learned(self, cut: Sequence[str], seconds: Sequence[float]) -> CutCosts:
        """The costs with which the stages of a cut take so many seconds for a piece, as their plans say: ops of one
        stage are all as much more expensive than estimated."""
        known = self.costs.seconds
        at = {place.op: place.position for place in self.costs.places}
        ends = [0, *(at[op] for op in cut), len(known) - 1]
        found = [0.0]
        for (start, stop), wanted in zip(itertools.pairwise(ends), seconds, strict=True):
            whole, base = known[stop] - known[start], found[-1]
            share = [(known[i] - known[start]) / whole if whole else 0.0 for i in range(start + 1, stop + 1)]
            found += [base + wanted * part for part in share]
        return replace(self.costs, seconds=tuple(found))

    def _op_seconds(self, node: fx.Node) -> float:
        if is_view(node):
            return 0.0
        prices = self.task.prices
        work = local_work(node, prices.flow(node))
        share = replace(
            work,
            flops=work.flops / self.ranks,
            nbytes=work.nbytes / self.ranks,
            stored=work.stored / self.ranks,
        )
        return repeats(node) / self.joint.pieces * prices.compute.work_seconds(share)

    @cached_property
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

        of_parameter = {node: held(node) for node, spec in self.joint.given if spec.kind == "param"}

        known: dict[tuple[int, int], bool] = {}  # several cuts ask about the same segments

        def fits(segment: Segment) -> bool:
            ends = segment.start, segment.stop
            if ends not in known:
                known[ends] = sum(of_parameter.get(node, 0) for node in segment.held) / self.ranks <= room
            return known[ends]

        return fits
