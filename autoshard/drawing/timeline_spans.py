"""The timeline of a pipeline as spans to draw: what each rank does when, its bubbles included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from passes.stages.pipeline_timeline import PipelineEvent, PipelineTimeline

__all__ = ["Span", "SpanKind", "rank_spans"]

SpanKind = Literal["once", "forward", "backward", "input", "weight", "bubble"]


@dataclass(frozen=True)
class Span:
    """Seconds from `start` to `end` of a rank. kind: "once": before its pieces, and after them with the optimizer's
    update; "bubble": it waits. stage, piece: None of what is of no piece."""

    kind: SpanKind
    start: float
    end: float
    stage: int | None = None
    piece: int | None = None

    @property
    def words(self) -> str:
        if self.piece is None:
            return {"bubble": "waits", "once": "once a step"}.get(self.kind, self.kind)
        what = {"input": "backward of inputs", "weight": "backward of weights"}.get(self.kind, self.kind)
        return f"{what} of piece {self.piece} on stage {self.stage}"


def rank_spans(timeline: PipelineTimeline) -> list[list[Span]]:
    """Of each rank all spans of the step, one after the other without a gap; those without length left out."""
    by_rank: list[list[PipelineEvent]] = [[] for _ in timeline.order.ranks]
    for event in timeline.events:
        by_rank[event.rank].append(event)
    ends = zip(by_rank, timeline.before, timeline.after, strict=True)
    return [list(_spans(own, before, after, timeline.seconds)) for own, before, after in ends]


def _spans(events: Sequence[PipelineEvent], before: float, after: float, seconds: float) -> Iterator[Span]:
    done = [Span("once", 0.0, before)]
    done += [Span(e.action.kind, e.start, e.end, e.action.stage, e.action.piece) for e in events]
    last = max(span.end for span in done)
    done += [Span("once", last, last + after), Span("bubble", seconds, seconds)]
    free = 0.0
    for span in done:
        if span.start > free:
            yield Span("bubble", free, span.start)
        if span.end > span.start:
            yield span
        free = max(free, span.end)
