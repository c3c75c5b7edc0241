"""Plans that were proven once are not searched again: a cache on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from autoshard.cache_files import cache_folder, code_fingerprint, write_whole
from autoshard.plan.plan import Plan
from autoshard.plan.task import Task
from cost_model.errors import AutoshardError
from passes.plan.describe import graph_hash
from passes.states.places import users_choice

__all__ = ["cached_plan", "plan_path"]

_log = logging.getLogger("autoshard")


def cached_plan(task: Task, search: Callable[[], Plan]) -> Plan:
    """The plan of `task`: read if it was found before, else `search()`, kept if it is proven.

    A plan whose proof the time limit ended is not kept: another run may have more time. Damaged files are searched
    again; a cache that cannot be written is no reason to fail.
    """
    path = plan_path(task)
    known = _read(path, task)
    if known is not None:
        return known
    plan = search()
    if plan.status == "optimal":
        try:
            write_whole(path, json.dumps(plan.to_json()))
        except OSError as error:
            _log.warning("plan: found, but not cached: %s", error)
    return plan


def plan_path(task: Task) -> Path:
    """The file of a task: named by all that decides its plan, this code included."""
    call = task.call
    ends = [sorted(map(str, one.items())) for one in (task.pins, call.inputs, call.outputs)]
    chosen = users_choice(task.joint) if task.recompute == "user" else []
    prices = [str(task.mesh), task.mesh.device_type, task.profile.hash(), task.memory_limit, task.backend]
    decides = [graph_hash(task.joint), *ends, *prices, task.recompute, *chosen, torch.__version__, code_fingerprint()]
    text = "\n".join(map(str, decides))
    return cache_folder() / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _read(path: Path, task: Task) -> Plan | None:
    if not path.exists():
        return None
    try:
        plan = Plan.load(path)
        plan.check_graph(task.joint)
    except AutoshardError as error:
        _log.warning("searching again: the cached plan cannot be used: %s", error)
        return None
    _log.info("plan: found before, read from %s", path)
    return replace(plan, again=task.again())
