"""The bytes of a step as a small curve: forward, then backward, its peak marked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import networkx as nx

CURVE_HEIGHT = 40.0
"""Pixels that a drawing's header is higher where there is a curve."""
_WIDTH, _TALL = 260.0, 30.0


@dataclass(frozen=True)
class MemoryCurve:
    """points: (step, bytes), ascending. backward: the first step of it, None where there is none. text: the peak's."""

    points: tuple[tuple[int, int], ...]
    backward: int | None
    text: str


def curve_of(graph: nx.DiGraph) -> MemoryCurve | None:
    """Of a plan's graph (see `plan_graph`); None where it says nothing of memory."""
    data = graph.graph
    if not data.get("memory"):
        return None
    pairs = (point.split(" ") for point in str(data["memory"]).split("; "))
    points = tuple((int(place), int(nbytes)) for place, nbytes in pairs)
    return MemoryCurve(points, data.get("memory_backward"), str(data.get("memory_peak", "")))


def curve_svg(curve: MemoryCurve, left: float, top: float) -> Iterator[str]:
    """An area, a line where the backward begins, and a dot on the peak."""
    text = escape(curve.text)
    most = max(1, *(nbytes for _, nbytes in curve.points))
    last = max(1, curve.points[-1][0])
    at = lambda place, nbytes: (left + _WIDTH * place / last, top + _TALL * (1.0 - nbytes / most))
    corners = [at(place, nbytes) for place, nbytes in curve.points]
    line = " L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    bottom = top + _TALL
    yield (
        f'<path class="memory" d="M{corners[0][0]:.1f} {bottom:.1f} L{line} '
        f'L{corners[-1][0]:.1f} {bottom:.1f} z"><title>bytes of a step: {text}</title></path>'
    )
    if curve.backward is not None:
        x, _ = at(curve.backward, 0)
        yield f'<line class="turn" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
    x, y = max(zip(curve.points, corners, strict=True), key=lambda pair: pair[0][1])[1]
    yield f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
    yield f'<text class="right" x="{left + _WIDTH + 12:.1f}" y="{top + 12:.1f}">{text}</text>'
