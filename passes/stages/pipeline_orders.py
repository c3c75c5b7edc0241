"""In which order each rank of a pipeline runs its stages' forward and backward (GPipe, 1F1B, interleaved, zero bubble),
and when each action begins and ends, given the seconds of each stage and of each transfer.

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


@dataclass(frozen=True)
class StageSeconds:
    """Of one piece on one stage: its forward; the halves of its backward."""

    forward: float
    input: float
    weight: float

    def of(self, action: Action) -> float:
        if action.kind == "backward":
            return self.input + self.weight
        return {"forward": self.forward, "input": self.input, "weight": self.weight}[action.kind]


@dataclass(frozen=True)
class PipelineEvent:
    """Seconds from the start of the step."""

    action: Action
    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTransfer:
    """What passes between stages `boundary` and `boundary + 1` for a piece: values "sent", or gradients "returned"."""

    direction: Literal["sent", "returned"]
    boundary: int
    piece: int
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """events: of all ranks, by when they begin. transfers: likewise; none between stages of one rank.
    before, after: seconds that each rank computes before its first event and after its last."""

    order: PipelineOrder
    events: tuple[PipelineEvent, ...]
    transfers: tuple[PipelineTransfer, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(map(sum, zip(self.last, self.after, strict=True)), default=0.0)

    @property
    def last(self) -> tuple[float, ...]:
        """When the last event of each rank ends."""
        found = list(self.before)
        for event in self.events:
            found[event.rank] = max(found[event.rank], event.end)
        return tuple(found)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        found = [before + after for before, after in zip(self.before, self.after, strict=True)]
        for event in self.events:
            found[event.rank] += event.end - event.start
        return tuple(found)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they wait, from 0 to 1."""
        whole = self.seconds * len(self.order.ranks)
        return 1.0 - sum(self.busy) / whole if whole else 0.0


def pipeline_timeline(
    order: PipelineOrder,
    stages: Sequence[StageSeconds],
    sent: Sequence[float],
    returned: Sequence[float],
    *,
    before: Sequence[float] | None = None,
    after: Sequence[float] | None = None,
) -> PipelineTimeline:
    """sent, returned: seconds of a transfer over each boundary, forward and back. before, after: of each rank, once in
    a step, before its first action and after its last; None: nothing.

    A rank runs its actions one after another, each as soon as what it reads has come. Transfers take nothing from
    computing; those over one boundary in one direction go one after another.
    """
    nothing = (0.0,) * len(order.ranks)
    early, late = tuple(before or nothing), tuple(after or nothing)
    run = _Run(order, stages, {"sent": sent, "returned": returned}, list(early))
    waiting = [list(reversed(row)) for row in order.ranks]
    while any(waiting):
        ready = [rank for rank, row in enumerate(waiting) if row and run.arrival(row[-1]) is not None]
        assert ready, f"the order {order.name} waits for itself: {[str(row[-1]) for row in waiting if row]}"
        for rank in ready:
            run.do(waiting[rank].pop(), rank)
    by_start = lambda event: event.start
    events, transfers = sorted(run.events, key=by_start), sorted(run.transfers, key=by_start)
    return PipelineTimeline(order, tuple(events), tuple(transfers), early, late)


@dataclass
class _Run:
    """_free: when each rank is."""

    _order: PipelineOrder
    _stages: Sequence[StageSeconds]
    _seconds: dict[Literal["sent", "returned"], Sequence[float]]
    _free: list[float]

    def __post_init__(self) -> None:
        self._links: dict[tuple[str, int], float] = {}
        # When a stage has what it needs: (forward or not, stage, piece) -> seconds.
        self._arrived = {(True, 0, piece): 0.0 for piece in range(self._order.pieces)}
        self.events: list[PipelineEvent] = []
        self.transfers: list[PipelineTransfer] = []

    def arrival(self, action: Action) -> float | None:
        """When what `action` reads from other stages is there; None if that is not known yet."""
        if action.kind == "weight":
            return 0.0  # its rank has run the other half before
        return self._arrived.get((action.kind == "forward", action.stage, action.piece))

    def do(self, action: Action, rank: int) -> None:
        arrived = self.arrival(action)
        assert arrived is not None
        start = max(self._free[rank], arrived)
        end = self._free[rank] = start + self._stages[action.stage].of(action)
        self.events.append(PipelineEvent(action, rank, start, end))
        last = self._order.stages - 1
        if action.kind == "forward" and action.stage < last:
            self._pass("sent", action.stage, action, end)
        elif action.kind == "forward":
            self._arrived[False, last, action.piece] = end
        elif action.kind != "weight" and action.stage:
            self._pass("returned", action.stage - 1, action, end)

    def _pass(
        self, direction: Literal["sent", "returned"], boundary: int, action: Action, end: float
    ) -> None:
        target = boundary + 1 if direction == "sent" else boundary
        if self._order.rank_of(boundary) != self._order.rank_of(boundary + 1):
            start = max(end, self._links.get((direction, boundary), 0.0))
            end = self._links[direction, boundary] = start + self._seconds[direction][boundary]
            self.transfers.append(PipelineTransfer(direction, boundary, action.piece, start, end))
        self._arrived[direction == "sent", target, action.piece] = end
