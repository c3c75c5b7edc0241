"""What was asked of `autoshard` for one model, and which plans a session asks for: of the first kind of call, and of
later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan.derived_plans import carried_plan, carried_stages
from autoshard.plan.division import WHOLE, Division, racers
from autoshard.plan.micro_batches import cut_call, cut_call_head, fastest_in_pieces, fitting, most_pieces
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_cache import (
    BEST,
    Candidate,
    cached_candidates,
    cached_search,
    keep_plan,
    kept_plan,
    plan_path,
)
from autoshard.plan.plan_content import pace_of
from autoshard.plan.plan_fits import check_again, check_mesh, check_outputs, planned_graph
from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.progress import tell
from autoshard.refine.refine import Refined, may_refine, refined_plan, refining
from autoshard.refine.rounds import ROUGH_GAP
from autoshard.refine.time_work import TimedStore, store_of
from autoshard.refine.timed_cases import is_worth_it, refining_seconds
from autoshard.runtime.beside import TIMING_SHARE, Better, Search, Talk
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from cost_model.memory import format_seconds
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from cost_model.timed import TimedPrices
from passes.capture import Captured
from passes.layout.layout import Layout
from passes.micro_batches.cut_batch import Uncut
from passes.search.search_start import COLD, SearchStart


@dataclass(frozen=True)
class Settings:
    """The user's arguments of `autoshard`; see its docstring. profile: None until it is measured."""

    profile: Profile | None
    memory_limit: int | None
    in_placements: Any
    out_placements: Any
    pins: Mapping[str, Layout]
    plan: Plan | None
    backend: str
    recompute: str
    time_limit: float
    micro_batches: int | str = 1
    stages: str | None = None
    schedule: str | None = None
    optimizer: str | None = None
    race: int = 0
    refine: str = "off"
    gap: float = 0.01
    tune: str = "first"

    @property
    def starts_at_once(self) -> bool:
        """Whether the first step comes before the plan is the best that can be found. A race is before all steps, and
        parameters do not go from some stages to others."""
        return self.tune != "first" and self.race < 2 and self.stages is None

    def described(self) -> dict[str, str]:
        """By argument, what all ranks must have given alike."""
        given = {one.name: str(getattr(self, one.name)) for one in fields(self) if one.name != "pins"}
        return given | {
            "constraints": str(sorted(self.pins.items())),
            "plan": "searched" if self.plan is None else self.plan.fingerprint,
            "profile": "measured" if self.profile is None else self.profile.hash(),
        }


QUICK_SECONDS = 2.0
"""Of search before the first step."""
WORTH = 0.05
"""Share of a short step that a better plan must save for a search to go on beside it."""
LEAST_WIN = 0.02
"""Share of a step that a plan must save for parameters to move to its layouts."""

Found = list[Candidate]
"""The search's own plan, and those that are to race it: none where there is no race."""


def _alone(plan: Plan) -> Found:
    return [Candidate(BEST, plan)]


@dataclass(frozen=True)
class Planner:
    """settings: with their profile."""

    mesh: DeviceMesh
    spec: MeshSpec
    settings: Settings

    def refined(self, captured: Captured, layouts: CallLayouts) -> Refined | None:
        """On rank 0, the first plan where prices are refined. Every rank must get here."""
        s = self.settings
        if s.refine == "off" or s.plan is not None or not self._may_refine:
            return None
        return refined_plan(self.mesh, self._task(captured, layouts, s.pins), self._division)

    def first(self, captured: Captured, layouts: CallLayouts, refined: Refined | None) -> Found:
        """The plan of the first kind of call; several where they are to race."""
        s = self.settings
        if s.race < 2 or self.spec.device_count == 1:
            return _alone(self._plan(captured, layouts) if refined is None else refined.plan)
        task = self._task(captured, layouts, s.pins)
        if refined is not None:
            task = replace(task, timed=refined.timed, pace=pace_of(refined.plan.rehearsed))
            return racers(refined.plan, task, self._division, s.race)
        deadline = Deadline.after(s.time_limit)
        if self._division != WHOLE:
            best = self._division.fastest(task, deadline, cached_search)
            return racers(best, task, self._division, s.race)
        whole = lambda cut, _: cached_candidates(replace(task, captured=cut), s.race)
        return fitting(captured, s.memory_limit, whole, deadline)

    def quick(self, captured: Captured, layouts: CallLayouts, store: TimedStore | None) -> tuple[Plan, bool]:
        """A plan of the first kind of call, soon, and whether it is what an earlier start ended with."""
        s = self.settings
        if s.plan is not None:
            return self._plan(captured, layouts), True
        task = self._task(captured, layouts, s.pins)
        timed = None if store is None else store.read().if_any()
        tuned = kept_plan(_tuned_path(task), replace(task, timed=timed))
        if tuned is not None:
            return tuned, True
        near = COLD if s.memory_limit else SearchStart(gap=ROUGH_GAP)
        search = lambda own, until: kept_plan(plan_path(own), own) or search_plan(own, until, start=near)
        try:
            return self._division.fastest(task, Deadline.after(min(QUICK_SECONDS, s.time_limit)), search), False
        except InfeasibleError:  # there may be one that takes longer to find
            return self._division.fastest(task, Deadline.after(s.time_limit), search), False

    def store(self) -> TimedStore | None:
        """Where kernels and collectives are timed, their times. All ranks together."""
        refines = self.settings.refine != "off" and self._may_refine
        return store_of(self.mesh, self.settings.backend) if refines else None

    def search_beside(
        self, captured: Captured, layouts: CallLayouts, first: Plan, store: TimedStore | None
    ) -> Search | None:
        """What looks for a better plan than `first` while that runs; None: no plan is worth it. The same on all
        ranks."""
        s = self.settings
        if first.gap <= s.gap and store is None:
            return None
        if first.gap < WORTH and not is_worth_it(first.step_time):
            seconds = format_seconds(first.step_time)
            tell(self.mesh.get_rank(), f"tuning: none: steps of about {seconds}, and no plan takes {WORTH:.0%} less")
            return None
        task = self._task(captured, layouts, s.pins)
        return _Searching(task, self._division, first, store)

    @property
    def may_rehearse(self) -> bool:
        """Whether the first plan was refined, and does not race, the same on all ranks."""
        s = self.settings
        return s.plan is None and s.refine != "off" and s.race < 2 and self._may_refine

    @property
    def _may_refine(self) -> bool:
        profile = self.settings.profile
        return profile is not None and may_refine(self.mesh, profile.nominal)

    def carried(
        self, captured: Captured, layouts: CallLayouts, first: Plan, held: Mapping[str, Layout]
    ) -> Found:
        """The plan of another kind of call: the layouts there are or, if they do not fit, a search with `held`."""
        task = self._task(captured, layouts, held)
        if isinstance(first, PipelinePlan):
            return _alone(carried_stages(task, first))

        def planned(cut: Captured, until: Deadline) -> Plan:
            own = replace(task, captured=cut)
            try:
                return carried_plan(own, first)
            except InfeasibleError:
                return search_plan(own, until)

        s = self.settings
        wanted = (
            s.micro_batches if s.micro_batches == "auto" else min(int(s.micro_batches), most_pieces(captured))
        )
        with suppress(Uncut):
            captured = cut_call_head(captured, first.head_pieces)
        deadline = Deadline.after(s.time_limit)
        return _alone(fastest_in_pieces(captured, wanted, s.memory_limit, planned, deadline))

    def _plan(self, captured: Captured, layouts: CallLayouts) -> Plan:
        s = self.settings
        if s.plan is not None:
            check_mesh(s.plan, self.spec)
            graph = planned_graph(captured, s.plan)
            s.plan.check_graph(graph)
            check_again(s.plan, s.recompute, graph)
            check_outputs(s.plan, layouts.outputs)
            return s.plan
        task = self._task(captured, layouts, s.pins)
        return self._division.fastest(task, Deadline.after(s.time_limit), cached_search)

    @property
    def _division(self) -> Division:
        s = self.settings
        return Division(s.micro_batches, s.stages, s.schedule)

    def _task(self, captured: Captured, layouts: CallLayouts, pins: Mapping[str, Layout]) -> Task:
        s = self.settings
        assert s.profile is not None
        given = s.memory_limit, s.backend, s.time_limit
        task = Task(captured, s.profile, self.spec, layouts, pins, *given, recompute=s.recompute, gap=s.gap)
        return task if s.optimizer is None else replace(task, optimizer=s.optimizer)


@dataclass(frozen=True)
class _Searching:
    """Says which plans are better than `first`, and asks for times of kernels and collectives."""

    task: Task
    division: Division
    first: Plan
    store: TimedStore | None

    def __call__(self, talk: Talk) -> None:
        best = self.first
        for found, timed in self._found(talk):
            under = replace(self.task, timed=timed)
            if _seconds(found, under) < (1.0 - LEAST_WIN) * _seconds(best, under):
                best = found
                talk.send(Better(found.to_json()))
        if best.micro_batches == best.head_pieces == 1:
            keep_plan(_tuned_path(self.task), best)

    def _found(self, talk: Talk) -> Iterator[tuple[Plan, TimedPrices | None]]:
        """Plans, one after the other, and what was timed by then."""
        if self.store is None:
            yield self.division.fastest(self.task, Deadline.after(self.task.time_limit), cached_search), None
            return
        rounds = refining(self.task, self.division, self.store, budget=_budget)
        try:
            asked = next(rounds)
            while True:
                yield asked.plan, asked.timed
                talk.send(asked)
                asked = rounds.send(talk.recv())
        except StopIteration as end:
            yield end.value.plan, end.value.timed


def _budget(step_seconds: float, time_limit: float, nodes: int, backend: str) -> float:
    """Beside the steps it takes as many times as long as its share of them is small."""
    return refining_seconds(step_seconds, time_limit, nodes, backend) / TIMING_SHARE


def _seconds(plan: Plan, task: Task) -> float:
    cut = cut_call(task.captured, plan.micro_batches, plan.head_pieces)
    return replace(task, captured=cut).step_seconds(plan)


def _tuned_path(task: Task) -> Path:
    """The file of the plan that tuning ended with."""
    return plan_path(task, "tuned")
