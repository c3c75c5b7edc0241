"""Refine a plan: time what it is made of, search again, until it stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan.derived_plans import rehearsed_plan
from autoshard.plan.division import WHOLE, Division
from autoshard.plan.micro_batches import fitting
from autoshard.plan.other_sizes import asks_larger
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import cached_search, keep_rehearsal, kept_rehearsal, plan_path
from autoshard.plan.task import Task
from autoshard.refine.rounds import Budget, Rounds
from autoshard.refine.time_work import TimedStore, store_of, time_work
from autoshard.refine.timed_cases import Case, cases_of_parts, refining_seconds, with_times
from autoshard.watching.agreement import from_first
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError, log
from cost_model.measure.peers import collective_backend, local_device
from cost_model.memory import format_seconds
from cost_model.mesh import MeshSpec
from cost_model.timed import TimedPrices
from passes.capture import Captured
from passes.compile.single_kernel import start_compiler

_Next = tuple[tuple[Case, ...], float]
"""Cases to time next, and for how many seconds."""


@dataclass
class DividedRounds:
    """One task in pieces or in stages, refined. plan, timed: as of `Rounds`.

    The plan is found under what was timed before. `wanted` says what of it there is to time; `add` takes the times and
    plans again, cuts and schedules included, until the plan stays, everything of it was timed, or time is up. No
    rivals are timed beside it: each would take as long to plan as the plan itself.
    """

    _task: Task
    _division: Division
    _store: TimedStore
    budget: Budget = refining_seconds

    def __post_init__(self) -> None:
        task = self._task
        self.timed = self._store.read()
        self._tried: set[object] = set()
        self._rounds = 0
        begun = time.monotonic()
        self.plan = self._planned(task.within(task.time_limit))
        self._planning_seconds = time.monotonic() - begun
        nodes = len(task.joint.graph.nodes)
        self._deadline = Deadline.after(
            self.budget(self.plan.step_time, task.time_limit, nodes, task.backend)
        )
        self._done = self.seconds_left <= 0.0

    @property
    def seconds_left(self) -> float:
        """For timing: planning again comes after it."""
        return max(0.0, self._deadline.left - self._planning_seconds)

    def wanted(self) -> tuple[Case, ...]:
        """Cases to time next, in this order, a few known kernels first; (): none."""
        # Each round of timing is followed by a plan of the whole call.
        ended = self._done or self._rounds >= 3 or self.seconds_left <= 0.0
        known = replace(self._task, timed=self.timed)
        cases = () if ended else cases_of_parts(self.plan, known).untried(self._tried)
        if not cases:
            self._finish()
        return cases

    def _finish(self) -> None:
        """Ends timing; takes over the rehearsal of an earlier start, if there was one."""
        self._done = True
        self._rehearsal = plan_path(self._task, "rehearsed", self.plan.fingerprint)
        known = kept_rehearsal(self._rehearsal)
        if known is not None:
            self.plan = rehearsed_plan(self.plan, *known)

    def add(self, times: TimedPrices) -> None:
        """Plan again, under these as well."""
        self.timed = with_times(self.timed, times)
        self._store.write(self.timed)
        self._rounds += 1
        before = self.plan
        try:
            self.plan = self._planned(self._task.within(max(self._deadline.left, self._planning_seconds)))
        except InfeasibleError as error:  # it was not before: there was no time for it
            log.debug("refine: %s", error)
        self._done = _decided(self.plan) == _decided(before)
        steps = f"{format_seconds(before.step_time)} -> {format_seconds(self.plan.step_time)}"
        log.info("refine: predicted step %s, %s plan", steps, "the same" if self._done else "another")

    def keep(self, plan: Plan) -> None:
        """How long a step took: the next start plans again, under what was timed, and finds the plan of this one."""
        assert plan.rehearsed is not None
        keep_rehearsal(self._rehearsal, plan.rehearsed.measured, plan.rehearsed.busy)

    def _planned(self, deadline: Deadline) -> Plan:
        task = replace(self._task, timed=self.timed.if_any())
        return self._division.fastest(task, deadline, cached_search)


def _decided(plan: Plan) -> object:
    """What makes it another plan, prices aside."""
    division = plan.axis, plan.schedule, plan.micro_batches, plan.head_pieces, plan.cut
    return division, [one.planned.layouts for one in plan.stages]


def may_refine(mesh: DeviceMesh, nominal: bool) -> bool:
    """Whether times of this mesh's processes say more than the profile, the same on all ranks.

    Not where prices are nominal: who gives those asks for a plan under them. Nor on one device, nor on a mesh that
    leaves out some of the processes, which would have to help.
    """
    spec = MeshSpec.of(mesh)
    whole = dist.is_initialized() and dist.get_world_size() == spec.device_count > 1
    return whole and not nominal and collective_backend(mesh) in ("gloo", "nccl")


@dataclass(frozen=True)
class Refined:
    """A plan, and all that was timed for it; None: nothing was. keep: writes the plan, rehearsed, for the
    next start."""

    plan: Plan
    timed: TimedPrices | None
    keep: Callable[[Plan], None]


@dataclass(frozen=True)
class ToTime:
    """cases: what to time next, for about so many seconds. plan: the one to take so far, under `timed`."""

    cases: tuple[Case, ...]
    seconds: float
    plan: Plan
    timed: TimedPrices | None


def refining(
    task: Task, division: Division, store: TimedStore, **budget: Budget
) -> Generator[ToTime, TimedPrices, Refined]:
    """The plan of `task` under prices that are timed where it will run: asks for them, and is sent them. Talks to
    nobody else. Raises as `search_plan`. budget: as `Rounds` takes it, if another."""

    def start(captured: Captured, until: Deadline) -> tuple[Rounds, tuple[Case, ...]]:
        rounds = Rounds(replace(task, captured=captured, time_limit=until.left), store, **budget)
        return rounds, rounds.wanted()

    if division.leaves_whole(task.memory_limit) and not asks_larger(task):
        rounds, cases = fitting(task.captured, task.memory_limit, start, Deadline.after(task.time_limit))
    else:
        rounds = DividedRounds(task, division, store, **budget)
        cases = rounds.wanted()
    while cases:
        rounds.add((yield ToTime(cases, rounds.seconds_left, rounds.plan, rounds.timed.if_any())))
        cases = rounds.wanted()
    return Refined(rounds.plan, rounds.timed.if_any(), rounds.keep)


def refined_plan(mesh: DeviceMesh, task: Task, division: Division = WHOLE) -> Refined | None:
    """The plan of `task` under prices that were timed here; of rank 0, None on the others. Every rank calls it.

    What was timed before is read from disk (`autoshard.refine.time_work`), and so is the plan. Raises, on all ranks,
    as `search_plan`.
    """
    rounds = refining(task, division, store_of(mesh, task.backend))
    ended: list[Refined] = []

    def start_alone() -> None:
        """Rank 0 plans on one core. Once all start it, as they time, each has a share of the cores."""
        if task.backend != "eager":
            start_compiler(local_device(mesh), task.backend)

    def after(times: TimedPrices | None) -> _Next:
        try:
            asked = next(rounds) if times is None else rounds.send(times)
        except StopIteration as end:
            ended.append(end.value)
            return (), 0.0
        return asked.cases, asked.seconds

    cases, seconds = from_first(mesh, lambda: after(None), what="what to time", meanwhile=start_alone)
    while cases:
        begun = time.monotonic()
        times = time_work(mesh, cases, seconds, backend=task.backend)
        log.info(
            "refine: %d kernels and %d collectives timed in %.1f s",
            len(times.kernels),
            len(times.collectives),
            time.monotonic() - begun,
        )
        cases, seconds = from_first(mesh, lambda times=times: after(times), what="what to time")
    return ended[0] if ended else None


def shared_refined_plan(mesh: DeviceMesh, task: Task, division: Division = WHOLE) -> Plan:
    """`refined_plan`, on every rank; rank 0's can be asked what searches again."""
    mine = refined_plan(mesh, task, division)
    data = from_first(mesh, lambda: None if mine is None else mine.plan.to_json(), what="the plan")
    return Plan.from_json(data) if mine is None else mine.plan
