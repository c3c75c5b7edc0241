"""The race as SVG pictures; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.racing.results import Result

__all__ = ["draw_predictions", "draw_steps"]

COLOURS = {
    "autoshard": "#d62728",
    "DDP": "#1f77b4",
    "FSDP2": "#17becf",
    "HSDP": "#9edae5",
    "TP": "#2ca02c",
    "TP + SP": "#98df8a",
    "FSDP2 x TP": "#9467bd",
}


def draw_steps(results: Sequence[Result], path: Path) -> None:
    """Bars of each contestant's median step over the best hand-written one's, by scenario; whiskers: quartiles."""
    plt = _pyplot()
    results = [result for result in results if result.best_hand_written]
    figure, axes = plt.subplots(figsize=(1.4 + 1.1 * len(results), 4.2))
    width = 0.8 / len(COLOURS)
    for position, (name, colour) in enumerate(COLOURS.items()):
        for place, result in enumerate(results):
            entry = next((e for e in result.entries if e.name == name and result.ranked(e)), None)
            if entry is None:
                continue
            best = result.best_hand_written.median  # type: ignore[union-attr]
            low, high = (abs(value - entry.median) / best for value in entry.quartiles)
            axes.bar(
                place + (position - len(COLOURS) / 2 + 0.5) * width,
                entry.median / best,
                width,
                yerr=[[low], [high]],
                error_kw={"elinewidth": 0.7},
                color=colour,
                label=name if name not in axes.get_legend_handles_labels()[1] else None,
            )
    axes.axhline(1.0, color="black", linewidth=0.7)
    axes.set_xticks(range(len(results)), [r.scenario for r in results], rotation=30, ha="right")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_ylabel("step / best hand-written")
    axes.legend(fontsize=7, ncols=3)
    _save(figure, path)


def draw_predictions(results: Sequence[Result], path: Path) -> None:
    """Predicted against measured step of every planned contestant; the band is 10%."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(4.6, 4.4))
    styles = {"autoshard": ("o", "#d62728"), "pinned": ("x", "#7f7f7f")}
    ends: list[float] = []
    for kind, (marker, colour) in styles.items():
        points = [(e.median, e.predicted) for r in results for e in r.entries if e.kind == kind and e.seconds]
        points = [(x, y) for x, y in points if y]
        ends += [value for point in points for value in point]
        axes.scatter(*zip(*points, strict=True), marker=marker, color=colour, label=kind) if points else None
    if ends:
        span = [0.8 * min(ends), 1.25 * max(ends)]
        axes.plot(span, span, color="black", linewidth=0.7)
        axes.fill_between(span, [0.9 * x for x in span], [1.1 * x for x in span], alpha=0.15, color="black")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured step (s)")
    axes.set_ylabel("predicted step (s)")
    axes.legend(fontsize=8)
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same file: no date, no random ids.
    matplotlib.rcParams["svg.hashsalt"] = "race"
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
