"""Refine a plan: time what it is made of, search again, until it stays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan.division import WHOLE, Division
from autoshard.plan.head_pieces import fitting
from autoshard.plan.plan import any_plan_from_json
from autoshard.plan.stages_option import AnyPlan
from autoshard.plan.task import Task
from autoshard.refine.divided_rounds import DividedRounds
from autoshard.refine.rounds import Rounds
from autoshard.refine.time_work import time_work
from autoshard.refine.timed_cases import Case
from autoshard.refine.timed_store import store_of
from autoshard.runtime.agreement import from_first
from cost_model.checked_arguments import reject
from cost_model.deadline import Deadline
from cost_model.measure.peers import collective_backend
from cost_model.measure.sampling import mesh_device
from cost_model.mesh import MeshSpec
from cost_model.timed import TimedPrices
from passes.capture import Captured
from passes.compile.fused_kernel import start_compiler

__all__ = ["Refined", "check_refine", "may_refine", "refined_plan", "shared_refined_plan"]

_log = logging.getLogger("autoshard")


def check_refine(refine: object) -> None:
    """ShardingError unless it is "auto" or "off"."""
    if refine not in ("auto", "off"):
        raise reject("refine", refine, "'auto', or 'off' to plan with modelled prices alone")


def may_refine(mesh: DeviceMesh, nominal: bool) -> bool:
    """Whether times of this mesh's processes say more than the profile, the same on all ranks.

    Not where prices are nominal: who gives those asks for a plan under them. Nor on one device, nor on a mesh that
    leaves out some of the processes, which would have to help.
    """
    spec = MeshSpec.of(mesh)
    whole = dist.is_initialized() and dist.get_world_size() == spec.device_count > 1
    return whole and not nominal and collective_backend(mesh) in ("gloo", "nccl")


@dataclass(frozen=True)
class Refined:
    """A plan, and all that was timed for it; None: nothing was. keep: writes the plan, rehearsed, for the
    next start."""

    plan: AnyPlan
    timed: TimedPrices | None
    keep: Callable[[AnyPlan], None]


def refined_plan(mesh: DeviceMesh, task: Task, division: Division = WHOLE) -> Refined | None:
    """The plan of `task` under prices that were timed here; of rank 0, None on the others. Every rank calls it.

    What was timed before is read from disk (`autoshard.refine.timed_store`), and so is the plan. Raises, on all ranks,
    as `search_plan`.
    """
    store = store_of(mesh, task.backend)
    state: list[Rounds | DividedRounds] = []

    def start(captured: Captured, until: Deadline) -> _Next:
        state[:] = [Rounds(replace(task, captured=captured, time_limit=until.left), store)]
        return _next(state[0])

    def first() -> _Next:
        if not division.leaves_whole(task.memory_limit):
            state[:] = [DividedRounds(task, division, store)]
            return _next(state[0])
        return fitting(task.captured, task.memory_limit, start, Deadline.after(task.time_limit))

    def start_alone() -> None:
        """Rank 0 plans on one core. Once all start it, as they time, each has a share of the cores."""
        if task.backend != "eager":
            start_compiler(mesh_device(mesh.device_type), task.backend)

    wanted = from_first(mesh, first, what="what to time", meanwhile=start_alone)
    while wanted.cases:
        begun = time.monotonic()
        times = time_work(mesh, wanted.cases, wanted.seconds, backend=task.backend)
        _log.info(
            "refine: %d kernels and %d collectives timed in %.1f s",
            len(times.kernels),
            len(times.collectives),
            time.monotonic() - begun,
        )

        def again(times: TimedPrices = times) -> _Next:
            state[0].add(times)
            return _next(state[0])

        wanted = from_first(mesh, again, what="what to time")
    return Refined(state[0].plan, state[0].timed.if_any(), state[0].keep) if state else None


def shared_refined_plan(mesh: DeviceMesh, task: Task, division: Division = WHOLE) -> AnyPlan:
    """`refined_plan`, on every rank; rank 0's can be asked what searches again."""
    mine = refined_plan(mesh, task, division)
    data = from_first(mesh, lambda: None if mine is None else mine.plan.to_json(), what="the plan")
    return any_plan_from_json(data) if mine is None else mine.plan


@dataclass(frozen=True)
class _Next:
    cases: tuple[Case, ...]
    seconds: float


def _next(rounds: Rounds | DividedRounds) -> _Next:
    return _Next(rounds.wanted(), rounds.seconds_left)
