"""Orders are torch's own; what is kept in flight, by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

from cost_model.errors import InfeasibleError
from passes.stages.pipeline_orders import ORDERS, in_flight, pipeline_order, rank_peaks


class Recorded:
    """A stage of `torch.distributed.pipelining` that computes and sends nothing, and notes what it is told to."""

    has_backward = True

    def __init__(self, index: int, ranks: int, count: int) -> None:
        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size = index % ranks, ranks
        self.is_first, self.is_last = index == 0, index == count - 1
        self.device, self.submod, self.done = torch.device("cpu"), nn.Identity(), list[str]()

    def forward_one_chunk(self, piece: int, *_: Any, **__: Any) -> torch.Tensor:
        self.done.append(f"{self.stage_index}F{piece}")
        return torch.zeros(())

    def backward_one_chunk(self, piece: int, **_: Any) -> None:
        self.done.append(f"{self.stage_index}B{piece}")

    def nothing(self, *_: Any, **__: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing
    _get_init_p2p_neighbors_ops = _prepare_forward_infra = _prepare_backward_infra = perform_reduce_grad = (
        nothing
    )


def torchs_own(torch_name: str, ranks: int, pieces: int, local: int) -> list[list[str]]:
    """What torch's class runs on each rank, transfers and pauses left out. A class with one stage a rank has an order
    for drawings, in which 1F1B (2.13) begins with piece 1 on the last rank; what it runs, it does not say but do."""
    kind: Any = schedules.get_schedule_class(torch_name)
    if issubclass(kind, schedules.PipelineScheduleSingle):
        stages = [Recorded(rank, ranks, ranks) for rank in range(ranks)]
        for stage in stages:
            own: Any = stage
            given: list[Any] = [()] * pieces
            kind(own, pieces, loss_fn=lambda *_: torch.zeros(()))._step_microbatches(
                given, [{}] * pieces, given
            )
        return [stage.done for stage in stages]
    order = kind([Recorded(i * ranks, ranks, ranks * local) for i in range(local)], pieces).pipeline_order
    computing = ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT")
    kept = lambda action: action is not None and action.computation_type.name in computing
    return [[str(action) for action in order[rank] if kept(action)] for rank in range(ranks)]


CASES = [
    (name, ranks, pieces, local)
    for name, kind in ORDERS.items()
    for ranks in (1, 2, 3, 4, 8)
    for pieces in (2, 4, 5, 8, 16)
    for local in ((1, 2, 3) if kind.looped else (1,))
]


@pytest.mark.parametrize(("name", "ranks", "pieces", "local"), CASES)
def test_the_order_is_torchs(name: str, ranks: int, pieces: int, local: int) -> None:
    try:
        wanted = torchs_own(ORDERS[name].torch_name, ranks, pieces, local)
    except ValueError:
        with pytest.raises(InfeasibleError) as error:
            pipeline_order(name, ranks, pieces, stages_per_rank=local)
        other = re.search(r"try: micro_batches=(\d+)", str(error.value))
        assert other is not None and torchs_own(ORDERS[name].torch_name, ranks, int(other[1]), local)
        return
    order = pipeline_order(name, ranks, pieces, stages_per_rank=local)
    assert [[str(action) for action in row] for row in order.ranks] == wanted


def test_pieces_in_flight() -> None:
    """GPipe keeps all; 1F1B as many as stages are behind, and itself; zero bubble everywhere as many as
    1F1B at its first stage."""
    assert in_flight(pipeline_order("gpipe", 4, 8)) == (8, 8, 8, 8)
    assert in_flight(pipeline_order("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert in_flight(pipeline_order("zero_bubble", 4, 8)) == (4, 4, 4, 4)
    assert in_flight(pipeline_order("1f1b", 2, 8)) == (2, 1)


def test_peaks_of_ranks_with_several_stages() -> None:
    """Two ranks with two stages each, two pieces: rank 0 runs 0F0 0F1 2F0 2F1, and then backward."""
    order = pipeline_order("interleaved", 2, 2, stages_per_rank=2)
    assert [str(action) for action in order.ranks[0]] == [
        "0F0",
        "0F1",
        "2F0",
        "2F1",
        "2B0",
        "2B1",
        "0B0",
        "0B1",
    ]
    assert rank_peaks(order, [5, 7, 11, 13], [0] * 4) == (2 * 5 + 2 * 11, 2 * 7 + 13)
    # Stage 0 runs while it keeps both pieces and stage 2 none, stage 2 while all four are kept.
    assert rank_peaks(order, [5, 7, 11, 13], [100, 0, 50, 0])[0] == 2 * 5 + 100
    assert rank_peaks(order, [5, 7, 11, 13], [50, 0, 100, 0])[0] == 2 * 5 + 2 * 11 + 100


def test_an_order_that_there_is_not() -> None:
    with pytest.raises(
        InfeasibleError, match="no pipeline schedule 'fast'\n  try: gpipe, 1f1b, interleaved, zero_bubble"
    ):
        pipeline_order("fast", 2, 4)
    with pytest.raises(
        InfeasibleError, match="'1f1b' has one stage a rank, not 2\n  try: interleaved, zero_bubble"
    ):
        pipeline_order("1f1b", 2, 4, stages_per_rank=2)
