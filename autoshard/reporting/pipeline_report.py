"""`report(model)` of a model in stages: when every rank computed which piece, beside when it was to."""

from __future__ import annotations

import json
import os
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
from autoshard.runtime.observe import RankStep, StageRecorder
from autoshard.runtime.process_groups import whole_group
from autoshard.runtime.session import Session
from autoshard.watching.agreement import everyones
from cost_model.errors import PlanError, checked_path, write_text
from cost_model.measure.clock import marks_of
from cost_model.memory import format_seconds
from passes.stages.pipeline_orders import PipelineEvent, PipelineOrder, PipelineTimeline

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
