"""The timeline of a pipeline: as a picture, a row a rank, bubbles hatched, and as a trace that Perfetto opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from xml.sax.saxutils import escape

from cost_model.memory import format_seconds
from passes.stages.pipeline_orders import PipelineEvent, PipelineTimeline

_COLOURS: Mapping[SpanKind, str] = {
    "once": "#b7bfcc",
    "forward": "#5b8def",
    "backward": "#e19a38",
    "input": "#e19a38",
    "weight": "#5fa777",
    "bubble": "url(#bubble)",
}
_LEGEND: Mapping[SpanKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "weight": "gradients of weights",
    "once": "once a step",
    "bubble": "bubble",
}
_LEFT, _WIDTH, _ROW, _TOP, _MARGIN = 90.0, 1080.0, 22.0, 66.0, 28.0

TIMELINE_STYLE = ".piece { font-size: 9px; fill: #ffffff; }"


@dataclass(frozen=True)
class Bar:
    """Of a row on a time axis, second `start` to `end`. words: said of it; name: written on it; kind: its class."""

    start: float
    end: float
    colour: str
    words: str
    name: str = ""
    kind: str = ""


Rows = Sequence[tuple[str, Sequence[Bar]]]
"""What is written in front of a row, and its bars."""


def timeline_width() -> float:
    return _LEFT + _WIDTH + _MARGIN


def rows_height(count: int) -> float:
    """Of so many rows below a legend, with their axis."""
    return _TOP + _ROW * count + 30.0


def rows_parts(rows: Rows, seconds: float, legend: Mapping[str, str], left: float = _LEFT) -> Iterator[str]:
    """What of an SVG picture shows rows on one axis. seconds: its length. legend: words -> colour, from `left` on."""
    for words, colour in legend.items():
        yield f'<rect x="{left:.0f}" y="34" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{left + 16:.0f}" y="44">{escape(words)}</text>'
        left += 34.0 + 7.0 * len(words)
    for number, (name, bars) in enumerate(rows):
        y = _TOP + number * _ROW
        yield f'<text x="{_MARGIN:.0f}" y="{y + 14:.0f}">{name}</text>'
        for bar in bars:
            yield from _bar(bar, y, seconds or 1.0)
    y = _TOP + _ROW * len(rows)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + _WIDTH * share
        said = format_seconds(share * seconds)
        yield f'<text x="{x:.1f}" y="{y + 14:.0f}" text-anchor="middle">{said}</text>'


def _bar(bar: Bar, y: float, seconds: float) -> Iterator[str]:
    x, width = _LEFT + _WIDTH * bar.start / seconds, _WIDTH * (bar.end - bar.start) / seconds
    when = f"{format_seconds(bar.start)} to {format_seconds(bar.end)}"
    yield (
        f'<rect class="span {bar.kind}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_ROW - 4:.0f}" '
        f'fill="{bar.colour}" stroke="#ffffff" stroke-width="0.5">'
        f"<title>{escape(bar.words)} {when}</title></rect>"
    )
    # Width of a digit of what is written on a bar, which is where it fits.
    if bar.name and width > 6.0 * (len(bar.name) + 1):
        yield f'<text class="piece" x="{x + 3:.2f}" y="{y + 12:.1f}">{bar.name}</text>'


def timeline_parts(title: str, timeline: PipelineTimeline) -> Iterator[str]:
    """What of an SVG picture shows it, at its top left."""
    order = timeline.order
    yield (
        '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#f3f4f6"/><rect width="2" height="6" fill="#d3d7de"/></pattern></defs>'
    )
    said = f"{order.name}, {order.pieces} pieces on {order.stages} stages: {format_seconds(timeline.seconds)}"
    yield f'<text class="head" x="{_MARGIN:.0f}" y="24">{escape(title)}</text>'
    yield f'<text x="{_MARGIN:.0f}" y="44">{escape(said)}, bubble {timeline.bubble:.1%}</text>'
    rows = [(f"rank {rank}", [span.bar for span in spans]) for rank, spans in enumerate(rank_spans(timeline))]
    legend = {words: _COLOURS[kind] for kind, words in _LEGEND.items()}
    yield from rows_parts(rows, timeline.seconds, legend, _LEFT + 0.55 * _WIDTH)


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
    def bar(self) -> Bar:
        name = "" if self.piece is None else str(self.piece)
        return Bar(self.start, self.end, _COLOURS[self.kind], f"{self.words},", name, self.kind)

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


_MICROSECONDS = 1e6


def trace_json(title: str, timeline: PipelineTimeline) -> dict[str, Any]:
    """Trace Event Format: a thread for each rank, and one for each direction of each boundary."""
    events: list[dict[str, Any]] = [_named("process_name", 0, 0, title)]
    ranks = rank_spans(timeline)
    for rank, spans in enumerate(ranks):
        events.append(_named("thread_name", 0, rank, f"rank {rank}"))
        for span in spans:
            content = {"stage": span.stage, "piece": span.piece} if span.piece is not None else {}
            events.append(_slice(span.words, span.kind, span.start, span.end, rank, content))
    threads: dict[tuple[int, str], int] = {}
    for moved in timeline.transfers:
        way = moved.boundary, moved.direction
        if way not in threads:
            threads[way] = len(ranks) + len(threads)
            words = f"{moved.direction} over boundary {moved.boundary}"
            events.append(_named("thread_name", 0, threads[way], words))
        words = f"piece {moved.piece} {moved.direction}"
        events.append(_slice(words, "transfer", moved.start, moved.end, threads[way], {"piece": moved.piece}))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, kind: str, start: float, end: float, thread: int, content: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "pid": 0,
        "tid": thread,
        "args": content,
    }
