"""The program of a rank that runs stages of a pipeline, as a differentiable function of a call's tensors.

A call runs all pieces, forward and backward, by a schedule of torch's (`autoshard.runtime.pipeline_stage`), as one in
pieces does without stages (`autoshard.runtime.call_gradients`). Every rank gets the call's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.calls.checks import no_checks
from autoshard.runtime.call_gradients import CallGradients, in_pieces
from autoshard.runtime.compiled_pieces import Compiler
from autoshard.runtime.leaves import InputSide, Leaves
from autoshard.runtime.observe import StageClock, StepPart
from autoshard.runtime.pipeline_stage import (
    PipelineStage,
    StageOnRank,
    StageRun,
    run_pieces,
    run_pieces_forward,
    torch_schedule,
)
from autoshard.runtime.step import no_turn
from cost_model.mesh import MeshSpec
from passes.ir.autocast_off import autocast_off
from passes.ir.joint import JointGraph, node_value
from passes.ir.torch_dtensor import local_of
from passes.layout.layout import Layout

__all__ = ["PipelineEnds", "PipelineProgram"]

Turn = Callable[[str], AbstractContextManager[Any]]
Results = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class PipelineEnds:
    """Where the ends of a call are.

    joint:    of the call, whole or of its first piece. spec, rank: a stage's mesh, and this rank's place in it.
    returned: tensor output of the call -> (coordinate along the stage axis of the ranks that return it, layout), of
              those that all ranks are given. Others stay where they are made.
    buffers:  buffer that the call changes -> coordinate of the ranks that do.
    sides:    of the call's inputs, tangents excepted.
    axis:     that of the stages. group: of this rank's ranks along it.
    """

    joint: JointGraph
    spec: MeshSpec
    rank: int
    returned: Mapping[int, tuple[int, Layout]]
    buffers: Mapping[str, int]
    sides: Sequence[InputSide]
    axis: str
    group: dist.ProcessGroup
    device: torch.device


class PipelineProgram:
    """stages: this rank's, in order. count: of all. schedule: a name in `ORDERS`. clocks: told of every step; they may
    change while the program lives."""

    def __init__(
        self,
        ends: PipelineEnds,
        stages: Sequence[StageOnRank],
        count: int,
        schedule: str,
        backend: str = "inductor",
        turn: Turn = no_turn,
        clocks: Sequence[StageClock] = (),
        checks: Callable[[Sequence[Tensor], bool], Callable[[], None]] = no_checks,
    ) -> None:
        self._at, self._turn, self._checks = ends, turn, checks
        self._names = [(s.kind, s.name) for s in ends.joint.inputs if s.kind != "tangent"]
        self.leaves = _leaves(ends, stages)
        self.ends = CallGradients(ends.joint.outputs, ends.joint.inputs, _tangents(ends, stages))
        compile_ = Compiler(backend)
        pieces = len(stages[0].programs)
        self._whole = _Pipeline(ends, stages, count, schedule, pieces, compile_, clocks)
        self._trains = any(spec.kind == "grad" for spec in ends.joint.outputs)
        self._early = self._whole
        if self._trains and not self.ends.has_loss:
            early = [stage.without_gradients() for stage in stages]
            self._early = _Pipeline(ends, early, count, schedule, pieces, compile_, clocks)

    @property
    def differentiated(self) -> list[int]:
        """Positions, among a call's outputs, of those that a usual step differentiates."""
        return self.ends.differentiated

    def __call__(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self._trains:
            return in_pieces(self, leaves)
        return self.run(leaves)[0]

    def run(self, leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """(outputs, gradients if the loss's is 1, else of nothing). New values of buffers are written."""
        known = dict(zip(self._names, self.leaves.local(leaves), strict=True))
        loss = self.ends.loss_is_one(self._at.device) if self.ends.has_loss else {}
        with autocast_off(), self._turn("forward"), torch.no_grad():
            found = self._early.run(known, loss, backward=self.ends.has_loss)
            outputs = self._outputs(found)
            self._checks(outputs, False)
            for place, leaf in self.ends.buffers:
                name = self._at.joint.outputs[place].name
                new = self._everywhere(found.get(("buffer", name)), self._at.buffers[name], leaves[leaf])
                local_of(leaves[leaf]).copy_(new)
            gradients = self._gradients(found, leaves) if self.ends.has_loss else []
        return outputs, gradients

    def run_again(self, leaves: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of a call with these leaves, its outputs having the gradients `tangents`."""
        known = dict(zip(self._names, self.leaves.local(leaves), strict=True))
        given = self.ends.given(tangents, self._at.device)
        with autocast_off(), self._turn("backward"), torch.no_grad():
            return self._gradients(self._whole.run(known, given, backward=True), leaves)

    def _outputs(self, found: Results) -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []
        for spec, node in zip(self._at.joint.outputs, self._at.joint.results, strict=True):
            if spec.kind != "output" or node is None:
                continue
            value = found.get(("output", spec.name))
            like = node_value(node)
            if spec.index in self._at.returned:
                source, layout = self._at.returned[spec.index]
                shape = layout.local_shape(like.shape, self._at.spec, self._at.rank)
                empty = torch.empty(shape, dtype=like.dtype, device=self._at.device)
                value = self._everywhere(value, source, empty)
            outputs.append(
                torch.empty(0, dtype=like.dtype, device=self._at.device) if value is None else value
            )
        return tuple(outputs)

    def _everywhere(self, value: Tensor | None, source: int, like: Tensor) -> Tensor:
        """`value`, which the ranks at `source` along the stage axis have, on all of them."""
        sent = torch.empty_like(local_of(like)) if value is None else value.contiguous()
        dist.broadcast(sent, group=self._at.group, group_src=source)
        return sent

    def _gradients(self, found: Results, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Of what several ranks along the axis hold each has a part, or none. Of what a rank does not hold an empty
        one."""
        gradients: list[Tensor | None] = []
        results = dict(zip(self._at.joint.outputs, self._at.joint.results, strict=True))
        for end in self.ends.gradients:
            if results[end] is None:
                gradients.append(None)
                continue
            value, leaf = found.get(("grad", end.name)), leaves[end.index]
            if value is None:
                value = torch.zeros(self._held(end.index, leaf), dtype=leaf.dtype, device=self._at.device)
            group = self._holders(leaf)
            if group is not None:
                value = value.contiguous()
                dist.all_reduce(value, group=group)
            gradients.append(value)
        return gradients

    def _held(self, place: int, leaf: Tensor) -> tuple[int, ...]:
        """The shape of this rank's part of a leaf."""
        if isinstance(leaf, DTensor):
            return tuple(local_of(leaf).shape)
        side = self._at.sides[place]
        return side.layout.local_shape(side.shape, self._at.spec, self._at.rank)

    def _holders(self, leaf: Tensor) -> dist.ProcessGroup | None:
        """The ranks along the axis that hold a leaf, this one among them, if there are several."""
        if not isinstance(leaf, DTensor):
            return self._at.group
        mesh, axis = leaf.device_mesh, self._at.spec.index(self._at.axis)
        return None if mesh.size(axis) == 1 or mesh.get_coordinate() is None else mesh.get_group(axis)


class _Pipeline:
    """The stages of this rank, compiled, and what runs them by turns with those of the others."""

    def __init__(
        self,
        ends: PipelineEnds,
        stages: Sequence[StageOnRank],
        count: int,
        schedule: str,
        pieces: int,
        compile_: Compiler,
        clocks: Sequence[StageClock],
    ) -> None:
        self._clocks = clocks
        self._runs = [StageRun(stage, compile_) for stage in stages]
        self._pieces = pieces
        self._stages = [
            PipelineStage(
                run,
                stage.received(),
                stage.sent(),
                stage.graph.stage,
                count,
                ends.device,
                ends.group,
                clocks,
            )
            for run, stage in zip(self._runs, stages, strict=True)
        ]
        self._schedule = torch_schedule(schedule, self._stages, pieces)

    def run(
        self, leaves: Mapping[tuple[str, str], Tensor], tangents: Mapping[int, Tensor], *, backward: bool
    ) -> Results:
        """Outputs, new buffers and gradients of this rank's stages, by kind and name."""
        self._begins("begin")
        for run in self._runs:
            run.start(leaves, tangents)
        self._begins("pieces")
        (run_pieces if backward else run_pieces_forward)(self._schedule, self._pieces)
        self._begins("end")
        found: Results = {}
        for run in self._runs:
            for key, value in run.finish().items():
                found[key] = found[key] + value if key in found and key[0] == "grad" else value
        self._begins("done")
        return found

    def _begins(self, part: StepPart) -> None:
        for clock in self._clocks:
            clock.begins(part)


def _leaves(ends: PipelineEnds, stages: Sequence[StageOnRank]) -> Leaves:
    """Of the whole call. A parameter that no stage of this rank reads is taken as it is."""
    own = {(spec.kind, spec.name): node for stage in reversed(stages) for spec, node in stage.placeholders}
    specs = [
        (spec, node)
        for spec, node in zip(ends.joint.inputs, ends.joint.placeholders, strict=True)
        if spec.kind != "tangent"
    ]
    values: list[Tensor | None] = []
    for (spec, node), side in zip(specs, ends.sides, strict=True):
        mine = own.get((spec.kind, spec.name))
        if mine is not None:
            values.append(mine.meta["val"])
        elif spec.kind == "param":
            values.append(None)
        else:
            shape = side.layout.local_shape(side.shape, ends.spec, ends.rank)
            values.append(torch.empty(shape, dtype=node_value(node).dtype, device="meta"))
    return Leaves([spec.kind for spec, _ in specs], values, ends.sides, ends.spec, ends.rank)


def _tangents(ends: PipelineEnds, stages: Sequence[StageOnRank]) -> list[tuple[int, Tensor]]:
    """Of outputs whose gradient is read, like this rank's part of it; on ranks that have none, like the whole."""
    own = {index: value for stage in stages for index, value in stage.tangents()}
    kinds = zip(ends.joint.inputs, ends.joint.placeholders, strict=True)
    read = [(spec.index, node) for spec, node in kinds if spec.kind == "tangent" and node.users]
    return [(index, own.get(index, node_value(node).to("meta"))) for index, node in read]
