"""A report as a page of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

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


def track_svg(figures: StepFigures) -> str:
    """Both on one axis of seconds since the forward began; a collective has the same number in both. What is in
    flight at once stands in lanes."""
    from autoshard.drawing.draw import rows_svg
    from autoshard.drawing.timeline_svg import Bar
    from autoshard.plan.plan_graph import colour

    tracks, rows = figures.tracks, list[tuple[str, list[Bar]]]()
    kinds = [t.predicted.kind for t in tracks]
    predicted = [(t.predicted.start, t.predicted.end) for t in tracks]
    measured = [(t.start, t.end) for t in tracks]
    for name, spans in (("predicted", predicted), ("measured", measured)):
        lanes: list[list[Bar]] = []
        for number, (kind, span) in enumerate(zip(kinds, spans, strict=True), 1):
            lane = next((lane for lane in lanes if lane[-1].end <= span[0]), None)
            if lane is None:
                lanes.append(lane := [])
            lane.append(Bar(*span, colour(kind), f"{number} {kind}", str(number)))
        rows += [("" if place else name, lane) for place, lane in enumerate(lanes)]
    legend = {kind: colour(kind) for kind in kinds}
    if (exposed := figures.exposed) is not None:
        before, after = format_seconds(exposed.predicted), format_seconds(exposed.measured)
        legend[f"exposed: predicted {before}, measured {after}"] = "none"
    return rows_svg(rows, max(end for _, end in (*predicted, *measured)), legend)
