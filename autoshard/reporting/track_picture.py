"""A step's collectives as a picture: when they are predicted to run, and below when they ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from autoshard.reporting.measured import StepFigures
from passes.plan.graph_text import format_seconds

__all__ = ["track_svg"]

_COLOURS = {
    "all_gather": "#5b8def",
    "reduce_scatter": "#e19a38",
    "all_reduce": "#c2544d",
    "all_to_all": "#5fa777",
}
_LEFT, _WIDTH, _LANE, _GAP = 90.0, 860.0, 13.0, 3.0
_STYLE = (
    "text { font: 11px ui-monospace, Menlo, monospace; fill: #1f2937; } .n { font-size: 8px; fill: #fff; }"
)

Span = tuple[float, float]


def track_svg(figures: StepFigures) -> str:
    """Both on one axis of seconds since the forward began; a collective has the same number in both. What is in
    flight at once stands in lanes."""
    tracks = figures.tracks
    predicted = [(t.predicted.start, t.predicted.end) for t in tracks]
    measured = [(t.start, t.end) for t in tracks]
    last = max([end for _, end in (*predicted, *measured)], default=1.0)
    kinds = [t.predicted.kind for t in tracks]
    top, parts = 34.0, list(_legend(kinds, figures))
    for name, spans in (("predicted", predicted), ("measured", measured)):
        rows, lanes = _lanes(spans)
        parts.append(f'<text x="8" y="{top + 10:.0f}">{name}</text>')
        for number, (span, row) in enumerate(zip(spans, rows, strict=True)):
            parts += _bar(number + 1, span, kinds[number], top + row * (_LANE + _GAP), last)
        top += lanes * (_LANE + _GAP) + 14.0
    parts += _axis(top, last)
    size = f'width="{_LEFT + _WIDTH + 20:.0f}" height="{top + 24:.0f}"'
    box = f'viewBox="0 0 {_LEFT + _WIDTH + 20:.0f} {top + 24:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>\n<style>{_STYLE}</style>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _lanes(spans: Sequence[Span]) -> tuple[list[int], int]:
    """(lane of each, how many): the first in which nothing else is in flight."""
    free: list[float] = []
    rows: list[int] = []
    for begin, end in spans:
        row = next((i for i, until in enumerate(free) if until <= begin), len(free))
        free[row : row + 1] = [end]
        rows.append(row)
    return rows, max(1, len(free))


def _bar(number: int, span: Span, kind: str, y: float, last: float) -> Iterator[str]:
    x, width = _LEFT + _WIDTH * span[0] / last, max(1.0, _WIDTH * (span[1] - span[0]) / last)
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_LANE:.0f}" fill="{_colour(kind)}">'
        f"<title>{number} {escape(kind)} {format_seconds(span[0])} to {format_seconds(span[1])}</title></rect>"
    )
    if width > 10.0:
        yield f'<text class="n" x="{x + 2:.1f}" y="{y + 9.5:.1f}">{number}</text>'


def _colour(kind: str) -> str:
    return _COLOURS.get(kind, "#6b7280")


def _legend(kinds: Sequence[str], figures: StepFigures) -> Iterator[str]:
    x = _LEFT
    for kind in dict.fromkeys(kinds):
        yield f'<rect x="{x:.0f}" y="8" width="12" height="12" fill="{_colour(kind)}"/>'
        yield f'<text x="{x + 16:.0f}" y="18">{escape(kind)}</text>'
        x += 30.0 + 7.0 * len(kind)
    if figures.exposed is not None:
        said = (
            f"exposed: predicted {format_seconds(figures.exposed.predicted)}, "
            f"measured {format_seconds(figures.exposed.measured)}"
        )
        yield f'<text x="{x + 10:.0f}" y="18">{said}</text>'


def _axis(y: float, last: float) -> Iterator[str]:
    yield f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + _WIDTH}" y2="{y}" stroke="#6b7280"/>'
    for part in range(6):
        x = _LEFT + _WIDTH * part / 5
        yield f'<line x1="{x}" y1="{y}" x2="{x}" y2="{y + 4}" stroke="#6b7280"/>'
        yield f'<text x="{x - 14:.0f}" y="{y + 16:.0f}">{format_seconds(last * part / 5) if part else 0}</text>'
