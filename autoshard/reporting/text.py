"""A report as a page of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from autoshard.reporting.measured import MeasuredCollective, StepFigures
from cost_model.memory import format_bytes, format_seconds

_SHOWN = 40
_ROW = "{:46} {:>10} {:>10} {:>7}"


def report_text(figures: StepFigures, profile: str, refined: float | None = None) -> str:
    """Whole step, phases, collectives: predicted, measured, and predicted / measured.

    profile: what the prediction was made with, as printed. refined: seconds of the step by what was timed of the plan;
    None: nothing was.
    """
    steps = f"{figures.steps} step{'s' if figures.steps > 1 else ''}"
    ranks = f"{figures.ranks} rank{'s' if figures.ranks > 1 else ''}"
    lines = [
        f"{steps} after {figures.warmup} of warm-up, {ranks}; prices of {profile}",
        "",
        _ROW.format("", "predicted", "measured", "ratio"),
        _row("step", figures.predicted, figures.seconds),
        *([] if refined is None else [_row("  refined, as planned", refined, figures.seconds)]),
    ]
    for phase in figures.phases:
        lines.append(_row(f"  {phase.name}", phase.predicted, phase.seconds))
        alone = [c for c in figures.collectives if c.predicted.phase == phase.name]
        if alone and phase.compute is not None:
            lines.append(_row("    compute", phase.predicted_compute, phase.compute))
            predicted = sum(c.predicted.times * c.predicted.seconds for c in alone)
            lines.append(_row("    communication, alone", predicted, _seconds(alone)))
    if figures.exposed is not None:
        lines.append(_row("exposed communication", figures.exposed.predicted, figures.exposed.measured))
    lines += [*_memory(figures), "", *_collectives(figures), *_tracks(figures)]
    return "\n".join(lines) + "\n"


def _memory(figures: StepFigures) -> Iterator[str]:
    peak = figures.peak_memory
    if peak is not None:
        for name, one in (("peak memory", peak), *((f"  {one.phase}", one) for one in figures.memory)):
            predicted = "-" if one.predicted is None else format_bytes(one.predicted)
            ratio = "-" if one.predicted is None else f"{one.predicted / max(1, one.measured):.2f}"
            yield _ROW.format(name, predicted, format_bytes(one.measured), ratio)


def _collectives(figures: StepFigures) -> Iterator[str]:
    """One line for all that move the same bytes in the same way, the costliest first; each alone."""
    if not figures.collectives:
        yield "collectives: none"
        return
    yield _ROW.format("collectives, each alone", "predicted", "measured", "ratio")
    rows: dict[tuple[str, str, str, int], list[MeasuredCollective]] = {}
    for c in figures.collectives:
        p = c.predicted
        rows.setdefault((p.phase, p.kind, ",".join(p.axes), p.nbytes), []).append(c)
    for key, members in sorted(rows.items(), key=lambda item: -_seconds(item[1])):
        phase, kind, axes, nbytes = key
        times = sum(c.predicted.times for c in members)
        name = f"  {phase} {kind}[{axes}] {format_bytes(nbytes)} x{times}"
        yield _row(name, members[0].predicted.seconds, statistics.median(c.seconds for c in members))


def _seconds(collectives: Sequence[MeasuredCollective]) -> float:
    """Seconds of all of them in a step."""
    return sum(c.predicted.times * c.seconds for c in collectives)


def _tracks(figures: StepFigures) -> Iterator[str]:
    """Starts and ends, of the first so many."""
    if not figures.tracks:
        return
    yield ""
    yield _ROW.format("collectives in a step, start to end", "predicted", "measured", "")
    for number, track in enumerate(figures.tracks[:_SHOWN], 1):
        p = track.predicted
        name = f"  {number} {p.phase} {p.kind}[{','.join(p.axes)}] {p.serves}"
        yield f"{name[:46]:46} {_span(p.start, p.end):>19} {_span(track.start, track.end):>19}"
    if len(figures.tracks) > _SHOWN:
        yield f"  and {len(figures.tracks) - _SHOWN} more: report.figures.tracks, report.draw(path)"


def _span(start: float, end: float) -> str:
    return f"{format_seconds(start)} - {format_seconds(end)}"


def _row(name: str, predicted: float | None, measured: float) -> str:
    first = "-" if predicted is None else format_seconds(predicted)
    ratio = "-" if not predicted or not measured else f"{predicted / measured:.2f}"
    return _ROW.format(name, first, format_seconds(measured), ratio)


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
