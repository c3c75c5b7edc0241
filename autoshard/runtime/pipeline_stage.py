"""A stage whose programs are given, as the schedule classes of `torch.distributed.pipelining` run stages.

torch's own stages wrap a module and differentiate it by autograd. A schedule asks less of a stage: to receive, compute
and send a piece, forward and backward. That is what `PipelineStage` does, with any programs for the computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.runtime.stage_clock import StageClock, timed
from passes.stages.pipeline_orders import ORDERS, Action, ActionKind
from passes.stages.stage_graph import Crossing

__all__ = ["PipelineStage", "StagePrograms", "run_pieces", "run_pieces_forward", "torch_schedule"]


class StagePrograms(Protocol):
    """What a stage computes for each piece. It keeps by itself what its backward needs, and adds up the gradients of
    its parameters and what it returns to the caller."""

    def forward(self, piece: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """What is sent to the next stage, of what was received from the one before."""
        ...

    def backward(self, piece: int, returned: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients of what was received, of those that the next stage returned for what was sent."""
        ...

    def backward_input(self, piece: int, returned: Sequence[Tensor]) -> Sequence[Tensor]:
        """As `backward`, but for the gradients of parameters, which `backward_weight` makes later."""
        ...

    def backward_weight(self, piece: int) -> None: ...


class PipelineStage:
    """Stage `stage_index` of `num_stages`; public attributes and methods are those that torch's schedules ask for.

    received, sent: per piece what passes between it and its neighbours (`StageGraph.received` and `sent`), in order,
    with shapes of this rank's shards. Buffers live from the start of a transfer to the computing that reads them.
    clocks: told of all computing.
    """

    def __init__(
        self,
        programs: StagePrograms,
        received: Sequence[Sequence[Crossing]],
        sent: Sequence[Sequence[Crossing]],
        stage: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        clocks: Sequence[StageClock] = (),
    ) -> None:
        self._clocks = clocks
        self.stage_index, self.num_stages = stage, stages
        self.device, self.group = device, group
        self.group_rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.has_backward = True
        self.stage_index_to_group_rank = {i: i % self.group_size for i in range(stages)}
        self.submod = nn.Identity()  # asked whether it is compiled, or FSDP's
        self.output_chunks: list[Any] = []
        self.args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
        self.act_send_info: dict[int, list[int]] = {}
        self._programs = programs
        self._received_kinds, self._sent_kinds = tuple(received), tuple(sent)
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
        """What is sent; of the last stage a number that stands for its loss, so that a backward follows."""
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


def torch_schedule(name: str, stages: Sequence[PipelineStage], pieces: int) -> Any:
    """The schedule `name` of `passes.stages.pipeline_orders` over this rank's stages, to be run by `run_pieces`."""
    # Imports Dynamo, which takes a second that a program without stages does not need.
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind: Any = get_schedule_class(ORDERS[name].torch_name)
    given: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else list(stages)
    return kind(given, pieces, loss_fn=lambda output, _wanted: output, scale_grads=False)


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
