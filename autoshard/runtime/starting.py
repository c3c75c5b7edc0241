"""From a kind of call to its programs: all before the first step, or at once, and the rest beside the steps; and
beside them too, once, what the layouts of the first plan lose at sizes far from its own."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from autoshard.global_call import GlobalCall
from autoshard.plan.crossovers import size_crossovers
from autoshard.plan.division import Division
from autoshard.plan.families import Again
from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import cached_search, keep_plan
from autoshard.plan.task import CallLayouts, Task
from autoshard.progress import Say, tell, teller
from autoshard.refine.refine import Refined, refining
from autoshard.refine.time_work import TimedStore
from autoshard.refine.timed_cases import is_worth_it, refining_seconds
from autoshard.runtime.beside import TIMING_SHARE, Beside, Better, Search, Talk
from autoshard.runtime.executable import MadeAhead, Programs
from autoshard.runtime.making import Call
from autoshard.runtime.module import Mode
from autoshard.runtime.planner import Found, Planner, Settings, tuned_path
from autoshard.runtime.race import is_to_rehearse, race, rehearsed
from autoshard.runtime.tuning import TunedHome, Tuning, was_compiled
from autoshard.version import __version__
from cost_model.deadline import Deadline
from cost_model.memory import format_seconds
from cost_model.timed import TimedPrices
from passes.canonicalize.mark_rows import experts_of
from passes.capture import Captured
from passes.ir.joint import JointGraph
from passes.ir.routing import check_experts
from passes.ir.size_names import Shapes, named_sizes, size_named
from passes.ir.torch_inductor import warm_inductor
from passes.plan.describe import graph_hash
from passes.rules.core.rule_registry import users_rules

WORTH = 0.05
"""Share of a short step that a better plan must save for a search to go on beside it."""


def search_beside(planner: Planner, call: Call, first: Plan, store: TimedStore | None) -> Search | None:
    """What looks for a better plan of the call than `first` while that runs; None: no plan is worth it. The same on all
    ranks. store: of what is timed; None: nothing is."""
    s = planner.settings
    if first.gap <= s.gap and store is None:
        return None
    if first.gap < WORTH and not is_worth_it(first.step_time):
        seconds = format_seconds(first.step_time)
        tell(
            planner.mesh.get_rank(), f"tuning: no plan takes {WORTH:.0%} less than this one, {seconds} a step"
        )
        return None
    return Searching(planner.task(call.whole, call.layouts, s.pins), planner.division, first, store)


@dataclass(frozen=True)
class Searching:
    """Says which plans are better than `first`, and asks for times of kernels and collectives."""

    task: Task
    division: Division
    first: Plan
    store: TimedStore | None

    def __call__(self, talk: Talk) -> None:
        best = self.first
        for found, timed in self._found(talk):
            under = replace(self.task, timed=timed)
            # Share of a step that a plan must save for parameters to move to its layouts.
            if _seconds(found, under) < (1.0 - 0.02) * _seconds(best, under):
                best = found
                talk.send(Better(found.to_json()))
        keep_tuned(self.task, best)

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


def keep_tuned(task: Task, plan: Plan) -> None:
    """For the next start."""
    if plan.micro_batches == plan.head_pieces == 1:
        keep_plan(tuned_path(task), plan)


def _budget(step_seconds: float, time_limit: float, nodes: int, backend: str) -> float:
    """Beside the steps it takes as many times as long as its share of them is small."""
    return refining_seconds(step_seconds, time_limit, nodes, backend) / TIMING_SHARE


def _seconds(plan: Plan, task: Task) -> float:
    cut = cut_call(task.captured, plan.micro_batches, plan.head_pieces)
    return replace(task, captured=cut).step_seconds(plan)


class StartingHome(TunedHome, Protocol):
    """plan: of the first kind of call; None: this is the first."""

    plan: Plan | None

    def planned(
        self, planner: Planner, captured: Captured, layouts: CallLayouts, refined: Refined | None
    ) -> Found: ...

    def tell_fallbacks(self, plan: Plan) -> None: ...

    def settle(self, plan: Plan) -> None: ...


def fingerprint_of(settings: Settings, joint: JointGraph, whole: GlobalCall) -> dict[str, str]:
    """What all ranks must have alike before they plan a call."""
    return {
        "torch": torch.__version__,
        "autoshard": __version__,
        "inputs": str(whole.shapes),
        "model and its code (canonical graph)": graph_hash(joint),
        "rules (register_rule)": hashlib.sha256(str(users_rules(joint.graph)).encode()).hexdigest()[:8],
        **settings.described(),
    }


def started(home: StartingHome, planner: Planner, call: Call, fingerprint: object) -> Programs:
    """All ranks together."""
    settings = home.settings
    if home.plan is None:
        check_experts(settings.routing, experts_of(call.whole.joint.graph))
    if settings.starts_at_once and (home.plan is None or settings.tune != "off"):
        return _at_once(home, planner, call, fingerprint)
    return _ahead(home, planner, call, fingerprint)


def _ahead(home: StartingHome, planner: Planner, call: Call, fingerprint: object) -> MadeAhead:
    backend, first = home.settings.backend, home.plan is None
    with home.stages("finding a plan", fingerprint) as say:
        planner = replace(planner, say=say)
        refined = planner.refined(call.whole, call.layouts) if first else None
        found = home.planned(planner, call.whole, call.layouts, refined)
    plan, made = race(call, found)
    if first and planner.may_rehearse and is_to_rehearse(plan, home.settings.time_limit):
        with home.stages("rehearsing the plan", fingerprint):
            plan, made = rehearsed(call, plan, made)
        if refined is not None and plan.rehearsed is not None:
            refined.keep(plan)  # for the next start
    program = made(backend if first else "eager")
    home.settle(plan)
    later = None if first or backend == "eager" else lambda: made(backend)
    return MadeAhead(call.running(plan, program), later)


def _at_once(home: StartingHome, planner: Planner, call: Call, fingerprint: object) -> Tuning:
    """A plan that is found soon, op by op; what is better is made beside the steps, unless that is off."""
    backend, first, work = home.settings.backend, home.plan is None, None
    store = planner.store() if first else None
    with home.stages("finding a plan", fingerprint) as say:
        if first:
            planner = replace(planner, say=say)
            plan, tuned, seed = planner.quick(call.whole, call.layouts, store)
            home.seeds.start(seed)
            home.tell_fallbacks(plan)
        else:
            plan, tuned = home.replanned(call), False
    made = call.made(plan)
    compiled = first and (home.settings.tune == "off" or was_compiled(home, plan, call.kind))
    program = made(backend if compiled else "eager")
    home.settle(plan)
    if first and not tuned and home.settings.tune == "background":
        work = search_beside(planner, call, plan, store)
        if (
            work is None and home.mesh.get_rank() == 0
        ):  # nothing better is looked for at the next start either
            keep_tuned(planner.task(call.whole, call.layouts, home.settings.pins), plan)
    to_compile = None if compiled or backend == "eager" else made
    if to_compile is not None and backend == "inductor":
        warm_inductor()
    begin = 2 if first else 3  # a last, smaller batch comes once an epoch
    tuning = Tuning(home, call, call.running(plan, program), to_compile, begin=begin, search=work)
    home.tunings.append(tuning)
    return tuning


class FarSizes:
    """Of one model: rank 0 looks.

    A size is far that is twice or half of the first call's; it is looked at again at four times, and so on, until a
    line was said. Not while programs are tuned, when prices and plans may still change."""

    def __init__(self, home: StartingHome) -> None:
        self._home = home
        self._first: tuple[Again, Hashable] | None = None
        """Of the first call: what its plan can be asked, and the mode of the model."""
        self._looked: set[tuple[str, int]] = set()
        self._beside: Beside | None = None
        self._ended = home.settings.tune != "background" or home.settings.plan is not None

    def seen(self, shapes: Shapes) -> None:
        """A kind of call of these shapes."""
        home, plan = self._home, self._home.plan
        if self._ended or plan is None or home.mesh.get_rank() != 0:
            return
        mode = Mode(home.model).key()
        if self._first is None:
            self._ended = plan.again is None or plan.again.carried is None
            self._first = None if plan.again is None else (plan.again, mode)
        elif mode == self._first[1] and self._is_free() and all(tuning.ended for tuning in home.tunings):
            self._look(plan, self._first[0], shapes)

    def _is_free(self) -> bool:
        if self._beside is not None:
            self._ended = self._ended or self._beside.news() is not None
        return not self._ended and (self._beside is None or self._beside.ended)

    def _look(self, plan: Plan, again: Again, shapes: Shapes) -> None:
        """Beside the steps, at the farthest size that was not looked at."""
        for name, size, doublings in _far(plan, again, shapes):
            if (name, doublings) not in self._looked:
                self._looked.add((name, doublings))
                self._beside = Beside(partial(_tell_far, plan, again, name, size, teller()))
                return


def _far(plan: Plan, again: Again, shapes: Shapes) -> Iterator[tuple[str, int, int]]:
    """(name, size, whole doublings or halvings), the farthest first; none where steps are too short to matter."""
    sizes = named_sizes(again.shapes, shapes)
    if not all((*sizes.values(), *itertools.chain(*again.shapes))):
        return
    found = [(name, size, size / size_named(again.shapes, name)) for name, size in sizes.items()]
    times = math.prod(ratio for _, _, ratio in found)
    for name, size, ratio in sorted(found, key=lambda one: -abs(math.log2(one[2]))):
        if (doublings := int(math.log2(ratio))) and is_worth_it(plan.step_time * times):
            yield name, size, doublings


def _tell_far(plan: Plan, again: Again, name: str, size: int, say: Say, talk: Talk) -> None:
    """What `plan` loses at this size of the call that it was found for, if anything is known."""
    now, carried = size_named(again.shapes, name), again.carried
    assert carried is not None
    for won in size_crossovers(plan, again, {name: (min(now, size), max(now, size))}):
        ours, other = (format_seconds(carried(one, {name: size}, None).step_time) for one in (plan, won.plan))
        side = "down" if size < now else "on"
        say(
            f"sizes: at {name} {size} the plan, found at {now}, takes {ours} a step, and another {other}, which wins "
            f"from {won.size} {side}, as predicted: there a new autoshard(...) of such a call pays ({won.words})"
        )
        talk.send(True)
