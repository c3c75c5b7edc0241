"""What of a plan is timed: its distinct kernels and collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoshard.plan.families import Family
from autoshard.plan.plan import Plan
from autoshard.plan.task import Task
from cost_model.timed import KernelKey
from passes.ir.joint import CPU
from passes.layout.assignment import Assignment
from passes.lower.rank_program import rank_program
from passes.plan.lowering_plan import LoweringPlan
from passes.predict.step_work import CollectiveCase, KernelCase, step_work
from passes.simulate.lockstep import simulated_group_axes, simulated_groups

__all__ = ["Case", "TimedCandidate", "distinct", "untimed_cases", "untried"]

Case = KernelCase | CollectiveCase

LEAST_SHARE = 5e-4
"""Of a plan's step, that a kernel must take to be timed. Collectives are few, and their prices the furthest off."""


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
    joint, mesh, prices = replace(task.joint, device=CPU), task.mesh, task.prices
    program = rank_program(joint, candidate.assignment, candidate.lowering, mesh, 0, simulated_groups(mesh))
    work = step_work(program.usual(), prices, simulated_group_axes)
    known = {kernel.key for kernel in task.timed.kernels} if task.timed else set[KernelKey]()
    worth = LEAST_SHARE * candidate.seconds
    kernels = (case for case in work.kernels if case.seconds >= worth and case.key not in known)
    priced = lambda case: prices.collective_priced(case.kind, case.axes, case.nbytes)
    collectives = (case for case in work.collectives if priced(case) != "timed")
    return sorted([*kernels, *collectives], key=lambda case: -case.seconds)


def distinct(case: Case) -> object:
    return case.key if isinstance(case, KernelCase) else (case.kind, case.axes, case.nbytes)


def untried(cases: Iterable[Case], tried: set[object]) -> tuple[Case, ...]:
    """Those that are not among `tried`, which they join."""
    known = {distinct(case): case for case in cases}
    new = tuple(case for mark, case in known.items() if mark not in tried)
    tried.update(known)
    return new
