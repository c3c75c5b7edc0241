"""The program of a rank that runs stages of a pipeline, as a differentiable function of a call's tensors.

A call runs all pieces, forward and backward, by a schedule of torch's (`autoshard.runtime.pipeline_stage`), as one in
pieces does without stages (`autoshard.runtime.step.AtOnce`). Every rank gets the call's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.runtime.call_program import Around, CallGradients
from autoshard.runtime.leaves import InputSide, Leaves, PiecesOnRank, RankSides
from autoshard.runtime.observe import StageRecorder, StepPart
from autoshard.runtime.pipeline_stage import (
    PipelineStage,
    StageOnRank,
    StageRun,
    run_pieces,
    run_pieces_forward,
)
from autoshard.runtime.step import AtOnce, Tensors
from cost_model.mesh import MeshSpec
from passes.ir.joint import GraphInput, GraphOutput
from passes.ir.torch_dtensor import local_of
from passes.layout.layout import Layout
from passes.stages.pipeline_orders import ORDERS
from passes.stages.stage_graph import StageGraph


@dataclass(frozen=True)
class PipelineEnds:
    """The ends of a call, and the ranks that have them.

    inputs, outputs: of the call's graph. values, results: how they look, whole. read: outputs whose gradients are read.
    spec, rank: a stage's mesh, and this rank's place in it.
    returned: tensor output of the call -> (coordinate along the stage axis of the ranks that return it, layout), of
              those that all ranks are given. Others stay where they are made.
    buffers:  buffer that the call changes -> coordinate of the ranks that do.
    sides:    of the call's inputs, tangents excepted.
    axis:     that of the stages. group: of this rank's ranks along it.
    """

    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    values: Sequence[Tensor]
    results: Sequence[Tensor | None]
    read: frozenset[int]
    spec: MeshSpec
    rank: int
    returned: Mapping[int, tuple[int, Layout]]
    buffers: Mapping[str, int]
    sides: Sequence[InputSide]
    axis: str
    group: dist.ProcessGroup
    device: torch.device


@dataclass(frozen=True)
class Staging:
    """How a call meets the stages of this rank. graphs: theirs, in order. count: of all. schedule: a name in
    `ORDERS`."""

    ends: PipelineEnds
    graphs: Sequence[StageGraph]
    count: int
    schedule: str

    def on_rank(self, pieces: Sequence[PiecesOnRank]) -> list[StageOnRank]:
        return list(map(StageOnRank, self.graphs, pieces))

    def program(
        self, pieces: Sequence[PiecesOnRank], clocks: Sequence[StageRecorder], around: Around
    ) -> AtOnce:
        """pieces: of each of the graphs. clocks: told of every step; they may change while the program lives."""
        ends, stages = self.ends, self.on_rank(pieces)
        gradients = pipeline_gradients(ends, stages)
        early = body = _Pipeline(self, stages, clocks).run
        if gradients.gradients and not gradients.has_loss:
            early = _Pipeline(self, [stage.without_gradients() for stage in stages], clocks).run
        return AtOnce(_leaves(ends, stages), gradients, body, early, ends.device, around)


def pipeline_gradients(ends: PipelineEnds, stages: Sequence[StageOnRank]) -> CallGradients:
    return CallGradients(ends.outputs, ends.inputs, _tangents(ends, stages))


class _Pipeline:
    """The stages of this rank, compiled, and what runs them by turns with those of the others: a body of `AtOnce`."""

    def __init__(
        self, staging: Staging, stages: Sequence[StageOnRank], clocks: Sequence[StageRecorder]
    ) -> None:
        ends, count = staging.ends, staging.count
        self._at, self._clocks, self._pieces = ends, clocks, stages[0].pieces.count
        self._names = [(s.kind, s.name) for s in ends.inputs if s.kind != "tangent"]
        self._runs = list(map(StageRun, stages))
        ours = [
            PipelineStage(
                run, stage.received(), stage.sent(), stage.graph.stage, count, ends.device, ends.group, clocks
            )
            for run, stage in zip(self._runs, stages, strict=True)
        ]
        self._schedule = torch_schedule(staging.schedule, ours, self._pieces)

    def run(
        self, leaves: Tensors, values: Tensors, tangents: Mapping[int, Tensor], backward: bool
    ) -> list[Tensor | None]:
        """Outputs and new buffers come to all ranks, gradients to those that hold their leaves."""
        found = self._of_own_stages(dict(zip(self._names, values, strict=True)), tangents, backward)
        results: list[Tensor | None] = []
        for end, like in zip(self._at.outputs, self._at.results, strict=True):
            value = found.get((end.kind, end.name))
            if like is None or (end.kind == "grad" and not backward):
                value = None
            elif end.kind == "output":
                value = self._output(value, end.index, like)
            elif end.kind == "buffer":
                value = self._everywhere(value, self._at.buffers[end.name], local_of(leaves[end.index]))
            else:
                value = self._gradient(value, end.index, leaves[end.index])
            results.append(value)
        return results

    def _of_own_stages(
        self, leaves: Mapping[tuple[str, str], Tensor], tangents: Mapping[int, Tensor], backward: bool
    ) -> dict[tuple[str, str], Tensor]:
        """Outputs, new buffers and gradients of this rank's stages, by kind and name."""
        self._begins("begin")
        for run in self._runs:
            run.start(leaves, tangents)
        self._begins("pieces")
        (run_pieces if backward else run_pieces_forward)(self._schedule, self._pieces)
        self._begins("end")
        found: dict[tuple[str, str], Tensor] = {}
        for run in self._runs:
            for key, value in run.finish().items():
                found[key] = found[key] + value if key in found and key[0] == "grad" else value
        self._begins("done")
        return found

    def _begins(self, part: StepPart) -> None:
        for clock in self._clocks:
            clock.begins(part)

    def _output(self, value: Tensor | None, index: int, like: Tensor) -> Tensor:
        shape = (0,)
        if index in self._at.returned:
            source, layout = self._at.returned[index]
            shape = layout.local_shape(like.shape, self._at.spec, self._at.rank)
            return self._everywhere(
                value, source, torch.empty(shape, dtype=like.dtype, device=self._at.device)
            )
        return torch.empty(shape, dtype=like.dtype, device=self._at.device) if value is None else value

    def _everywhere(self, value: Tensor | None, source: int, like: Tensor) -> Tensor:
        """`value`, which the ranks at `source` along the stage axis have, on all of them."""
        sent = torch.empty_like(like) if value is None else value.contiguous()
        dist.broadcast(sent, group=self._at.group, group_src=source)
        return sent

    def _gradient(self, value: Tensor | None, place: int, leaf: Tensor) -> Tensor:
        """The sum over the ranks along the axis that hold the leaf: each has a part, or none. Elsewhere an empty
        one."""
        if value is None:
            value = torch.zeros(self._held(place, leaf), dtype=leaf.dtype, device=self._at.device)
        group = self._holders(leaf)
        if group is not None:
            value = value.contiguous()
            dist.all_reduce(value, group=group)
        return value

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


def _leaves(ends: PipelineEnds, stages: Sequence[StageOnRank]) -> Leaves:
    """The leaves of the whole call. A parameter that no stage of this rank reads is taken as it is."""
    known = [one for stage in reversed(stages) for one in stage.pieces.placeholders()]
    own = {(spec.kind, spec.name): value for spec, _, value in known}
    pairs = zip(ends.inputs, ends.values, strict=True)
    specs = [(spec, value) for spec, value in pairs if spec.kind != "tangent"]
    values: list[Tensor | None] = []
    for (spec, whole), side in zip(specs, ends.sides, strict=True):
        mine = own.get((spec.kind, spec.name))
        if mine is None and spec.kind != "param":
            shape = side.layout.local_shape(side.shape, ends.spec, ends.rank)
            mine = torch.empty(shape, dtype=whole.dtype, device="meta")
        values.append(mine)
    return Leaves([spec.kind for spec, _ in specs], values, RankSides(ends.sides, ends.spec, ends.rank))


def _tangents(ends: PipelineEnds, stages: Sequence[StageOnRank]) -> list[tuple[int, Tensor]]:
    """Index and look of each output's gradient that is read: this rank's part of it, or the whole where it has none."""
    own = {index: value for stage in stages for index, value in stage.tangents()}
    pairs = zip(ends.inputs, ends.values, strict=True)
    read = [(spec.index, v) for spec, v in pairs if spec.kind == "tangent" and spec.index in ends.read]
    return [(index, own.get(index, value)) for index, value in read]


def torch_schedule(name: str, stages: Sequence[PipelineStage], pieces: int) -> Any:
    """The schedule `name` of `passes.stages.pipeline_orders` over this rank's stages, to be run by `run_pieces`."""
    # Imports Dynamo, which takes a second that a program without stages does not need.
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind: Any = get_schedule_class(ORDERS[name].torch_name)
    given: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else list(stages)
    return kind(given, pieces, loss_fn=lambda output, _wanted: output, scale_grads=False)
