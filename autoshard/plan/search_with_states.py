"""The search within a memory limit that is met by computing again what there is no room to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch import fx

from autoshard.plan.correcting import Chosen, Correcting, Program, Way
from autoshard.plan.judged import Judged
from autoshard.plan.plan_ends import result_layouts
from cost_model.deadline import Deadline, OutOfTime
from cost_model.errors import InfeasibleError
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.search.coarse_to_fine import none_together
from passes.search.find import Found
from passes.search.find_states import States
from passes.search.search_terms import Boundary, Narrowing
from passes.solver.solve import ROUNDING


def bounded(found: Found, bound: float) -> Found:
    """bound: seconds that none of those searched was counted below."""
    bound = min(bound, found.seconds)
    gap = (found.seconds - bound) / max(found.seconds, 1e-300)
    status = "optimal" if gap <= ROUNDING else "feasible"
    return replace(found, lower_bound=bound, gap=gap, status=status)


FAR = 2
"""Times the limit: what needs more is where states start, however fast it is."""


def is_far(over: int, limit: int) -> bool:
    """Whether a plan so many bytes over the limit needs `FAR` times that."""
    return over > (FAR - 1) * limit


@dataclass(frozen=True)
class WholeTask:
    """What the fastest plan, memory aside, is of, where profile and backend are one. How many pieces are in flight does
    not matter. graph: the same object. way: of collectives, by number."""

    graph: fx.Graph
    again: tuple[str, ...]
    mesh: MeshSpec
    boundary: Boundary
    narrowing: Narrowing
    way: int

    def is_met_by(self, other: WholeTask, found: Found) -> bool:
        """Whether this is `other` with more layouts fixed, and `found`, the plan of that, has them."""
        if replace(other, boundary=self.boundary) != self or other.boundary.tied != self.boundary.tied:
            return False
        own, others = self.boundary, other.boundary
        if not (
            others.inputs.items() <= own.inputs.items() and others.outputs.items() <= own.outputs.items()
        ):
            return False
        placeholders = [node.name for node in self.graph.nodes if node.op == "placeholder"]
        outputs = result_layouts(self.graph.output_node().args[0], found.assignment)  # type: ignore[arg-type]
        return all(
            found.assignment[placeholders[i]].results[0] in layouts for i, layouts in own.inputs.items()
        ) and all(outputs[i] in layouts for i, layouts in own.outputs.items())


@dataclass
class KnownWholes:
    """Of one search of stages: a stage is planned as if memory were no matter, and again for each schedule whose pieces
    in flight do not fit beside it. Both begin with the same search."""

    _known: list[tuple[WholeTask, Found, dict[int, Judged]]] = field(default_factory=list)

    def found(self, task: WholeTask, judged: dict[int, Judged], search: Callable[[], Found]) -> Found:
        """The plan of `task`, searched once. judged: of plans, by `id` of their assignment; those of this one, and of
        its rivals, are added where they are missing."""
        for one, found, own in self._known:
            if one == task or task.is_met_by(one, found):
                judged.update(own)
                return found
        found = search()
        own = {id(one.assignment): judged[id(one.assignment)] for one in (found, *found.rivals)}
        self._known.append((task, found, own))
        return found


_WORTH, _MUCH = 0.02, 0.25
"""Shares of the limit that exchanges between all ranks must take for plans without them to be looked for, and to be
looked for first."""


@dataclass(frozen=True)
class StatesWithin:
    """The fastest plan within a limit, with ops computed again if that is what the limit asks for.

    The fastest of all plans is found first: where it fits, memory decides nothing. If it does not, states are chosen
    together with layouts, and that plan is judged. What is proven is of plans without a limit: rows may count
    more bytes than programs hold, and so leave out what fits.

    ways: with all collectives, and without those that exchange messages between all ranks. NCCL keeps gigabytes for
    these, which may be worth more than what they save; both are searched where the bound does not rule one out.
    reserve: bytes that a plan needs besides its tensors; None: that every plan needs. messages: those of the exchanges.
    families: of plans that may be faster than what states make of the fastest of all. anyway: what was judged that is
    judged within any limit, until a plan fits: other states are of the limit.
    programs: the ways in which a plan was lowered within the limit.
    """

    joint: JointGraph
    ways: tuple[Way, Way]
    reserve: Callable[[Found | None], int]
    messages: Callable[[Found], int]
    programs: Callable[[Found], Sequence[Program]]
    families: Iterable[Chosen] = ()
    anyway: list[Found] = field(default_factory=list[Found])

    def found(self, memory_limit: int | None, deadline: Deadline) -> Found:
        """Raises InfeasibleError, and OutOfTime."""
        least, first = self.reserve(None), self.ways[0]
        if memory_limit is not None and memory_limit <= least:
            return first.fastest(self.joint, None, memory_limit, least, deadline)
        whole = first.fastest(self.joint, None, None, least, deadline)
        if memory_limit is None or self.over(whole, memory_limit) <= 0:
            return whole
        self.anyway.extend((whole, *whole.rivals))
        known = self._known(whole, memory_limit, deadline)
        return self._best(whole, known, memory_limit, deadline)

    def _known(self, whole: Found, limit: int, deadline: Deadline) -> Found | None:
        """The fastest that fits of what was judged on the way to the fastest of all, and to those of families."""
        # Of the time left, for plans of families.
        others, until = list(whole.rivals), deadline.share(0.25)
        for family in self.families:
            with suppress(InfeasibleError, OutOfTime):
                until.check()
                found = self.ways[0].fastest(self.joint, family, None, 0, until)
                others += [found, *found.rivals]
        if until.left > 0.0:
            self.anyway.extend(others)
        fits = [found for found in others if self.over(found, limit) <= 0]
        return min(fits, key=lambda found: found.seconds, default=None)

    def over(self, found: Found, limit: int) -> int:
        """Bytes by which a plan, with what it needs besides, is over the limit; negative: what it leaves."""
        return self._needs(found) - limit

    def _needs(self, found: Found) -> int:
        return found.peak_nbytes + self.reserve(found)

    def _ordered(self, whole: Found, limit: int) -> tuple[Way, ...]:
        """Those to be searched. With exchanges first, unless these take so much of the limit that the other is likelier
        to fit."""
        nbytes = self.messages(whole)
        if nbytes <= _WORTH * limit:
            return self.ways[:1]
        return self.ways if nbytes < _MUCH * limit else self.ways[::-1]

    def _best(self, whole: Found, known: Found | None, limit: int, deadline: Deadline) -> Found:
        """The fastest of what is known and of what the ways have; those are not searched that can save too little. Far
        over the limit both start from one plan, and the second is only for where the first has none."""
        best, ways, far = known, self._ordered(whole, limit), is_far(self.over(whole, limit), limit)
        reasons, late = list[InfeasibleError](), False
        for place, way in enumerate(ways):
            if far and best is not None and best is not known:
                break
            # For programs of its states the share is larger: they take what was counted or more.
            faster = math.inf if best is None else best.seconds * (1.0 - 2e-2)
            until = deadline.share(1.0 if far else 1.0 / (len(ways) - place))
            try:
                own = way is self.ways[0] or far
                start = whole if own else way.fastest(self.joint, None, None, 0, until.share(0.5))
                # Share of the time that a way must be able to save to be searched.
                if best is not None and (
                    start.lower_bound >= best.seconds * (1.0 - 1e-2) or self.reserve(start) >= limit
                ):
                    continue
                found = self._within(way, start, limit, faster, until)
            except InfeasibleError as reason:
                reasons.append(reason)
                continue
            except OutOfTime:
                late = True
                continue
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
        if best is None:
            raise OutOfTime if late else none_together(reasons[0], whole.joined)
        return bounded(best, whole.lower_bound)

    def _within(self, way: Way, whole: Found, limit: int, faster: float, deadline: Deadline) -> Found | None:
        """The fastest plan of all, if it fits as it is or with less in transfers at once, which costs little; else that
        or one with other states, whichever is faster; None if that cannot take less than `faster`."""
        over = self.over(whole, limit)
        if over <= 0:
            return whole
        # Plans without exchanges are looked for within any limit only if those take enough of every such limit.
        first = self.anyway[0]
        always = way is self.ways[0] or self.messages(first) > _WORTH * self._needs(first)
        anyway = self.anyway if always else []
        anyway.append(whole)
        # What the fastest plan needs for messages, states without any do not.
        spared_nbytes = self.messages(whole) if way is self.ways[1] else 0
        room = limit - max(self.reserve(whole) - spared_nbytes, 0)
        search = Correcting(
            self.joint,
            self.programs,
            self._needs,
            self.reserve,
            way,
            whole,
            limit,
            room,
            faster,
            anyway,
            deadline,
        )
        # Share of the limit by which a plan may be over it for less in transfers at once to be tried alone.
        if over > 0.25 * limit:
            return search.run()
        spared = way.fastest(self.joint, States((), whole.assignment), None, 0, deadline)
        if self.over(spared, limit) > 0:
            return search.run()
        # Share of the time that less in transfers may cost for no other states to be searched.
        if spared.seconds > whole.seconds * (1.0 + 0.01):
            with suppress(InfeasibleError, OutOfTime):
                found = search.run()
                spared = min((one for one in (spared, found) if one is not None), key=lambda one: one.seconds)
        return spared
