"""Meshes of many axes: searched with neighbouring axes used together at first, and apart where that is worth it.

    2 x 2 x 2 x 2 x 2      a+b+c+d+e                          one axis of 32: few layouts, a plan at once
                           a | b+c+d+e,  a+b | c+d+e, ...     two: all ways to part them
                           a | b+c | d+e                      the best of those, parted again

A product on 2^6 has 46,656 strategies, on three runs of axes 216. Each layout with joined axes is one of the whole
mesh, with the sizes and prices that it has there; so is the plan. Parting axes keeps all layouts that there were, so
the bound of what was parted last holds for all before it, and for no others: it is stated so (`Found.joined`).

What is small enough is searched whole: three axes always, more if the cost matrices are small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from cost_model.deadline import Deadline, OutOfTime
from cost_model.errors import InfeasibleError
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, result_index, result_shapes, tensor_operands
from passes.layout.layout import Layout, Unit, joined_text, keeps_together
from passes.rules.core.rule import OpRule
from passes.search.find import Found, Sought, find_assignment
from passes.strategies.cuts import ops_of
from passes.strategies.strategies import offered_ways

WHOLE_AXES = 3
"""Meshes of so many axes are searched whole, however large the space."""

Units = tuple[Unit, ...]


def find_fastest(sought: Sought, deadline: Deadline) -> Found:
    """`find_assignment` with every axis on its own; with axes together where those are too many, or time is too short.

    Raises InfeasibleError, and OutOfTime where no plan was found.
    """
    search = _Search(sought)
    if sought.start.together:
        return search.found(search.coarsest, deadline)
    if search.whole_first:
        try:
            return search.found((), deadline)
        except OutOfTime:
            if len(search.coarsest) == len(search.mesh.real_axes()):
                raise
    return search.refined(deadline)


@dataclass(frozen=True)
class _Search:
    sought: Sought

    @property
    def mesh(self) -> MeshSpec:
        return self.sought.prices.mesh

    @cached_property
    def size(self) -> SpaceSize:
        return SpaceSize.of(self.sought.joint, self.mesh, self.sought.boundary.has_parts(self.sought.joint))

    @cached_property
    def coarsest(self) -> Units:
        """The mesh's axes, together wherever the ends of the graph use them together."""
        boundary = self.sought.boundary
        ends = itertools.chain(*boundary.inputs.values(), *boundary.outputs.values())
        return _together(self.mesh, tuple(dict.fromkeys(ends)))

    @property
    def whole_first(self) -> bool:
        axes = len(self.mesh.real_axes())
        # Entries of cost matrices (`SpaceSize`): of the largest space that is searched whole on a mesh of
        # more axes, and of the largest that axes are parted into.
        return axes <= WHOLE_AXES or self.size.entries(axes) <= 10_000_000

    def found(self, units: Units, deadline: Deadline) -> Found:
        joined = tuple(unit for unit in units if len(unit) > 1)
        prices = self.sought.prices.joining(joined)
        return find_assignment(replace(self.sought, prices=prices), deadline)

    def refined(self, deadline: Deadline) -> Found:
        """Part axes while that is possible, small enough and in time; the fastest of all plans on the way."""
        units = self.coarsest
        # Entries beyond which nothing is tried: matrices of 2.4 GB.
        if len(units) > WHOLE_AXES and self.size.entries(len(units)) > 300_000_000:
            raise _too_many(self.mesh, len(units))
        trials = _Trials(self, deadline)
        trials.add([units])
        while not trials.late and (parted := self._parted(trials.level[0][-1])):
            trials.add(parted)
        return trials.best_found()

    def _parted(self, units: Units) -> list[Units]:
        """One of the units in two, the most even first: of the only one all ways, of several each in its middle."""
        if self.size.entries(len(units) + 1) > 5_000_000:
            return []
        places = [
            (i, cut)
            for i, unit in enumerate(units)
            for cut in (range(1, len(unit)) if len(units) == 1 else [len(unit) // 2] * (len(unit) > 1))
        ]
        parted = [(*units[:i], units[i][:cut], units[i][cut:], *units[i + 1 :]) for i, cut in places]
        return sorted(parted, key=_largest)


@dataclass
class _Trials:
    """level: (seconds, units) of the ways to join axes that were tried last, the fastest first.
    late: time ended them.
    """

    search: _Search
    deadline: Deadline
    level: list[tuple[float, Units]] = field(default_factory=list)
    best: Found | None = None
    reason: InfeasibleError | None = None
    late: bool = False

    def add(self, level: Sequence[Units]) -> None:
        """Try all of one level. Each may take half of the time left, but the first of all, which may take all of it."""
        first = not self.level
        self.level = []
        for units in level:
            seconds = math.inf
            try:
                found = self.search.found(units, self.deadline if first else self.deadline.share(0.5))
                seconds = found.seconds
                # Of equally fast ones the last: its bound is of more plans.
                if self.best is None or seconds <= self.best.seconds:
                    self.best = found
            except OutOfTime:
                self.late = True
                return
            except InfeasibleError as error:
                self.reason = error
            self.level.append((seconds, units))
        self.level.sort(key=lambda tried: (tried[0], _largest(tried[1])))

    def best_found(self) -> Found:
        """Raises OutOfTime, or InfeasibleError where none of them has a plan."""
        if self.best is not None:
            return self.best
        if self.reason is None:
            raise OutOfTime
        raise none_together(self.reason, self.search.coarsest)


def _largest(units: Units) -> int:
    return max(map(len, units))


def _together(mesh: MeshSpec, layouts: Sequence[Layout]) -> Units:
    """The axes in runs of neighbours that every one of `layouts` uses alike."""
    units: list[Unit] = []
    for axis in mesh.real_axes():
        if units and all(keeps_together(layout, units[-1][-1], axis) for layout in layouts):
            units[-1] = (*units[-1], axis)
        else:
            units.append((axis,))
    return tuple(units)


def _too_many(mesh: MeshSpec, units: int) -> InfeasibleError:
    return InfeasibleError(
        f"{mesh} has too many layouts to list, and its axes are used in {units} different ways by `constraints`, "
        "`in_placements` or `out_placements`, so no more of them can be planned together\n"
        "  try: placements that use neighbouring axes alike, or a mesh of fewer axes"
    )


def none_together(reason: InfeasibleError, units: Units) -> InfeasibleError:
    """`reason`, and that only plans that use the axes of each unit together were searched."""
    runs = joined_text(units)
    if not runs:
        return reason
    return InfeasibleError(
        f"{reason}\n  on this mesh only plans that use axes together ({runs}, or parts of it) were searched\n"
        "  try: a mesh of fewer axes, which is searched whole"
    )


Choices = tuple[int, ...]
"""Of one node: per way of its rule, what one mesh axis can do there."""


@dataclass(frozen=True)
class SpaceSize:
    """edges: one (choices of the producer, choices of the reader) per edge, of edges alike one."""

    edges: tuple[tuple[Choices, Choices], ...]

    @staticmethod
    def of(joint: JointGraph, mesh: MeshSpec, in_parts: bool) -> SpaceSize:
        choices: dict[fx.Node, Choices] = {
            node: (1 + len(node.meta["val"].shape),) for node in joint.placeholders
        }
        edges: dict[Hashable, tuple[Choices, Choices]] = {}
        for node, rule in ops_of(joint):
            choices[node] = tuple(_choices(way) for way in offered_ways(rule, mesh, in_parts))
            for place, operand in enumerate(tensor_operands(node)):
                producer, result = result_index(operand)
                ends = choices[producer], choices[node]
                alike = (place, str(node.target), str(result_shapes(producer)[result]), ends)
                edges.setdefault(alike, ends)
        return SpaceSize(tuple(edges.values()))

    def entries(self, units: int) -> int:
        """Of its cost matrices, about, where so many axes, or runs of joined ones, are used apart. Places to cut dims
        and orders of axes are not counted."""
        return sum(_strategies(held, units) * _strategies(read, units) for held, read in self.edges)


def _choices(rule: OpRule) -> int:
    return 1 + len(rule.contiguous) + len(rule.linear)


def _strategies(choices: Choices, units: int) -> int:
    return sum(count**units for count in choices)
