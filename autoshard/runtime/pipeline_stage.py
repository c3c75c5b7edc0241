"""Stages of a pipeline on a rank: their programs, and how the schedules of `torch.distributed.pipelining` run them.

torch's own stages wrap a module and differentiate it by autograd. A schedule asks less of a stage: to receive, compute
and send a piece, forward and backward. That is what `PipelineStage` does, with the programs of a `StageRun`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.runtime.compiled_pieces import PiecesRun
from autoshard.runtime.leaves import PiecesOnRank
from autoshard.runtime.observe import StageRecorder, timed
from passes.stages.pipeline_orders import Action, ActionKind
from passes.stages.stage_graph import Crossing, Leaf, StageEnds, StageGraph


@dataclass(frozen=True)
class StageOnRank:
    """A stage's graph, and this rank's programs of its pieces."""

    graph: StageGraph
    pieces: PiecesOnRank

    def without_gradients(self) -> StageOnRank:
        return replace(self, pieces=self.pieces.without_gradients())

    def tangents(self) -> list[tuple[int, Tensor]]:
        """Index of each output of the call that the stage returns, and a tensor like its gradient here."""
        known = self.pieces.placeholders()
        values = {spec.index: value for spec, _, value in known if spec.kind == "tangent"}
        return [(whole, values[i]) for i, whole in enumerate(self.graph.outputs) if i in values]

    def received(self) -> list[list[Crossing]]:
        """Per piece what comes from the stage before, in this rank's shapes."""
        return self._crossings("input", len(self.graph.inputs), self.graph.received)

    def sent(self) -> list[list[Crossing]]:
        """Per piece what goes to the stage after, in this rank's shapes. Without a gradient the shape is not needed."""
        return self._crossings("tangent", len(self.graph.outputs), self.graph.sent)

    def _crossings(self, kind: str, first: int, known: Sequence[Crossing]) -> list[list[Crossing]]:
        def of(piece: int) -> list[Crossing]:
            looks = self.pieces.placeholders(piece)
            shapes = {spec.index: tuple(value.shape) for spec, _, value in looks if spec.kind == kind}
            return [replace(one, shape=shapes.get(i, one.shape)) for i, one in enumerate(known, first)]

        return list(map(of, range(self.pieces.count)))


class StageRun(PiecesRun):
    """The computing of a stage for each piece. It keeps by itself what its backward needs, and adds up the gradients of
    its parameters and what it returns to the caller.

    A step: `start`, forward and backward of all pieces in any order, `finish`."""

    def __init__(self, stage: StageOnRank) -> None:
        super().__init__(stage.pieces.codes)
        self._at = StageEnds.of(stage.graph)
        self._placeholders = [name for _, name, _ in stage.pieces.placeholders()]
        self._kept: dict[int, list[Any]] = {}

    def start(self, leaves: Mapping[Leaf, Tensor], tangents: Mapping[int, Tensor]) -> None:
        """leaves: this rank's part of what the stage reads. tangents: of outputs of the call, by index."""
        known = {name: leaves[leaf] for leaf, name in self._at.leaves.items()}
        given = self._at.tangents.items()
        self.begin(known | {name: tangents[index] for index, name in given if index in tangents})

    def forward(self, piece: int, received: Sequence[Tensor]) -> list[Tensor]:
        self.known.update(zip(self._at.received, received, strict=True))
        self._kept[piece] = self.pieces[piece].forward(self.known)
        return self._taken(piece, self._at.sent)

    def backward(self, piece: int, returned: Sequence[Tensor]) -> list[Tensor]:
        self.known.update(zip(self._at.returned, returned, strict=True))
        self.pieces[piece].backward(self.known, self._kept.pop(piece))
        return self._taken(piece, self._at.given_back)

    def backward_input(self, piece: int, returned: Sequence[Tensor]) -> list[Tensor]:
        self.known.update(zip(self._at.returned, returned, strict=True))
        kept = self._kept.pop(piece)
        self._kept[piece] = self.pieces[piece].backward_input(self.known, kept, self._first(piece))
        return self._taken(piece, self._at.given_back)

    def _first(self, piece: int) -> list[str]:
        """Names of the gradients that are sent to the stage before."""
        results = self.parts[piece].results
        return [name for place in self._at.given_back if (name := results[place]) is not None]

    def prepare_for(self, schedule: str) -> None:
        """Compiles all that steps may run by a schedule."""
        self.prepare(self._first(0) if schedule == "zero_bubble" else None)

    def backward_weight(self, piece: int) -> None:
        self.pieces[piece].backward_weight(self.known, self._kept.pop(piece))

    def finish(self) -> dict[Leaf, Tensor]:
        """Outputs of the call, new values of buffers and gradients, by kind and the name that the whole graph has for
        them. Nothing of the step is kept."""
        found, self._kept = self.end(self._placeholders), {}
        named = ((leaf, found[place]) for place, leaf in self._at.results.items())
        return {leaf: value for leaf, value in named if value is not None}

    def _taken(self, piece: int, places: Sequence[int]) -> list[Tensor]:
        names = [self.parts[piece].results[place] for place in places]
        return [self.known[name] for name in names if name is not None]


@dataclass(eq=False)
class PipelineStage:
    """Stage `stage_index` of `num_stages`; public attributes and methods are those that torch's schedules ask for.

    _received_kinds, _sent_kinds: per piece what passes between it and its neighbours (`StageGraph.received` and
    `sent`), in order, with shapes of this rank's shards. Buffers live from the start of a transfer to the computing
    that reads them. _clocks: told of all computing.
    """

    _programs: StageRun
    _received_kinds: Sequence[Sequence[Crossing]]
    _sent_kinds: Sequence[Sequence[Crossing]]
    stage_index: int
    num_stages: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    _clocks: Sequence[StageRecorder] = ()

    def __post_init__(self) -> None:
        self.group_rank, self.group_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.is_first, self.is_last = self.stage_index == 0, self.stage_index == self.num_stages - 1
        self.has_backward = True
        self.stage_index_to_group_rank = {i: i % self.group_size for i in range(self.num_stages)}
        self.submod = nn.Identity()  # asked whether it is compiled, or FSDP's
        self.output_chunks: list[Any] = []
        self.args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
        self.act_send_info: dict[int, list[int]] = {}
        self._received: dict[int, list[Tensor]] = {}
        self._sent: dict[int, list[Tensor]] = {}
        self._returned: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor]] = {}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        kinds = self._received_kinds[fwd_chunk_id]
        buffers = self._received[fwd_chunk_id] = [self._buffer(kind) for kind in kinds]
        return self._transfers(dist.irecv, _valued(kinds, buffers), self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        sent = _valued(self._sent_kinds[fwd_chunk_id], self._sent.pop(fwd_chunk_id, ()))
        return self._transfers(dist.isend, sent, self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward:
            return []
        buffers = [self._buffer(kind) for kind in self._sent_kinds[bwd_chunk_id] if kind.gradient]
        self._returned[bwd_chunk_id] = buffers
        return self._transfers(dist.irecv, buffers, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._transfers(dist.isend, self._gradients.pop(bwd_chunk_id, ()), self.stage_index - 1)

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Any:
        """The values to send; of the last stage a number that stands for its loss, so that a backward follows."""
        with torch.no_grad(), self._timed("forward", fwd_chunk_id):
            sent = self._programs.forward(fwd_chunk_id, self._received.pop(fwd_chunk_id, ()))
        self._sent[fwd_chunk_id] = [value.contiguous() for value in sent]
        return torch.zeros(()) if self.is_last else tuple(self._sent[fwd_chunk_id])

    def backward_one_chunk(self, bwd_chunk_id: int, full_backward: bool = True, **_: Any) -> None:
        if not self.has_backward:
            return
        compute = self._programs.backward if full_backward else self._programs.backward_input
        with torch.no_grad(), self._timed("backward" if full_backward else "input", bwd_chunk_id):
            found = compute(bwd_chunk_id, self._returned.pop(bwd_chunk_id, ()))
        self._gradients[bwd_chunk_id] = [value.contiguous() for value in found]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, **_: Any) -> None:
        if self.has_backward:
            with torch.no_grad(), self._timed("weight", bwd_chunk_id):
                self._programs.backward_weight(bwd_chunk_id)

    # Between two stages of one rank nothing is sent.

    def set_local_fwd_input(self, prev_stage_outputs: Sequence[Tensor], mb_index: int) -> None:
        self._received[mb_index] = list(prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> Sequence[Tensor]:
        return self._gradients.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Sequence[Tensor], mb_index: int) -> None:
        self._returned[mb_index] = list(next_stage_bwd_outputs)

    # What a schedule does before the first step, and around every one.

    def clear_runtime_states(self) -> None:
        for kept in (self._received, self._sent, self._returned, self._gradients):
            kept.clear()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """A number to and from each neighbour: NCCL makes a communicator with all of its ranks at once."""
        around = [
            stage for stage in (self.stage_index - 1, self.stage_index + 1) if 0 <= stage < self.num_stages
        ]
        others = [stage for stage in around if self.stage_index_to_group_rank[stage] != self.group_rank]
        number = lambda: [torch.zeros(1, device=self.device)]
        ways = [(way, stage) for stage in others for way in (dist.irecv, dist.isend)]
        return [op for way, stage in ways for op in self._transfers(way, number(), stage)]

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None: ...

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None: ...

    def perform_reduce_grad(self, *_: Any) -> None: ...

    def scale_grads(self, *_: Any) -> None: ...

    def _timed(self, kind: ActionKind, piece: int) -> AbstractContextManager[Any]:
        return timed(self._clocks, Action(kind, self.stage_index, piece))

    def _buffer(self, kind: Crossing) -> Tensor:
        return torch.empty(kind.shape, dtype=kind.dtype, device=self.device)

    def _transfers(self, way: Any, tensors: Sequence[Tensor], stage: int) -> list[dist.P2POp]:
        if not tensors:
            return []
        peer = self.stage_index_to_group_rank[stage]
        return [dist.P2POp(way, tensor, group=self.group, group_peer=peer) for tensor in tensors]


def run_pieces(schedule: Any, pieces: int) -> None:
    """Forward and backward of all pieces, on every rank at once. The programs know where their pieces are."""
    with torch.enable_grad():  # else torch refuses to run a backward, though none of autograd's is run
        schedule.step(target=torch.zeros(pieces), return_outputs=False)


def run_pieces_forward(schedule: Any, pieces: int) -> None:
    """The forward alone of all pieces, on every rank at once."""
    schedule.eval(target=torch.zeros(pieces), return_outputs=False)


def _valued(kinds: Sequence[Crossing], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that the forward sends: the others only name a gradient."""
    return [tensor for kind, tensor in zip(kinds, tensors, strict=False) if kind.value]
