"""All stages and pieces of a pipeline on one axis of seconds, a row a rank, bubbles hatched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.sax.saxutils import escape

from autoshard.drawing.timeline_spans import Span, SpanKind, rank_spans
from passes.plan.graph_text import format_seconds
from passes.stages.pipeline_timeline import PipelineTimeline

__all__ = ["TIMELINE_STYLE", "timeline_height", "timeline_parts", "timeline_width"]

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
_DIGIT = 6.0
"""Width of a digit of a piece's number, which is written where it fits."""

TIMELINE_STYLE = ".piece { font-size: 9px; fill: #ffffff; }"


def timeline_width() -> float:
    return _LEFT + _WIDTH + _MARGIN


def timeline_height(timeline: PipelineTimeline) -> float:
    return _TOP + _ROW * len(timeline.order.ranks) + 30.0


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
    yield from _legend()
    for rank, spans in enumerate(rank_spans(timeline)):
        y = _TOP + rank * _ROW
        yield f'<text x="{_MARGIN:.0f}" y="{y + 14:.0f}">rank {rank}</text>'
        for span in spans:
            yield from _bar(span, y, timeline.seconds or 1.0)
    y = _TOP + _ROW * len(order.ranks)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + _WIDTH * share
        said = format_seconds(share * timeline.seconds)
        yield f'<text x="{x:.1f}" y="{y + 14:.0f}" text-anchor="middle">{said}</text>'


def _legend() -> Iterator[str]:
    x = _LEFT + 0.55 * _WIDTH
    for kind, words in _LEGEND.items():
        yield f'<rect x="{x:.0f}" y="34" width="12" height="12" fill="{_COLOURS[kind]}"/>'
        yield f'<text x="{x + 16:.0f}" y="44">{words}</text>'
        x += 34.0 + 7.0 * len(words)


def _bar(span: Span, y: float, seconds: float) -> Iterator[str]:
    x, width = _LEFT + _WIDTH * span.start / seconds, _WIDTH * (span.end - span.start) / seconds
    when = f"{format_seconds(span.start)} to {format_seconds(span.end)}"
    yield (
        f'<rect class="span {span.kind}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_ROW - 4:.0f}" '
        f'fill="{_COLOURS[span.kind]}" stroke="#ffffff" stroke-width="0.5">'
        f"<title>{escape(span.words)}, {when}</title></rect>"
    )
    if span.piece is not None and width > _DIGIT * (len(str(span.piece)) + 1):
        yield f'<text class="piece" x="{x + 3:.2f}" y="{y + 12:.1f}">{span.piece}</text>'
