"""From a kind of call to its programs: all before the first step, or at once, and the rest beside the steps."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Protocol

import torch

from autoshard.global_call import GlobalCall
from autoshard.plan.plan import Plan
from autoshard.plan.task import CallLayouts
from autoshard.refine.refine import Refined
from autoshard.runtime.executable import MadeAhead, Programs
from autoshard.runtime.making import Call
from autoshard.runtime.planner import Found, Planner, Settings
from autoshard.runtime.race import is_to_rehearse, race, rehearsed
from autoshard.runtime.searching import keep_tuned, search_beside
from autoshard.runtime.tuning import TunedHome, Tuning, was_compiled
from autoshard.version import __version__
from passes.capture import Captured
from passes.ir.joint import JointGraph
from passes.ir.torch_inductor import warm_inductor
from passes.plan.describe import graph_hash
from passes.rules.core.rule_registry import users_rules


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
