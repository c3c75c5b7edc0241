"""What of a plan is timed: its distinct kernels and collectives, and a few that are known, again."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoshard.plan.families import Family
from autoshard.plan.plan import Plan
from autoshard.plan.task import Task
from cost_model.timed import KernelKey, TimedPrices
from passes.ir.joint import CPU
from passes.layout.assignment import Assignment
from passes.lower.rank_program import rank_program
from passes.plan.lowering_plan import LoweringPlan
from passes.predict.step_work import CollectiveCase, KernelCase, StepWork, step_work
from passes.simulate.lockstep import simulated_group_axes, simulated_groups

__all__ = ["Case", "TimedCandidate", "distinct", "timed_again", "untimed_cases", "untried", "with_times"]

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


def untimed_cases(candidate: TimedCandidate, task: Task) -> list[Case]:
    """Of rank 0, whose shards are the largest, what `task.timed` does not know; what takes most of the step first."""
    prices, work, known = task.prices, _work(candidate, task), _known(task)
    worth = LEAST_SHARE * candidate.seconds
    kernels = (case for case in work.kernels if case.seconds >= worth and case.key not in known)
    priced = lambda case: prices.collective_priced(case.kind, case.axes, case.nbytes)
    collectives = (case for case in work.collectives if priced(case) != "timed")
    return sorted([*kernels, *collectives], key=lambda case: -case.seconds)


def timed_again(candidate: TimedCandidate, task: Task) -> tuple[Case, ...]:
    """A few kernels of the plan that `task.timed` knows, those that take most of the step. No fused ones: to compile
    them takes longer than to time them."""
    known = _known(task)
    if not known:
        return ()
    kernels = [case for case in _work(candidate, task).kernels if case.key in known and not case.group]
    each = {case.key: case for case in sorted(kernels, key=lambda case: case.seconds)}
    return tuple(reversed(each.values()))[:AGAIN]


def with_times(before: TimedPrices, times: TimedPrices) -> TimedPrices:
    """All that is known. Where the machine's clock, or what ran beside it, has changed since, what was timed before
    takes as much longer as what was timed again: a search compares the one with the other."""
    change = before.change_to(times)
    if change != 1.0:
        _log.info("refine: kernels take %.2f times as long as when they were timed before", change)
        before = before.kernels_times(change)
    return before.joined(times)


def _work(candidate: TimedCandidate, task: Task) -> StepWork:
    joint, mesh = replace(task.joint, device=CPU), task.mesh
    program = rank_program(joint, candidate.assignment, candidate.lowering, mesh, 0, simulated_groups(mesh))
    return step_work(program.usual(), task.prices, simulated_group_axes)


def _known(task: Task) -> frozenset[KernelKey]:
    return frozenset(kernel.key for kernel in task.timed.kernels) if task.timed else frozenset()


def distinct(case: Case) -> object:
    return case.key if isinstance(case, KernelCase) else (case.kind, case.axes, case.nbytes)


def untried(cases: Iterable[Case], tried: set[object]) -> tuple[Case, ...]:
    """Those that are not among `tried`, which they join."""
    known = {distinct(case): case for case in cases}
    new = tuple(case for mark, case in known.items() if mark not in tried)
    tried.update(known)
    return new
