"""A plan carried over from one call of a model to another."""

from __future__ import annotations

from dataclasses import replace

from autoshard.plan.judged import lowered
from autoshard.plan.plan import Plan
from autoshard.plan.task import Task, plan_of
from autoshard.plan.task_prices import prices_as_in
from autoshard.plan.time_kept import out_of_time, search_until
from cost_model.deadline import Deadline, OutOfTime
from passes.search.find import find_assignment
from passes.search.narrowing import Narrowing
from passes.states.compute_again import compute_again
from passes.states.cut_points import known_ops

__all__ = ["carried_plan"]


def carried_plan(task: Task, first: Plan) -> Plan:
    """A plan for another call of the model that `first` plans, with its layouts wherever they fit: no search.

    Where a node has no counterpart in `first`, it is searched. Nothing is proven of the result, and its step is not
    simulated: `step_time` is the objective's. Raises InfeasibleError if the layouts do not fit.
    """
    prices = prices_as_in(first, task.prices)
    joint = compute_again(task.joint, known_ops(task.joint, first.lowering.again))
    try:
        found = find_assignment(
            joint,
            prices,
            task.boundary,
            memory_limit=task.memory_limit,
            reserve=0 if task.memory_limit is None else first.reserve,
            deadline=search_until(task.joint, Deadline.after(task.time_limit)),
            narrowing=Narrowing(held=first.assignment),
        )
    except OutOfTime:
        raise out_of_time(task.mesh, task.time_limit) from None
    unproven = replace(found, lower_bound=0.0, gap=1.0, status="feasible")
    return plan_of(task, unproven, lowered(joint, found.assignment, prices), None)
