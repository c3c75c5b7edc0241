"""When each action of a pipeline begins and ends, given the seconds of each stage and of each transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from passes.stages.pipeline_orders import Action, PipelineOrder


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
