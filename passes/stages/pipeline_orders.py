"""In which order each rank of a pipeline runs its stages' forward and backward: GPipe, 1F1B, interleaved, zero bubble.

The orders are those of `torch.distributed.pipelining`, whose classes run them; tests compare each with theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from cost_model.errors import InfeasibleError

ActionKind = Literal["forward", "backward", "input", "weight"]
"""backward: both its halves, of which "input" makes the gradients of what the stage received, "weight" those of its
parameters."""

_LETTERS: Mapping[ActionKind, str] = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}


@dataclass(frozen=True)
class Action:
    """One phase of one piece (micro-batch) on one stage."""

    kind: ActionKind
    stage: int
    piece: int

    def __str__(self) -> str:
        """As torch writes it: "2F0"."""
        return f"{self.stage}{_LETTERS[self.kind]}{self.piece}"


@dataclass(frozen=True)
class PipelineOrder:
    """ranks: what each rank runs, in order. Stage s is on rank s mod the number of ranks.

    name: of `ORDERS`. torch_name: of the class in `torch.distributed.pipelining` that runs it.
    """

    name: str
    torch_name: str
    ranks: tuple[tuple[Action, ...], ...]
    stages: int
    pieces: int

    def rank_of(self, stage: int) -> int:
        return stage % len(self.ranks)


@dataclass(frozen=True)
class _Kind:
    """actions: (rank, ranks, stages a rank, pieces) -> what the rank runs."""

    torch_name: str
    looped: bool
    actions: Callable[[int, int, int, int], Iterator[Action]]


def pipeline_order(name: str, ranks: int, pieces: int, *, stages_per_rank: int = 1) -> PipelineOrder:
    """The order `name` of `ORDERS` for `pieces` micro-batches.

    Raises InfeasibleError where torch's class would not take these numbers.
    """
    if name not in ORDERS:
        raise InfeasibleError(f"there is no pipeline schedule {name!r}\n  try: {', '.join(ORDERS)}")
    kind = ORDERS[name]
    if not kind.looped and stages_per_rank != 1:
        raise InfeasibleError(
            f"the schedule {name!r} has one stage a rank, not {stages_per_rank}\n"
            f"  try: {', '.join(n for n, k in ORDERS.items() if k.looped)}"
        )
    _check_pieces(name, kind, ranks, pieces)
    rows = tuple(tuple(kind.actions(rank, ranks, stages_per_rank, pieces)) for rank in range(ranks))
    return PipelineOrder(name, kind.torch_name, rows, ranks * stages_per_rank, pieces)


def _check_pieces(name: str, kind: _Kind, ranks: int, pieces: int) -> None:
    if name == "1f1b" and pieces < ranks:
        raise InfeasibleError(
            f"the schedule '1f1b' over {ranks} stages takes at least as many micro-batches, not {pieces}\n"
            f"  try: micro_batches={ranks}, or 'gpipe'"
        )
    rounds = max(1, pieces // ranks)
    if kind.looped and pieces % rounds:
        raise InfeasibleError(
            f"the schedule {name!r} over {ranks} ranks runs micro-batches in {rounds} rounds, which do not "
            f"divide {pieces}\n  try: micro_batches={pieces // rounds * rounds}"
        )


def in_flight(order: PipelineOrder) -> tuple[int, ...]:
    """Per stage, of how many pieces at once it keeps what the backward reads: from their forward to the end of their
    backward."""
    return tuple(max(held) for held in zip(*_held(order), strict=True))


def rank_peaks(order: PipelineOrder, nbytes: Sequence[int], running: Sequence[int]) -> tuple[int, ...]:
    """Per rank, the most that it holds at once, if stage s keeps nbytes[s] for a piece and needs running[s] besides
    while it runs one."""
    total = lambda kept: sum(pieces * nbytes[stage] for stage, pieces in kept.items())
    return tuple(
        max((total(kept) + running[action.stage] for action, kept in pieces_kept(row)), default=0)
        for row in order.ranks
    )


def pieces_kept(row: Sequence[Action]) -> Iterator[tuple[Action, Counter[int]]]:
    """What a rank runs, and of how many pieces each of its stages keeps something meanwhile, the action's included."""
    kept = Counter[int]()
    for action in row:
        kept[action.stage] += action.kind == "forward"
        yield action, kept.copy()
        kept[action.stage] -= action.kind in ("backward", "weight")


def _held(order: PipelineOrder) -> Iterator[tuple[int, ...]]:
    """Pieces that each stage keeps during each action; ranks one after another, as none looks at another's."""
    for row in order.ranks:
        for _, kept in pieces_kept(row):
            yield tuple(kept[stage] for stage in range(order.stages))


def _gpipe(rank: int, ranks: int, _local: int, pieces: int) -> Iterator[Action]:
    yield from (Action("forward", rank, piece) for piece in range(pieces))
    yield from (Action("backward", rank, piece) for piece in range(pieces))


def _one_each(rank: int, ranks: int, _local: int, pieces: int) -> Iterator[Action]:
    ahead = min(ranks - 1 - rank, pieces)
    yield from (Action("forward", rank, piece) for piece in range(ahead))
    for piece in range(pieces):
        if piece + ahead < pieces:
            yield Action("forward", rank, piece + ahead)
        yield Action("backward", rank, piece)


def _interleaved(rank: int, ranks: int, local: int, pieces: int) -> Iterator[Action]:
    ahead = min((local - 1) * _per_round(ranks, pieces) + 2 * (ranks - 1 - rank), local * pieces)
    forward = list(_looped("forward", range(local), rank, ranks, pieces))
    yield from forward[:ahead]
    for i, backward in enumerate(_looped("backward", range(local)[::-1], rank, ranks, pieces)):
        yield from forward[ahead + i : ahead + i + 1]
        yield backward


def _zero_bubble(rank: int, ranks: int, local: int, pieces: int) -> Iterator[Action]:
    """The gradients of weights of `rank` pieces wait, and fill the time in which the last ones come back."""
    ahead = min((local - 1) * _per_round(ranks, pieces) + ranks - 1 - rank, local * pieces)
    forward = list(_looped("forward", range(local), rank, ranks, pieces))
    inputs = list(_looped("input", range(local)[::-1], rank, ranks, pieces))
    weights = [Action("weight", action.stage, action.piece) for action in inputs]
    yield from forward[:ahead]
    for i, backward in enumerate(inputs):
        yield from forward[ahead + i : ahead + i + 1]
        yield backward
        if i >= rank:
            yield weights[i - rank]
    yield from weights[max(0, len(inputs) - rank) :]


def _per_round(ranks: int, pieces: int) -> int:
    return pieces // max(1, pieces // ranks)


def _looped(kind: ActionKind, local: Sequence[int], rank: int, ranks: int, pieces: int) -> Iterator[Action]:
    """A round of pieces on each of the rank's stages in turn."""
    per_round = _per_round(ranks, pieces)
    counts = {i: count() for i in local}
    for step in range(len(local) * pieces):
        i = local[step // per_round % len(local)]
        yield Action(kind, i * ranks + rank, next(counts[i]))


ORDERS: Mapping[str, _Kind] = {
    "gpipe": _Kind("GPipe", False, _gpipe),
    "1f1b": _Kind("1F1B", False, _one_each),
    "interleaved": _Kind("Interleaved1F1B", True, _interleaved),
    "zero_bubble": _Kind("InterleavedZeroBubble", True, _zero_bubble),
}
"""zero_bubble: ZB-H1 with one stage a rank. [Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241]"""
