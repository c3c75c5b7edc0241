"""Plans that were proven once are not searched again: a cache on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from autoshard.cache_files import cache_folder, code_fingerprint, write_whole
from autoshard.plan.candidates import BEST, Candidate, candidates
from autoshard.plan.plan import AnyPlan, Plan
from autoshard.plan.plan_origin import pace_of
from autoshard.plan.task import Task, search_plan
from cost_model.deadline import Deadline
from cost_model.errors import AutoshardError, PlanError
from cost_model.text_files import read_json
from passes.plan.describe import graph_hash
from passes.rules.core.rule_registry import users_rules
from passes.states.cut_points import users_choice

_log = logging.getLogger("autoshard")

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


def _is_settled(plan: AnyPlan, begun: float, task: Task) -> bool:
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
        _log.warning("searching again: the cached plan cannot be used: %s", error)
        return []
    _log.info("plan: found before, read from %s", path)
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
    try:
        write_whole(path, json.dumps(data))
    except OSError as error:
        _log.warning("plan: found, but not cached: %s", error)


def plan_path(task: Task, *more: object) -> Path:
    """The file of a task: named by all that decides its plan, this code included, and by `more`."""
    call = task.call
    ends = [sorted(map(str, one.items())) for one in (task.pins, call.inputs, call.outputs)]
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
