"""Planned stages under a schedule: on the timeline of all ranks, and the bytes of the fullest at each action."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add

from msgspec.structs import replace

from autoshard.plan.plan_memory import AtPeak, MemoryTimeline, in_order
from cost_model.errors import InfeasibleError
from cost_model.memory import format_bytes
from passes.predict.predict_step import StageFigures
from passes.predict.prediction import KINDS, Kind, MemoryStep
from passes.stages.pipeline_orders import (
    ORDERS,
    Action,
    PipelineOrder,
    PipelineTimeline,
    StageSeconds,
    pieces_kept,
    pipeline_order,
    pipeline_timeline,
    rank_peaks,
)


@dataclass(frozen=True)
class SchedulePrices:
    """stages: figures of each. sent, returned: seconds of what passes each boundary for a piece, forward and back."""

    stages: tuple[StageFigures, ...]
    sent: tuple[float, ...]
    returned: tuple[float, ...]


@dataclass(frozen=True)
class Scheduled:
    """Stages under one schedule."""

    order: PipelineOrder
    prices: SchedulePrices

    @cached_property
    def timeline(self) -> PipelineTimeline:
        prices = self.prices
        return pipeline_timeline(
            self.order,
            [self._seconds(stage) for stage in prices.stages],
            prices.sent,
            prices.returned,
            before=[sum(stage.before for stage in own) for own in self._by_rank],
            after=[sum(stage.after + stage.update for stage in own) for own in self._by_rank],
        )

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Bytes that each rank holds at most: while a stage runs a piece, what its others hold, and all that is in
        flight then."""
        stages = self.prices.stages
        kept, running = [stage.kept for stage in stages], [stage.running for stage in stages]
        peaks = rank_peaks(self.order, kept, running)
        held = (sum(stage.held for stage in own) for own in self._by_rank)
        return tuple(map(add, peaks, held))

    @property
    def _by_rank(self) -> list[Sequence[StageFigures]]:
        count = len(self.order.ranks)
        return [self.prices.stages[rank::count] for rank in range(count)]

    def _seconds(self, stage: StageFigures) -> StageSeconds:
        """A backward that runs as one program takes less than its halves."""
        halved = any(action.kind == "weight" for row in self.order.ranks for action in row)
        halves = (stage.input, stage.weight) if halved else (stage.backward, 0.0)
        return StageSeconds(stage.forward, *halves)


def orders_of(
    ranks: int, pieces: int, stages_per_rank: int, names: Sequence[str] = tuple(ORDERS)
) -> Iterator[PipelineOrder]:
    """Those of `names` that run so many stages and pieces."""
    for name in names:
        try:
            yield pipeline_order(name, ranks, pieces, stages_per_rank=stages_per_rank)
        except InfeasibleError:
            continue


ByKind = tuple[int, ...]


def fullest_rank(scheduled: Scheduled) -> int:
    """The first along the axis of stages of those that hold most."""
    return scheduled.peaks.index(max(scheduled.peaks))


def pipeline_memory(scheduled: Scheduled, memories: Sequence[MemoryTimeline | None]) -> MemoryTimeline | None:
    """A step for each action of the fullest rank, in their order; the highest is the most of `scheduled.peaks`.

    memories: of the stages, their outlines or whole, which make the same. None where one of the rank's is not known, or
    holds more than the figures that `scheduled` is of.

    A step is its action's fullest moment: what the stage holds then, of the halves of a backward as of the whole; what
    the rank's other stages hold whatever runs; and what other pieces in flight keep. In no schedule a stage's forwards
    run beside more in flight than its backwards do, so what it makes at most is never beside more.
    """
    rank = fullest_rank(scheduled)
    own: dict[int, _Stage] = {}
    for number in range(rank, scheduled.order.stages, len(scheduled.order.ranks)):
        memory, figures = memories[number], scheduled.prices.stages[number]
        if memory is None or memory.peak.nbytes > figures.peak:
            return None
        own[number] = _Stage(number, figures, memory.outline())
    moments = [
        _Moment(action, own, pieces)
        for action, pieces in pieces_kept(scheduled.order.ranks[rank])
        if action.kind in own[action.stage].fullest
    ]
    steps = [one.step(place) for place, one in enumerate(moments)]
    known = [place for place, one in enumerate(moments) if one.fullest is one.stage.peak]
    top = max(known, key=lambda place: steps[place].nbytes)
    rows = in_order(row for row in moments[top].rows() if row.nbytes)
    return MemoryTimeline(len(steps), tuple(steps), rows)


@dataclass(frozen=True)
class _Stage:
    """memory: its outline."""

    number: int
    figures: StageFigures
    memory: MemoryTimeline

    @cached_property
    def fullest(self) -> Mapping[str, MemoryStep]:
        """Kind of an action -> the stage's fullest step of it; no backward where the stage has none. Of equally full
        steps the one at its peak, of which it is known what lives there."""
        found: dict[str, MemoryStep] = {}
        for step in (self.peak, *self.memory.steps):
            if step.phase not in found or step.nbytes > found[step.phase].nbytes:
                found[step.phase] = step
        for phase, step in found.items():
            if step.nbytes == self.peak.nbytes:
                found[phase] = self.peak
        halves = dict.fromkeys(("input", "weight"), found.get("backward"))
        return {**found, **{kind: step for kind, step in halves.items() if step is not None}}

    @cached_property
    def peak(self) -> MemoryStep:
        peak = self.memory.peak
        return replace(peak, by_kind=_plus(peak.by_kind, "working", self._unasked))

    @property
    def _unasked(self) -> int:
        """Of gradients that a usual step does not ask for, beside that of the loss, and the figures count."""
        return self.figures.peak - self.memory.peak.nbytes

    @cached_property
    def held(self) -> ByKind:
        """Of `figures.held`: what is there at the begin, gradients at the end, and of all else what is left to the end
        as long as it makes up the sum."""
        first, last = self.memory.steps[0], self.memory.steps[-1]
        found = {kind: first.of(kind) for kind in ("parameters", "optimizer", "inputs")}
        found["gradients"] = last.of("gradients")
        for kind in ("moved", "kept", "again", "working"):
            found[kind] = min(last.of(kind), max(0, self.figures.held - sum(found.values())))
        missing = self.figures.held - sum(found.values())
        return _plus(tuple(found[kind] for kind in KINDS), "working", missing)

    def rows(self) -> Iterator[AtPeak]:
        """What lives at its peak."""
        yield from self.memory.at_peak
        yield AtPeak("working", f"stage {self.number}", "gradients of other outputs", "", 1, self._unasked)


@dataclass(frozen=True)
class _Moment:
    """An action of a rank. own: its stages. pieces: that each of them keeps, the action's included."""

    action: Action
    own: Mapping[int, _Stage]
    pieces: Mapping[int, int]

    @property
    def stage(self) -> _Stage:
        return self.own[self.action.stage]

    @property
    def fullest(self) -> MemoryStep:
        return self.stage.fullest[self.action.kind]

    @property
    def others(self) -> list[_Stage]:
        return [stage for stage in self.own.values() if stage is not self.stage]

    @property
    def flying(self) -> list[tuple[_Stage, int]]:
        """Pieces that each stage keeps besides."""
        return [(one, self.pieces[number] - (one is self.stage)) for number, one in self.own.items()]

    def step(self, place: int) -> MemoryStep:
        held = [stage.held for stage in self.others]
        by_kind = tuple(map(sum, zip(self.fullest.by_kind, *held, strict=True)))
        kept = sum(pieces * stage.figures.kept for stage, pieces in self.flying)
        node = f"{self.fullest.node} (stage {self.action.stage}, piece {self.action.piece})"
        return MemoryStep(place, self.action.kind, node, _plus(by_kind, "kept", kept))

    def rows(self) -> Iterator[AtPeak]:
        yield from self.stage.rows()
        for stage in self.others:
            for kind, nbytes in zip(KINDS, stage.held, strict=True):
                yield AtPeak(kind, f"stage {stage.number}", "", "", 1, nbytes)
        for stage, pieces in self.flying:
            kept = stage.figures.kept
            name = f"stage {stage.number}, other pieces"
            yield AtPeak("kept", name, "", f"{format_bytes(kept)} each", pieces, pieces * kept)


def _plus(by_kind: ByKind, kind: Kind, nbytes: int) -> ByKind:
    return tuple(n + nbytes * (one == kind) for one, n in zip(KINDS, by_kind, strict=True))
