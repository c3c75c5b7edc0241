"""From a plan to a rank's program, on all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.calls.call_ends import CallEnds, call_ends, call_inputs
from autoshard.calls.checks import Checks
from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import Plan
from autoshard.plan.plan_fits import axes_in, runnable
from autoshard.plan.task import CallLayouts
from autoshard.runtime.agreement import collectively
from autoshard.runtime.nccl import in_host_order
from autoshard.runtime.observe import Observer
from autoshard.runtime.parameters import Place, distribute_parameters
from autoshard.runtime.piecewise_step import PiecewiseProgram
from autoshard.runtime.process_groups import groups_for
from autoshard.runtime.programs import AnyProgram
from autoshard.runtime.settings import Settings
from autoshard.runtime.stage_clock import StageClock
from autoshard.runtime.step import Program
from autoshard.watching.kinds import turns_of
from cost_model.measure.sampling import mesh_device
from cost_model.mesh import MeshSpec
from passes.capture import Captured
from passes.compile.freed_memory import keep_freed_memory
from passes.lower.missing_tangents import usually_missing
from passes.lower.rank_program import RankProgram, Schedule, rank_program
from passes.schedule.schedule import one_communicator_at_a_time, scheduled

__all__ = ["Made", "Making", "Workshop", "schedule_for", "together"]

_log = logging.getLogger("autoshard")

Made = Callable[[str], AnyProgram]
"""Compiles this rank's program by a backend, on all ranks together."""


class Workshop(Protocol):
    """What programs are made in: a session."""

    model: nn.Module
    mesh: DeviceMesh
    spec: MeshSpec
    settings: Settings
    observers: list[Observer]
    stage_clocks: list[StageClock]
    watch: Any

    def stages(self, stage: str, call: object) -> AbstractContextManager[None]: ...


class Making:
    """Of plans in which every rank runs the whole model."""

    def __init__(self, home: Workshop, plan: Plan) -> None:
        self._home, self._plan = home, plan

    def cut(self, captured: Captured) -> Captured:
        """The call's graph as the plan runs it."""
        return cut_call(captured, self._plan.micro_batches, self._plan.head_pieces)

    def place(self) -> None:
        """Make the parameters DTensors as the plan has them."""
        distribute_parameters(self._home.model, self._home.mesh, self._plan.parameters)

    def places(self) -> dict[str, Place]:
        """Where `place` puts each parameter."""
        return {name: Place(self._home.mesh, placed) for name, placed in self._plan.parameters.items()}

    def ends(self, captured: Captured, layouts: CallLayouts) -> CallEnds:
        return call_ends(captured.joint, self._plan, layouts.outputs)

    def made(self, captured: Captured, kind: str) -> Made:
        """captured: as it was cut. kind: of the call, for whoever watches."""
        home, plan = self._home, self._plan
        groups_for(home.mesh, axes_in(plan))
        ours = collectively(home.mesh, lambda: self._lowered(captured), what="lowering a plan")
        sides = call_inputs(captured.joint, plan)
        turn, checks = turns_of(home.watch, kind), Checks(captured.call)

        def compiled(backend: str) -> AnyProgram:
            rank = home.mesh.get_rank()
            if len(ours) > 1:
                return PiecewiseProgram(ours, sides, home.spec, rank, backend, home.observers, turn, checks)
            backward = ours[0].phases.backward
            program = Program(ours[0], sides, home.spec, rank, backend, home.observers, turn, checks)
            if backward is not None:
                program.compile_backward(usually_missing(backward))
            return program

        return together(home, kind, compiled)

    def _lowered(self, captured: Captured) -> list[RankProgram]:
        """This rank's program; where a batch is run in pieces, of each."""
        home, plan = self._home, self._plan
        groups = groups_for(home.mesh, axes_in(plan))
        schedule = schedule_for(axes_in(plan), len(plan.communicators))
        with runnable(plan):
            programs = [
                rank_program(graph, layouts, lowering, home.spec, dist.get_rank(), groups, schedule=schedule)
                for graph, layouts, lowering in plan.of_pieces(captured.joint)
            ]
            if len(programs) == 1:
                if home.settings.backend == "eager":  # not what runs op by op twice, until it is compiled
                    programs = [programs[0].joined()]
                _ = programs[0].phases
        return programs


def together(home: Workshop, kind: str, compiled: Made) -> Made:
    """`compiled` on all ranks, or on none. kind: of the call."""

    def made(backend: str) -> AnyProgram:
        keep_freed_memory(mesh_device(home.spec.device_type))
        with home.stages("compiling the plan", (kind, backend)):
            return collectively(home.mesh, lambda: compiled(backend), what="compiling a plan")

    return made


def schedule_for(axes: Sequence[tuple[str, ...]], communicators: int) -> Schedule:
    """The order of a phase, and whether collectives on different communicators may be in flight together in it."""
    if communicators < 2 or in_host_order():
        return scheduled
    if len(axes) > 1 and dist.get_rank() == 0:
        _log.warning(
            "collectives over different mesh axes will not overlap: set NCCL_LAUNCH_ORDER_IMPLICIT=1 on all "
            "ranks before init_process_group (NCCL 2.26), see docs/cuda.md"
        )
    return one_communicator_at_a_time
