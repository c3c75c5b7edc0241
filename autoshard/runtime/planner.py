"""What was asked of `autoshard` for one model, and which plans a session asks for: of the first kind of call, and of
later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.call_ends import CallEndsAsked
from autoshard.global_call import GlobalCall
from autoshard.plan.answer import Listener
from autoshard.plan.derived_plans import carried_plan, carried_stages
from autoshard.plan.division import WHOLE, Division, racers
from autoshard.plan.families import Ranges, Sizes
from autoshard.plan.micro_batches import cut_call_head, fastest_in_pieces, fitting, most_pieces
from autoshard.plan.other_sizes import check_larger
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_cache import BEST, Candidate, cached_candidates, cached_search, kept_plan, plan_path
from autoshard.plan.plan_content import pace_of
from autoshard.plan.plan_fits import check_again, check_mesh, check_outputs, planned_graph
from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.progress import Say
from autoshard.refine.refine import Refined, may_refine, refined_plan
from autoshard.refine.rounds import ROUGH_GAP
from autoshard.refine.time_work import TimedStore, store_of
from autoshard.watching.agreement import collectively, from_first
from cost_model.deadline import FIRST_PLAN_SECONDS, Deadline
from cost_model.errors import InfeasibleError
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.capture import Captured
from passes.ir.routing import BALANCED, Routing
from passes.layout.layout import Layout
from passes.micro_batches.cut_batch import Uncut


@dataclass(frozen=True)
class Settings:
    """The user's arguments of `autoshard`; see its docstring. profile: None: not measured yet."""

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
    batch: str = "global"
    tune: str = "first"
    dynamic: tuple[str, ...] = ()
    sizes: Ranges = field(default_factory=dict)
    inference: bool = False
    routing: Routing = BALANCED

    @property
    def starts_at_once(self) -> bool:
        """Whether the first step comes before the plan is the best that can be found. A race is before all steps, and
        parameters do not go from some stages to others."""
        return self.tune != "first" and self.race < 2 and self.stages is None

    def ends(self, spec: MeshSpec, call: GlobalCall) -> CallEndsAsked:
        return CallEndsAsked(spec, self.out_placements, self.inference, call.dtensors)

    def described(self) -> dict[str, str]:
        """By argument, what all ranks must have given alike."""
        given = {one.name: str(getattr(self, one.name)) for one in fields(self) if one.name != "pins"}
        return given | {
            "constraints": str(sorted(self.pins.items())),
            "plan": "searched" if self.plan is None else self.plan.fingerprint,
            "profile": "measured" if self.profile is None else self.profile.hash(),
        }


T = TypeVar("T")
Found = list[Candidate]
"""The search's own plan, and those that are to race it: none where there is no race."""


def _alone(plan: Plan) -> Found:
    return [Candidate(BEST, plan)]


def shared_plans(mesh: DeviceMesh, find: Callable[[], tuple[Found, T]]) -> tuple[Found, T, int]:
    """What rank 0 finds, on all ranks: its plans, what it says of them, and its seed. All ranks together."""
    mine: list[Found] = []

    def said() -> tuple[Any, T, int]:
        found, words = find()
        mine.append(found)
        return [one.to_json() for one in found], words, torch.initial_seed()

    data, words, seed = from_first(mesh, said, what="the plan")
    read = lambda: mine[0] if mine else list(map(Candidate.from_json, data))
    return collectively(mesh, read, what="the plan read"), words, seed


@dataclass(frozen=True)
class Planner:
    """settings: with their profile. say: told of the best plan so far, in words. sizes: others of the call."""

    mesh: DeviceMesh
    spec: MeshSpec
    settings: Settings
    say: Say = lambda words: None
    sizes: Sizes | None = None

    def refined(self, captured: Captured, layouts: CallLayouts) -> Refined | None:
        """On rank 0, the first plan where prices are refined. Every rank must get here."""
        s = self.settings
        if s.refine == "off" or s.plan is not None or not self._may_refine:
            return None
        return refined_plan(self.mesh, self.task(captured, layouts, s.pins), self.division)

    def first(self, captured: Captured, layouts: CallLayouts, refined: Refined | None) -> Found:
        """The plan of the first kind of call; several where they are to race."""
        s = self.settings
        if s.race < 2 or self.spec.device_count == 1:
            return _alone(self._plan(captured, layouts) if refined is None else refined.plan)
        task = self.task(captured, layouts, s.pins)
        if refined is not None:
            task = replace(task, timed=refined.timed, pace=pace_of(refined.plan.rehearsed))
            return racers(refined.plan, task, self.division, s.race)
        deadline = task.within(s.time_limit)
        if self.division != WHOLE:
            best = self.division.fastest(task, deadline, cached_search)
            return racers(best, task, self.division, s.race)
        whole = lambda cut, _: cached_candidates(replace(task, captured=cut), s.race)
        return fitting(captured, s.memory_limit, whole, deadline)

    def quick(
        self, captured: Captured, layouts: CallLayouts, store: TimedStore | None
    ) -> tuple[Plan, bool, int]:
        """Rank 0's plan of the first kind of call, soon; whether it is what an earlier start ended with; and rank 0's
        seed."""

        def find() -> tuple[Found, bool]:
            plan, tuned = self._quick(captured, layouts, store)
            return _alone(plan), tuned

        (one,), tuned, seed = shared_plans(self.mesh, find)
        return one.plan, tuned, seed

    def _quick(self, captured: Captured, layouts: CallLayouts, store: TimedStore | None) -> tuple[Plan, bool]:
        s = self.settings
        if s.plan is not None:
            return self._plan(captured, layouts), True
        task = self.task(captured, layouts, s.pins)
        timed = None if store is None else store.read().if_any()
        tuned = kept_plan(tuned_path(task, self.division), replace(task, timed=timed))
        if tuned is not None:
            return tuned, True
        search = lambda own, until: kept_plan(plan_path(own), own) or search_plan(own, until)
        rough = Listener(lambda answer: answer.gap > ROUGH_GAP)
        # Of search before the first step; a first plan is needed, with head and loss whole or in pieces.
        soon = Deadline.after(min(2.0, s.time_limit), rough, first_plan=2.0 * FIRST_PLAN_SECONDS)
        try:
            return self.division.fastest(task, soon, search), False
        except InfeasibleError:
            if soon.left > 0.0:
                raise
            # It had little time. The user's is for a plan that fits.
            return self._plan(captured, layouts), False

    def store(self) -> TimedStore | None:
        """Where kernels and collectives are timed, their times. All ranks together."""
        refines = self.settings.refine != "off" and self._may_refine
        return store_of(self.mesh, self.settings.backend) if refines else None

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
        task = self.task(captured, layouts, held)
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
        task = self.task(captured, layouts, s.pins)
        if s.plan is not None:
            check_mesh(s.plan, self.spec)
            graph = planned_graph(captured, s.plan)
            s.plan.check_graph(graph)
            check_again(s.plan, s.recompute, graph)
            check_outputs(s.plan, layouts.outputs)
            check_larger(task, s.plan)
            return s.plan
        return self.division.fastest(task, task.within(s.time_limit), cached_search)

    @property
    def division(self) -> Division:
        s = self.settings
        return Division(s.micro_batches, s.stages, s.schedule)

    def task(self, captured: Captured, layouts: CallLayouts, pins: Mapping[str, Layout]) -> Task:
        s = self.settings
        assert s.profile is not None
        given = s.memory_limit, s.backend, s.time_limit
        task = Task(captured, s.profile, self.spec, layouts, pins, *given, recompute=s.recompute, gap=s.gap)
        task = replace(task, watch=lambda: Listener(lambda answer: self.say(answer.words)), sizes=self.sizes)
        return task if s.optimizer is None else replace(task, optimizer=s.optimizer)


def tuned_path(task: Task, division: Division) -> Path:
    """The file of the plan that tuning ended with."""
    largest = {} if task.sizes is None else task.sizes.largest
    return plan_path(task, "tuned", division, *largest.items())
