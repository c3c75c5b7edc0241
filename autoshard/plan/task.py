"""One planning task: the graph of a call and all that decides its plan, and its search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from autoshard.plan.answer import BestSoFar
from autoshard.plan.correcting import Chosen, Way
from autoshard.plan.families import OF_WEIGHTS, Again, Sizes, Variant, family_named
from autoshard.plan.family_choices import family_narrowing
from autoshard.plan.infeasible import Asked, told
from autoshard.plan.judged import (
    MESSAGES,
    Judged,
    judged,
    messages_nbytes,
    over_link,
    plan_reserve,
    prices_of,
    program_as_in,
)
from autoshard.plan.plan import Plan
from autoshard.plan.plan_content import PlanContent, PlanOrigin
from autoshard.plan.plan_ends import (
    CallLayouts,
    by_first_name,
    output_layouts,
    parameter_layouts,
    parameter_shapes,
    pieces_of_other_sizes,
    resolve_pins,
)
from autoshard.plan.plan_memory import MemoryTimeline
from autoshard.plan.search_with_states import FAR, KnownWholes, StatesWithin, WholeTask
from autoshard.plan.why_not import variant_narrowing
from cost_model.deadline import Deadline, OutOfTime, Watch
from cost_model.errors import InfeasibleError, log
from cost_model.memory import OPTIMIZERS
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from cost_model.timed import TimedPrices
from passes.capture import Captured
from passes.ir.joint import JointGraph
from passes.ir.process_state import collector_paused
from passes.layout.layout import Assignment, Layout, joined_text
from passes.plan.describe import fallback_ops
from passes.plan.planned_graph import Collective
from passes.predict.prediction import MemoryWalk
from passes.search.coarse_to_fine import find_fastest
from passes.search.find import Found, Sought, alternatives
from passes.search.find_states import OfferedStates, States
from passes.search.judged_choice import Judgement, counted_seconds
from passes.search.search_terms import COLD, Boundary, Narrowing, SearchStart, boundary_of
from passes.states.compute_again import compute_again
from passes.states.offers import users_choice
from passes.strategies.prices import Prices

_AT_ONCE = SearchStart(gap=0.05, together=True), SearchStart(gap=0.05)
"""Where no plan was found in time: searches of a first one, of one axis both alike."""


@dataclass(frozen=True)
class Task:
    """What is to be planned, and under which prices. timed: where its program will run; None: no price is.

    links: the whole mesh, where `mesh` is that of one stage of a pipeline. beside: bytes that such a stage holds
    besides what its own step holds, given what that is; None: nothing. pace: of a rehearsed step, times modelled. gap:
    share of the step above the bound at which the search ends. watch: of each search. sizes: others of the call."""

    captured: Captured
    profile: Profile
    mesh: MeshSpec
    call: CallLayouts
    pins: Mapping[str, Layout]
    memory_limit: int | None
    backend: str
    time_limit: float
    narrowing: Narrowing = field(default_factory=Narrowing)
    timed: TimedPrices | None = None
    recompute: str = "auto"
    optimizer: str = "adamw"
    links: MeshSpec | None = None
    beside: Callable[[MemoryWalk | None], int] | None = None
    pace: float = 1.0
    gap: float = 0.01
    watch: Callable[[], Watch] | None = field(default=None, compare=False, repr=False)
    sizes: Sizes | None = field(default=None, compare=False, repr=False)

    def within(self, seconds: float) -> Deadline:
        """From now on, with a watch."""
        return Deadline.after(seconds, None if self.watch is None else self.watch())

    def searching(self, deadline: Deadline) -> Deadline:
        """What is decided and predicted after the search takes its time, too: it grows with the graph."""
        # Kept of the time limit for what follows the search; and the share of the limit at most.
        after = 2e-3 * len(self.joint.graph.nodes)
        return deadline.earlier(min(after, 0.25 * max(0.0, deadline.left)))

    @property
    def joint(self) -> JointGraph:
        return self.captured.joint

    @cached_property
    def prices(self) -> Prices:
        """One object: what was computed of it for the search, the predicted step and the records need not be again."""
        optimizer = OPTIMIZERS[self.optimizer]
        return prices_of(self.profile, self.mesh, self.backend, self.timed, optimizer, self.links, self.pace)

    def reserve(self, steps: Iterable[Collective], memory: MemoryWalk | None) -> int:
        """Bytes per device that a plan with these collectives needs besides its step. memory: of that step."""
        own = plan_reserve(self.links or self.mesh, steps)
        return own if self.beside is None else own + self.beside(memory)

    @property
    def boundary(self) -> Boundary:
        return self._boundary(self.joint, self.call)

    def _boundary(self, joint: JointGraph, call: CallLayouts) -> Boundary:
        pins = by_first_name(self.pins, self.captured)
        return boundary_of(joint, pins, call.inputs, call.outputs, call.free, call.state)

    def again(self) -> Again:
        """What plans the same but for one thing, for a plan's own questions. Copying it copies no graph."""
        step_seconds = lambda plan, variant: self.varied(variant).step_seconds(plan)
        paced = lambda pace: replace(self, pace=pace).again()
        search = lambda variant: search_plan(replace(self.varied(variant), watch=None))
        sizes = (None, (), {}) if (s := self.sizes) is None else (partial(s.plan, self), s.shapes, s.ranges)
        program = lambda plan: program_as_in(plan, self.joint, self.prices)
        others = lambda plan, names, until: alternatives(*program(plan), self.boundary, names, until)
        return Again(self.profile, search, step_seconds, paced, others, *sizes)

    def varied(self, variant: Variant) -> Task:
        """Raises as `resolve_pins`, `variant_narrowing`, and `Sizes.task`."""
        if variant.sizes and self.sizes is not None:
            return self.sizes.task(self, variant.sizes)
        new = resolve_pins(variant.pins, parameter_shapes(self.captured), self.mesh)
        if variant.link is not None:
            profile, timed = over_link(self.profile, self.timed, self.links or self.mesh, *variant.link)
            return replace(self, profile=profile, timed=timed)
        return replace(
            self,
            pins={**({} if variant.family else self.pins), **new},
            narrowing=variant_narrowing(variant, self.joint, self.mesh),
        )

    def step_seconds(self, plan: PlanContent) -> float:
        """Of the program that `plan` is, under these prices."""
        return judged(*program_as_in(plan, self.joint, self.prices)).seconds

    def program_fields(self, joint: JointGraph, judged: Judged) -> dict[str, Any]:
        """Of a plan of the task, by name: all that its layouts say of its program. joint: with what runs again. What a
        stage sends of a smaller piece is laid out as of the first."""
        settled = self.call.settled(output_layouts(self.joint, judged.planned.layouts))
        boundary = lambda graph: self._boundary(graph, settled)
        assignment, memory = judged.planned.layouts, judged.memory
        return {
            "records": judged.planned.nodes,
            "parameter_layouts": parameter_layouts(joint, assignment, self.captured),
            "inputs": self.call.inputs,
            "outputs": output_layouts(joint, assignment),
            "other_sizes": pieces_of_other_sizes(joint, judged, boundary, Deadline.after(self.time_limit)),
            "memory": None if memory is None else MemoryTimeline.of(memory),
            "ran": judged.timeline,
        }

    def judged(self, assignment: Assignment) -> Judged:
        """Lowered and put on the timeline."""
        return judged(self.joint, assignment, self.prices)


def search_plan(
    task: Task,
    deadline: Deadline | None = None,
    rivals: Callable[[Judged], object] = lambda _: None,
    start: SearchStart = COLD,
    wholes: KnownWholes | None = None,
) -> Plan:
    """Search the canonical graph of the task under its ends and prices.

    deadline: of all of it; None: the task's `time_limit` from now. rivals: told of every assignment that is put on the
    timeline, the plan's included. start: what is known before. wholes: of this profile. Raises InfeasibleError.
    """
    return search_plans(task, deadline, rivals, start, wholes, most=1)[0]


@collector_paused()
def search_plans(
    task: Task,
    deadline: Deadline | None = None,
    rivals: Callable[[Judged], object] = lambda _: None,
    start: SearchStart = COLD,
    wholes: KnownWholes | None = None,
    *,
    most: int,
) -> list[Plan]:
    """`search_plan`'s, and after it the next best of those that its search judged: at most `most` in all."""
    until = task.searching(deadline or task.within(task.time_limit))
    beside = lambda one: task.reserve(one.collectives, one.memory)
    made = lambda found, judged: plan_of(task, found, judged, task.again())
    best, known = BestSoFar(task.memory_limit, beside, made, until), wholes or KnownWholes()

    def way(number: int, prices: Prices, start: SearchStart) -> Way:
        within = prices if task.memory_limit is None else prices.within(task.memory_limit)

        def fastest(
            joint: JointGraph, chosen: Chosen | None, memory_limit: int | None, reserve: int, latest: Deadline
        ) -> Found:
            as_if = chosen is None and memory_limit is None  # memory were no matter
            is_start = as_if and wholes is None  # of states: of the second way, or far over the limit

            def judge(assignment: Assignment, joining: Prices) -> Judgement:
                found = best.judge((joint, assignment, joining), within=chosen is not None)
                rivals(found)
                ends = is_start and (number > 0 or best.far_over(found))
                return Judgement(found.phase_seconds, found.peak.nbytes, ends)

            narrowing = (
                chosen.narrowing(task.narrowing) if isinstance(chosen, States) else chosen or task.narrowing
            )

            def search() -> Found:
                given = joint, prices if as_if else within, task.boundary, memory_limit, reserve, narrowing
                hear = lambda one: best.hear(one, of_all=chosen is None and number == 0)
                begin = start.ending_at(task.gap)
                if is_start and task.memory_limit is not None:
                    begin = replace(begin, room=0 if number else FAR * task.memory_limit)
                found = find_fastest(Sought(*given, judge, begin, hear), latest)
                return replace(best.with_peak(found), rivals=tuple(map(best.with_peak, found.rivals)))

            if not as_if:
                return search()
            one = WholeTask(task.joint.graph, again, task.mesh, task.boundary, narrowing, number)
            found = known.found(one, best.judged, search)
            best.bound = best.bound if number else found.lower_bound
            return found

        def offer(whole: Found) -> OfferedStates:
            given = task.joint, within.joining(whole.joined), task.boundary
            narrowing, pinned, overlaps = task.narrowing, _pinned(task), whole.overlaps
            limit = math.inf if task.memory_limit is None else task.memory_limit
            return OfferedStates.of(
                *given, narrowing=narrowing, pinned=pinned, overlaps=overlaps, limit=limit
            )

        return Way(fastest, offer)

    reserve = lambda found: task.reserve((), None) if found is None else beside(best.of(found))
    messages = lambda found: messages_nbytes(task.links or task.mesh, best.of(found).collectives)
    again = tuple(_pinned(task) or ())
    whole = compute_again(task.joint, again)
    families = () if task.narrowing != Narrowing() else families_within(whole, task.mesh)

    def limited(start: SearchStart) -> StatesWithin:
        ways = way(0, task.prices, start), way(1, task.prices.avoiding(MESSAGES), start)
        return StatesWithin(whole, ways, reserve, messages, best.programs, families)

    within_limit = limited(start)
    try:
        found = best.or_better(within_limit.found(task.memory_limit, until))
    except (InfeasibleError, OutOfTime) as error:
        late = until.left <= 0.0
        reason = None if isinstance(error, OutOfTime) or (best.judged and late) else error
        first = replace(until.of_first_plan.as_part, watch=best)
        for at_once in _AT_ONCE[-len(task.mesh.real_axes()) :] if late or reason is None else ():
            if first.left > 0.0:
                with suppress(InfeasibleError, OutOfTime):
                    limited(at_once).found(task.memory_limit, first)
        if best.found is not None:
            return [best.plan(best.found)]
        with suppress(InfeasibleError, OutOfTime):
            if reason is not None and not best.judged and task.memory_limit is not None:
                # For what lives at its peak.
                within_limit.anyway.append(within_limit.ways[0].fastest(whole, None, None, 0, until))
        given = task.joint, task.mesh, task.memory_limit, task.time_limit, task.pins, task.recompute
        asked = Asked(*given, beside, task.links)
        raise told(reason, asked, best.judged.values(), list(map(best.of, within_limit.anyway))) from None
    if found.joined:
        log.info("plan: axes searched together: %s", joined_text(found.joined))
    return [best.plan(one) for one in (found, *itertools.islice(filter(best.fits, found.rivals), most - 1))]


def _pinned(task: Task) -> list[str] | None:
    """The ops that are computed again in any plan, and no others; None: the search says which."""
    return users_choice(task.joint) if task.recompute == "user" else None


def plan_of(task: Task, found: Found, judged: Judged, again: Again | None) -> Plan:
    """The plan that was found. Its `step_time` is the objective's where it was not judged."""
    joint = compute_again(task.joint, judged.planned.again)
    recounted = counted_seconds(found.step.totals(judged.planned.nodes), found.overlaps)
    assert math.isclose(recounted, found.seconds, rel_tol=1e-6), (recounted, found.seconds)
    return Plan(
        mesh=task.mesh,
        cost=found.seconds,
        lower_bound=found.lower_bound,
        status=found.status,
        step_time=found.seconds if judged.step is None else judged.seconds,
        peak_memory=found.peak_nbytes,
        peak_node=found.peak_node,
        memory_limit=task.memory_limit,
        reserve=plan_reserve(task.links or task.mesh, judged.collectives),
        fallbacks=fallback_ops(joint),
        origin=PlanOrigin.of(task.profile, task.joint, task.optimizer, task.timed),
        joined_axes=found.joined,
        moved_nbytes=None if math.isinf(judged.prices.moved_nbytes) else int(judged.prices.moved_nbytes),
        micro_batches=joint.pieces,
        head_pieces=joint.head_pieces,
        most_gain=found.most_gain,
        again=again,
        **task.program_fields(joint, judged),
    )


SMALL_NODES, FEW_NODES = 64, 500
"""Of the largest graphs of which all families are searched, and of which FSDP is. All of them took blocks of 300 nodes
three times as long to plan; of 4 layers of Llama-3-8B FSDP took 6 s of 36, and states did better."""


def families_within(joint: JointGraph, mesh: MeshSpec) -> Iterator[Narrowing]:
    """What each allows, of a task that allows all: FSDP first, which holds least, and in a small graph all others that
    the mesh and the model have."""
    fsdp = family_named("FSDP")
    assert fsdp is not None
    count = len(joint.graph.nodes)
    first = [fsdp] if count <= FEW_NODES else []
    others = [family for family in OF_WEIGHTS if family is not fsdp and count <= SMALL_NODES]
    for family in (*first, *others):
        with suppress(InfeasibleError):
            yield family_narrowing(family, joint, mesh)
