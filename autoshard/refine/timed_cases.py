"""What of a plan is timed: its distinct kernels and collectives, and a few that are known, again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.plan.families import Family
from autoshard.plan.plan import Plan
from autoshard.plan.task import Task
from autoshard.refine.other_ways import other_ways
from cost_model.timed import KernelKey, TimedPrices
from passes.ir.joint import CPU
from passes.layout.assignment import Assignment
from passes.lower.rank_program import rank_program
from passes.plan.transfers import LoweringPlan
from passes.predict.step_work import CollectiveCase, KernelCase, step_work
from passes.simulate.lockstep import simulated_group_axes, simulated_groups

__all__ = ["Case", "Cases", "TimedCandidate", "cases_of", "distinct", "with_times"]

Case = KernelCase | CollectiveCase

_log = logging.getLogger("autoshard")

LEAST_SHARE = 5e-4
"""Of a plan's step, that a kernel must take to be timed. Collectives are few, and their prices the furthest off."""
AGAIN = 3
"""Kernels that are known and timed again: by them what was timed before is compared with what is timed now."""


@dataclass(frozen=True)
class TimedCandidate:
    """A plan of which kernels and collectives are timed."""

    seconds: float
    assignment: Assignment
    lowering: LoweringPlan
    family: Family | None = None

    @staticmethod
    def of(plan: Plan, family: Family | None = None) -> TimedCandidate:
        return TimedCandidate(plan.step_time, plan.assignment, plan.lowering, family)


@dataclass(frozen=True)
class Cases:
    """unknown: what is not timed, what takes most of the step first. again: a few kernels that are. instead:
    collectives of other ways to the same layouts, that are not timed (`autoshard.refine.other_ways`)."""

    unknown: Sequence[Case]
    again: tuple[Case, ...] = ()
    instead: tuple[CollectiveCase, ...] = ()

    def untried(self, tried: set[object]) -> tuple[Case, ...]:
        """Those of `unknown`, each once, that are not among `tried`, which they join, behind `again`; (): there are
        none."""
        known: dict[object, Case] = {}
        for case in self.unknown:
            known.setdefault(distinct(case), case)
        new = tuple(case for mark, case in known.items() if mark not in tried)
        tried.update(known)
        return (*self.again, *new) if new else ()


def cases_of(candidate: TimedCandidate, task: Task) -> Cases:
    """Of rank 0, whose shards are the largest, by what `task.timed` knows. No fused kernels again: to compile them
    takes longer than to time them."""
    joint, mesh, prices = replace(task.joint, device=CPU), task.mesh, task.prices
    program = rank_program(joint, candidate.assignment, candidate.lowering, mesh, 0, simulated_groups(mesh))
    work = step_work(program.usual(), prices, simulated_group_axes)
    known = {kernel.key for kernel in task.timed.kernels} if task.timed else set[KernelKey]()
    worth = LEAST_SHARE * candidate.seconds
    kernels = (case for case in work.kernels if case.seconds >= worth and case.key not in known)
    untimed = lambda case: prices.collective_priced(case.kind, case.axes, case.nbytes) != "timed"
    collectives = filter(untimed, work.collectives)
    longest = sorted(work.kernels, key=lambda case: -case.seconds)
    again = {case.key: case for case in longest if case.key in known and not case.group}
    unknown = sorted([*kernels, *collectives], key=lambda case: -case.seconds)
    instead = filter(untimed, other_ways(work.collectives, mesh))
    return Cases(unknown, tuple(again.values())[:AGAIN], tuple(instead))


def with_times(before: TimedPrices, times: TimedPrices) -> TimedPrices:
    """All that is known. Where the machine's clock, or what ran beside it, has changed since, what was timed before
    takes as much longer as what was timed again: a search compares the one with the other."""
    change = before.change_to(times)
    if change != 1.0:
        _log.info("refine: kernels take %.2f times as long as when they were timed before", change)
        before = before.kernels_times(change)
    return before.joined(times)


def distinct(case: Case) -> object:
    return case.key if isinstance(case, KernelCase) else (case.kind, case.axes, case.nbytes)
