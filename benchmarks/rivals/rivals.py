"""A plan and its rivals, all on one timeline: pinned to a family, found in the search's own families or under another
overlap, changed in one layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from autoshard import Plan
from autoshard.plan.families import FAMILIES
from autoshard.plan.family_choices import family_narrowing
from autoshard.plan.plan_ends import parameter_shapes
from autoshard.plan.task import Task, search_plan
from benchmarks.rivals.cases import Network
from benchmarks.rivals.changes import changes
from benchmarks.rivals.families import families
from cost_model.errors import InfeasibleError, ShardingError
from passes.search.strategy_space import SpaceBuilder

__all__ = ["GROUPS", "OVERLAPS", "Contest", "Rival", "contest"]

GROUPS = ("pinned", "family", "assumed", "changed")
OVERLAPS = (0.0, 0.25, 0.5, 0.7)
"""Assumed instead of the profile's."""


@dataclass(frozen=True)
class Rival:
    """group: how it was found. seconds: of its step on the timeline; None where nothing fits, or where `problem`, the
    error of a plan that the search allows and that cannot be lowered, says why."""

    group: str
    name: str
    seconds: float | None
    problem: str = ""


@dataclass(frozen=True)
class Contest:
    """A plan, and those that had the chance to be faster."""

    plan: Plan
    rivals: tuple[Rival, ...]

    @property
    def difference(self) -> float:
        """Share of the step by which the objective differs from it."""
        return self.plan.cost / self.plan.step_time - 1.0

    @property
    def fastest(self) -> Rival | None:
        timed = [rival for rival in self.rivals if rival.seconds is not None]
        return min(timed, key=lambda rival: rival.seconds or 0.0, default=None)

    @cached_property
    def ratio(self) -> float:
        """The fastest rival's step to the plan's; 1 without rivals."""
        fastest = self.fastest
        return 1.0 if fastest is None or fastest.seconds is None else fastest.seconds / self.plan.step_time


def contest(
    network: Network | None,
    task: Task,
    count: int,
    *,
    groups: Collection[str] = GROUPS,
    note: Callable[[Rival], None] = lambda rival: None,
) -> Contest:
    """The plan of `task` against its rivals, `count` of them random changes. note: called with each rival.
    network: what tensor parallelism splits; None: nothing is pinned.

    Raises InfeasibleError if there is no plan.
    """
    plan = search_plan(task)
    rivals = {
        "pinned": iter(()) if network is None else _pinned(network, task),
        "family": _families(task),
        "assumed": _assumed(task),
        "changed": _changed(task, plan, count),
    }
    found: list[Rival] = []
    for rival in chain.from_iterable(rivals[group] for group in GROUPS if group in groups):
        found.append(rival)
        note(rival)
    return Contest(plan, tuple(found))


def _pinned(network: Network, task: Task) -> Iterator[Rival]:
    shapes = {name: tuple(value.shape) for name, value in parameter_shapes(task.captured).items()}
    for name, pins in families(network, shapes, task.mesh).items():
        try:
            yield Rival("pinned", name, search_plan(replace(task, pins=pins)).step_time)
        except InfeasibleError:
            yield Rival("pinned", name, None)


def _families(task: Task) -> Iterator[Rival]:
    """The best of each family of docs/patterns.md as the search has them, activations with it."""
    for family in FAMILIES:
        try:
            narrowing = family_narrowing(family, task.joint, task.mesh)
            yield Rival("family", family.name, search_plan(replace(task, narrowing=narrowing)).step_time)
        except InfeasibleError:
            yield Rival("family", family.name, None)


def _assumed(task: Task) -> Iterator[Rival]:
    """Planned for a machine that overlaps otherwise, judged on the one of the task."""
    for share in OVERLAPS:
        profile = replace(task.profile, overlap_efficiency=share)
        plan = search_plan(replace(task, profile=profile))
        yield Rival("assumed", f"overlap {share:g}", task.judged(plan.planned.layouts).seconds)


def _changed(task: Task, plan: Plan, count: int) -> Iterator[Rival]:
    room = None if task.memory_limit is None else task.memory_limit - plan.reserve
    space = SpaceBuilder(task.joint, task.prices, task.boundary).built(room)
    for change in changes(task.joint, space, plan.planned.layouts, count):
        try:
            yield Rival("changed", str(change), task.judged(change.assignment).seconds)
        except ShardingError as error:
            yield Rival("changed", str(change), None, str(error).splitlines()[0])
