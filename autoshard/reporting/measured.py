"""Measured beside predicted: one rank's figures, all ranks' put together, and, of a model in stages, when every rank
computed which piece."""

from __future__ import annotations

import json
import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch.distributed as dist
from msgspec import structs

from autoshard.plan.plan import PipelinePlan
from autoshard.plan.stage_schedule import Scheduled
from autoshard.reporting.recorder import STEP_PHASES, StepTimes
from autoshard.reporting.tracks import Tracks
from autoshard.runtime.observe import RankStep, StageRecorder
from autoshard.runtime.process_groups import whole_group
from autoshard.runtime.session import Session
from autoshard.watching.agreement import everyones
from cost_model.errors import PlanError, checked_path, write_text
from cost_model.measure.clock import marks_of
from cost_model.memory import format_seconds
from passes.predict.prediction import PredictedCollective, Prediction
from passes.stages.pipeline_orders import PipelineEvent, PipelineOrder, PipelineTimeline

_Key = tuple[str, str, tuple[str, ...], str, int]


@dataclass(frozen=True)
class RankFigures:
    """One rank's measurements. collectives: parallel to those of its prediction, seconds alone.
    compute: phase -> seconds of its kernels, run op by op. tracks: when they ran in a step; None: not known. memory: of
    phases where it was measured."""

    prediction: Prediction
    steps: tuple[StepTimes, ...]
    collectives: tuple[float, ...]
    compute: Mapping[str, float]
    tracks: Tracks | None = None
    memory: tuple[PeakMemory, ...] = ()


@dataclass(frozen=True)
class PeakMemory:
    """The most bytes of a phase, on one rank. predicted: None where there is no prediction, of the optimizer's."""

    phase: str
    predicted: int | None
    measured: int


@dataclass(frozen=True)
class Track:
    """A collective in a real step. start, end: seconds since the forward began, the ranks' mean."""

    predicted: PredictedCollective
    start: float
    end: float


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step's forward and backward in which communication held up computing. measured: the ranks' mean."""

    predicted: float
    measured: float


@dataclass(frozen=True)
class MeasuredCollective:
    """seconds: measured alone, once, of the slowest rank of its group."""

    predicted: PredictedCollective
    seconds: float


@dataclass(frozen=True)
class MeasuredPhase:
    """seconds: median over the steps of the ranks' mean. (Whoever comes first waits for the others in its
    next collective: the ranks' longest forward and longest backward are not of one step.) compute: of its
    kernels alone, of the slowest rank. predicted, predicted_compute: the same by the prices; None where
    there is no prediction."""

    name: str
    seconds: float
    compute: float | None
    predicted: float | None
    predicted_compute: float | None


@dataclass(frozen=True)
class StepFigures:
    """All ranks' step, predicted and measured.

    ranks, steps:   how many were measured; warmup: steps before them that were not counted.
    step_seconds:   of each step, the slowest rank's. seconds: their median.
    predicted:      seconds of the slowest rank's step by the prices.
    phases:         forward, backward, optimizer, other.
    tracks:         when each collective ran, in the order of issue; empty where that is not known, as exposed is None.
    memory:         of the rank that held most: each phase's peak.
    """

    ranks: int
    warmup: int
    step_seconds: tuple[float, ...]
    predicted: float
    phases: tuple[MeasuredPhase, ...]
    collectives: tuple[MeasuredCollective, ...]
    tracks: tuple[Track, ...] = ()
    exposed: Exposed | None = None
    memory: tuple[PeakMemory, ...] = ()

    @property
    def peak_memory(self) -> PeakMemory | None:
        """The peak of forward and backward, which are predicted. None where nothing was measured."""
        known = [one for one in self.memory if one.predicted is not None]
        if not known:
            return None
        measured = max(one.measured for one in known)
        return PeakMemory("step", max(one.predicted or 0 for one in known), measured)

    @property
    def steps(self) -> int:
        return len(self.step_seconds)

    @property
    def seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def ratio(self) -> float:
        """Predicted over measured step."""
        return self.predicted / self.seconds


def put_together(ranks: Sequence[RankFigures], warmup: int, *, fused: bool) -> StepFigures:
    """The slowest rank's prediction beside what the ranks measured.

    fused: the programs are compiled, so their kernels cannot be timed op by op: compute is what is left
    of a phase without the communication that it does not hide.
    """
    slowest = max((rank.prediction for rank in ranks), key=lambda p: p.seconds)
    # What ran before the compiled programs were warm says nothing; of too few steps the last is kept.
    count = min(len(rank.steps) for rank in ranks)
    warmup = min(warmup, count - 1)
    counted = [rank.steps[warmup:count] for rank in ranks]
    collectives = tuple(_collectives(slowest, ranks))
    compute = {name: max(r.compute.get(name, 0.0) for r in ranks) for name in ranks[0].compute}
    phases: list[MeasuredPhase] = []
    for name in STEP_PHASES:
        seconds = _mean([[step.phases[name] for step in steps] for steps in counted])
        predicted = next((p for p in slowest.phases if p.name == name), None)
        alone = None if fused else compute.get(name)
        if predicted is not None and alone is None:
            alone = max(0.0, seconds - _exposed(name, collectives))
        if predicted is None and seconds == 0.0:
            continue
        priced = (None, None) if predicted is None else (predicted.seconds, predicted.compute)
        phases.append(MeasuredPhase(name, seconds, alone, *priced))
    other = _mean([[step.other for step in steps] for steps in counted])
    phases.append(MeasuredPhase("other", other, None, None, None))
    totals = tuple(
        max(times) for times in zip(*([s.seconds for s in steps] for steps in counted), strict=True)
    )
    tracks = tuple(_tracks(slowest, ranks))
    return StepFigures(
        len(ranks),
        warmup,
        totals,
        slowest.seconds,
        tuple(phases),
        collectives,
        tracks,
        _held_up(slowest, ranks) if tracks else None,
        max((rank.memory for rank in ranks), key=lambda m: max((one.measured for one in m), default=0)),
    )


def _tracks(slowest: Prediction, ranks: Sequence[RankFigures]) -> Iterator[Track]:
    """Nothing unless every rank knows."""
    spans: dict[_Key, list[tuple[float, float]]] = {}
    for rank in ranks:
        if rank.tracks is None:
            return
        for key, span in zip(_keys(rank.prediction), rank.tracks.spans, strict=True):
            spans.setdefault(key, []).append(span)
    for key, predicted in zip(_keys(slowest), slowest.collectives, strict=True):
        begins, ends = zip(*spans[key], strict=True)
        yield Track(predicted, statistics.mean(begins), statistics.mean(ends))


def _held_up(slowest: Prediction, ranks: Sequence[RankFigures]) -> Exposed:
    measured = [sum(rank.tracks.exposed.values()) for rank in ranks if rank.tracks is not None]
    predicted = sum(phase.exposed for phase in slowest.phases if phase.name != "optimizer")
    return Exposed(predicted, statistics.mean(measured))


def _mean(by_rank: Sequence[Sequence[float]]) -> float:
    """The ranks' mean of each step, and of these the median."""
    return statistics.median(statistics.mean(times) for times in zip(*by_rank, strict=True))


def _collectives(slowest: Prediction, ranks: Sequence[RankFigures]) -> Iterator[MeasuredCollective]:
    """Those of the slowest rank's program, each with the longest time that any rank saw."""
    longest: dict[_Key, float] = {}
    for rank in ranks:
        for key, seconds in zip(_keys(rank.prediction), rank.collectives, strict=True):
            longest[key] = max(longest.get(key, 0.0), seconds)
    for key, predicted in zip(_keys(slowest), slowest.collectives, strict=True):
        yield MeasuredCollective(predicted, longest[key])


def _keys(prediction: Prediction) -> list[_Key]:
    """Keys by which ranks know their collectives: the same one has the same number among its kind on each."""
    seen: dict[tuple[str, str, tuple[str, ...], str], int] = {}
    keys: list[_Key] = []
    for c in prediction.collectives:
        name = (c.phase, c.kind, c.axes, c.serves)
        seen[name] = seen.get(name, 0) + 1
        keys.append((*name, seen[name]))
    return keys


def _exposed(phase: str, collectives: Sequence[MeasuredCollective]) -> float:
    """Measured communication of a phase, less the share that the prediction hides."""
    return sum(
        c.predicted.times * c.seconds * c.predicted.exposed / c.predicted.seconds
        for c in collectives
        if c.predicted.phase == phase and c.predicted.seconds > 0.0
    )


F = TypeVar("F")


@dataclass(frozen=True)
class PipelineFigures:
    """predicted, measured: a step without the optimizer's update; measured is the median of `steps`. Of ranks with one
    coordinate along the axis of the stages it is the busiest."""

    predicted: PipelineTimeline
    measured: PipelineTimeline
    steps: int


class Report(ABC, Generic[F]):
    """A report on a model; filled when its block ends. figures: everything in `text`, as data."""

    def __init__(self, session: Session, warmup: int, watching: list[Any], recorder: Any) -> None:
        self._session, self._warmup = session, warmup
        self._watching, self._watcher = watching, recorder
        self._figures: F | None = None

    @abstractmethod
    def text(self) -> str: ...

    @abstractmethod
    def _drawn(self, target: Path) -> str: ...

    @abstractmethod
    def _measure(self) -> F: ...

    def __enter__(self) -> Self:
        self._watching.append(self._watcher)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.remove(self._watcher)
        self._watcher.stop()
        if kind is None:
            self._figures = self._measure()

    @property
    def figures(self) -> F:
        if self._figures is None:
            raise PlanError("the report is not there yet\n  try: read it after its `with` block has ended")
        return self._figures

    def __str__(self) -> str:
        return self.text()

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw when each collective was to run, and when it ran, as SVG. Of a model in stages the predicted timeline
        above the measured one (.svg), or the measured one as a trace (.json). PlanError where that is not known."""
        target = checked_path(path, "path", PlanError)
        write_text(target, self._drawn(target), "picture", PlanError)
        return target


class PipelineReport(Report[PipelineFigures]):
    """The report of a model in stages."""

    def __init__(self, session: Session, warmup: int) -> None:
        self._recorder = StageRecorder(marks_of(session.spec.device_type))
        super().__init__(session, warmup, session.stage_clocks, self._recorder)

    def __enter__(self) -> Self:
        dist.barrier(whole_group(self._session.mesh))
        return super().__enter__()

    def text(self) -> str:
        """Step, bubble, and the seconds of a piece on every stage: predicted, measured, predicted / measured."""
        f = self.figures
        order = f.measured.order
        lines = [
            f"{order.name}, {order.pieces} pieces on {order.stages} stages",
            f"the median of {f.steps} steps, without the optimizer's update",
            f"{'':24}{'predicted':>12}{'measured':>12}   predicted / measured",
            *_lines("step", f.predicted.seconds, f.measured.seconds),
            f"{'bubble':24}{f.predicted.bubble:>12.3f}{f.measured.bubble:>12.3f}",
        ]
        predicted, measured = _of_a_piece(f.predicted), _of_a_piece(f.measured)
        for stage, kind in measured:
            lines += _lines(f"stage {stage} {kind}", predicted.get((stage, kind), 0.0), measured[stage, kind])
        return "\n".join(lines) + "\n"

    def _drawn(self, target: Path) -> str:
        if target.suffix == ".json":
            from autoshard.drawing.timeline_svg import trace_json

            return json.dumps(trace_json("measured", self.figures.measured)) + "\n"
        if target.suffix == ".svg":
            from autoshard.drawing.draw import two_timelines_svg

            return two_timelines_svg(
                ("predicted", self.figures.predicted), ("measured", self.figures.measured)
            )
        raise PlanError(f"draw({str(target)!r}): not a name that ends in .svg or .json\n  try: one that does")

    def _measure(self) -> PipelineFigures:
        session, plan = self._session, self._session.plan
        steps = [step for step in self._recorder.steps() if step.trained]
        if not steps or not isinstance(plan, PipelinePlan):
            raise PlanError(
                "report: the model was not trained in the block\n  try: run training steps inside `with`"
            )
        ranks = everyones(session.mesh, tuple(steps))
        order = plan.scheduled.order
        places = [plan.mesh.coordinate(rank)[plan.axis] for rank in range(len(ranks))]
        first = min(self._warmup, len(steps) - 1)
        found = [
            measured_timeline([own[i] for own in ranks], places, order) for i in range(first, len(steps))
        ]
        found.sort(key=lambda timeline: timeline.seconds)
        stages = tuple(structs.replace(stage, update=0.0) for stage in plan.scheduled.prices.stages)
        predicted = Scheduled(order, replace(plan.scheduled.prices, stages=stages)).timeline
        return PipelineFigures(predicted, found[len(found) // 2], len(found))


def measured_timeline(
    steps: Sequence[RankStep], places: Sequence[int], order: PipelineOrder
) -> PipelineTimeline:
    """One step of all ranks. places: of each rank its coordinate along the axis of the stages."""
    origin = min(step.begins for step in steps)
    busiest: dict[int, RankStep] = {}
    for step, place in zip(steps, places, strict=True):
        if place not in busiest or step.busy > busiest[place].busy:
            busiest[place] = step
    own = [busiest[place] for place in range(len(order.ranks))]
    late = [step.begins - origin for step in own]
    events = [
        PipelineEvent(action, rank, late[rank] + start, late[rank] + end)
        for rank, step in enumerate(own)
        for action, start, end in step.actions
    ]
    return PipelineTimeline(
        order,
        tuple(sorted(events, key=lambda event: (event.start, event.rank))),
        (),
        tuple(step.pieces for step in own),
        tuple(step.done - step.end for step in own),
    )


def _of_a_piece(timeline: PipelineTimeline) -> Mapping[tuple[int, str], float]:
    """Stage and kind of action -> the mean of all pieces, by stage."""
    found: dict[tuple[int, str], list[float]] = {}
    for event in timeline.events:
        key = event.action.stage, event.action.kind
        found.setdefault(key, []).append(event.end - event.start)
    return {key: sum(seconds) / len(seconds) for key, seconds in sorted(found.items())}


def _lines(name: str, predicted: float, measured: float) -> Iterator[str]:
    ratio = f"{predicted / measured:.2f}" if measured else ""
    yield f"{name:24}{format_seconds(predicted):>12}{format_seconds(measured):>12}   {ratio}"
