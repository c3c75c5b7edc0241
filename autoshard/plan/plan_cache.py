"""Plans that race, and a cache on disk of those that were proven, which are not searched again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from autoshard.plan.families import OF_WEIGHTS, Variant
from autoshard.plan.plan import Plan
from autoshard.plan.plan_content import pace_of
from autoshard.plan.task import Task, search_plan, search_plans
from autoshard.plan.why_not import is_of_family
from cost_model.cache_files import cache_folder, code_fingerprint, keep_file
from cost_model.deadline import Deadline
from cost_model.errors import AutoshardError, InfeasibleError, PlanError, log, read_json
from passes.plan.describe import graph_hash
from passes.rules.core.rule_registry import users_rules
from passes.states.offers import users_choice

BEST, NEXT = "the search's", "the next best"
"""Names of the plan that the search found, and of what else it judged."""


@dataclass(frozen=True)
class Candidate:
    """name: how it was found."""

    name: str
    plan: Plan

    def to_json(self) -> list[Any]:
        return [self.name, self.plan.to_json()]

    @staticmethod
    def from_json(data: Any) -> Candidate:
        """PlanError for a damaged plan, ValueError or TypeError for what is no pair."""
        name, plan = data
        return Candidate(str(name), Plan.from_json(plan))


def candidates(task: Task, count: int) -> list[Candidate]:
    """At most `count` plans that differ, the search's own first. Fewer where there are fewer, or where the task's time
    limit ends first, which is for all searches together. Raises InfeasibleError if there is no plan."""
    deadline = task.within(task.time_limit)
    best, *judged = search_plans(task, deadline, most=count)
    own = Candidate(BEST, best)
    if count < 2:
        return [own]
    return chosen_candidates(
        own,
        list(_of_families(task, deadline.as_part.firm)),
        [Candidate(NEXT, plan) for plan in judged],
        count,
    )


def chosen_candidates(
    best: Candidate, families: Sequence[Candidate], judged: Sequence[Candidate], count: int
) -> list[Candidate]:
    """The best; of `families` the fastest other, of `judged` too; then what is left of both, by prediction."""
    families, judged = by_prediction(families), by_prediction(judged)
    chosen = [best]
    for group in (families, judged):
        chosen += [one for one in group if _is_new(one, chosen)][:1]
    return _each_once([*chosen, *by_prediction((*families, *judged))])[:count]


def with_first(plan: Plan, others: Sequence[Candidate], most: int) -> list[Candidate]:
    """`plan`, and those of `others` that differ from it and from each other, in this order: at most `most` in all."""
    return _each_once([Candidate(BEST, plan), *others])[:most]


def _of_families(task: Task, deadline: Deadline) -> Iterator[Candidate]:
    """The best plan of every family that has one, with the task's own pins. None once time is over."""
    for family in OF_WEIGHTS:
        if deadline.left <= 0.0:
            return
        try:
            varied = replace(task.varied(Variant(family=family)), pins=task.pins)
            plan = search_plan(varied, deadline)
        except InfeasibleError:
            continue
        if is_of_family(plan, family):
            yield Candidate(family.name, plan)


def by_prediction(group: Sequence[Candidate]) -> list[Candidate]:
    """The fastest first."""
    return sorted(group, key=lambda one: one.plan.step_time)


def _each_once(group: Iterable[Candidate]) -> list[Candidate]:
    chosen: list[Candidate] = []
    for one in group:
        if _is_new(one, chosen):
            chosen.append(one)
    return chosen


def _is_new(one: Candidate, chosen: Sequence[Candidate]) -> bool:
    return not any(_same(one.plan, other.plan) for other in chosen)


def _same(mine: Plan, other: Plan) -> bool:
    if mine.axis or other.axis:
        return mine.fingerprint == other.fingerprint
    if mine.parameter_layouts != other.parameter_layouts or _moves(mine) != _moves(other):
        return False
    # Share of a step by which two plans of equal layouts of parameters and equal collectives are predicted
    # apart, so that they are two.
    return abs(mine.step_time - other.step_time) <= 1e-3 * other.step_time


def _moves(plan: Plan) -> list[tuple[object, ...]]:
    return [(c.phase, c.name, c.axes, c.nbytes, c.value) for c in plan.collectives]


_EARLY = 0.2
"""Share of the time limit before which it has cut no part of a search short."""


def cached_plan(task: Task, search: Callable[[], Plan]) -> Plan:
    """The plan of `task`: read if it was found before, else `search()`, kept if the search ended by itself: at its gap,
    or long before its time.

    A plan whose search the time limit ended is not kept: another run may have more time. Damaged files are searched
    again; a cache that cannot be written is no reason to fail.
    """
    path = plan_path(task)
    kept = kept_plan(path, task)
    if kept is not None:
        return kept
    begun = time.monotonic()
    plan = search()
    if _is_settled(plan, begun, task):
        keep_plan(path, plan)
    return plan


def _is_settled(plan: Plan, begun: float, task: Task) -> bool:
    return plan.gap <= task.gap or time.monotonic() - begun < _EARLY * task.time_limit


def cached_search(task: Task, deadline: Deadline) -> Plan:
    """`search_plan`'s plan, read if it was found before."""
    return cached_plan(task, lambda: search_plan(task, deadline))


def cached_candidates(task: Task, count: int) -> list[Candidate]:
    """`candidates`, read if they were found before; kept if there are so many, and the first would be."""
    path = plan_path(task).with_suffix(f".race{count}.json")
    if kept := _kept(path, task):
        return kept
    begun = time.monotonic()
    found = candidates(task, count)
    if _is_settled(found[0].plan, begun, task) and len(found) == count:
        _keep(path, [one.to_json() for one in found])
    return found


def kept_plan(path: Path, task: Task) -> Plan | None:
    """The plan in a file, if there is one that is a plan of the task."""
    kept = _kept(path, task)
    return kept[0].plan if kept else None  # type: ignore[return-value]


def _kept(path: Path, task: Task) -> list[Candidate]:
    """The plans of the task in a file, of one or of several by name; none of a file that cannot be used."""
    if not os.path.exists(path):
        return []
    kept: list[Candidate] = []
    try:
        data = read_json(path, "cached plan", PlanError)
        for name, content in data if isinstance(data, list) and data else [(BEST, data)]:
            plan = Plan.from_json(content)
            plan.check_graph(task.joint)
            again = replace(task, pace=task.pace * pace_of(plan.rehearsed)).again()
            kept.append(Candidate(str(name), replace(plan, again=again)))
    except (AutoshardError, TypeError, ValueError) as error:
        log.warning("searching again: the cached plan cannot be used: %s", error)
        return []
    log.info("plan: found before, read from %s", path)
    return kept


def keep_plan(path: Path, plan: Plan) -> None:
    """Write it for `kept_plan`; a warning where that cannot be."""
    _keep(path, plan.to_json())


_Step = tuple[Annotated[float, Meta(gt=0.0, lt=1e6)], Annotated[float, Meta(gt=0.0, le=1.0)] | None]


def keep_rehearsal(path: Path, seconds: float, busy: float | None) -> None:
    """Of a step, as `Rehearsed` has them; for `kept_rehearsal`. A warning where that cannot be."""
    _keep(path, (seconds, busy))


def kept_rehearsal(path: Path) -> tuple[float, float | None] | None:
    """Seconds of a step, and `Rehearsed.busy`; None: it was not rehearsed, or the file is damaged."""
    try:
        return msgspec.convert(read_json(path, "rehearsal", PlanError), _Step)
    except (PlanError, msgspec.ValidationError):
        return None


def _keep(path: Path, data: Any) -> None:
    keep_file(path, json.dumps(data), "plan: found, but not cached")


def plan_path(task: Task, *more: object) -> Path:
    """The file of a task: named by all that decides its plan, this code included, and by `more`."""
    call = task.call
    given = task.pins, call.inputs, call.outputs, call.state
    ends = [sorted(map(str, one.items())) for one in given]
    chosen = users_choice(task.joint) if task.recompute == "user" else []
    prices = [str(task.mesh), task.mesh.device_type, task.profile.hash(), task.memory_limit, task.backend]
    decides = [
        graph_hash(task.joint),
        *users_rules(task.joint.graph),
        *ends,
        *prices,
        task.recompute,
        task.optimizer,
        task.gap,
        task.joint.routing,
        *chosen,
        torch.__version__,
        code_fingerprint(),
        *more,
    ]
    if task.timed is not None:
        decides.append(task.timed.hash)
    if task.pace != 1.0:
        decides.append(f"pace {task.pace!r}")
    text = "\n".join(map(str, decides))
    return cache_folder() / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
