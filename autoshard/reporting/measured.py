"""Measured beside predicted: one rank's figures, and all ranks' put together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.reporting.recorder import STEP_PHASES, StepTimes
from autoshard.reporting.tracks import Tracks
from passes.predict.prediction import PredictedCollective, Prediction

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
        phases.append(
            MeasuredPhase(
                name,
                seconds,
                alone,
                None if predicted is None else predicted.seconds,
                None if predicted is None else predicted.compute,
            )
        )
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
