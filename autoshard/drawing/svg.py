"""A plan as a picture: one SVG text, drawn without graphviz."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

import networkx as nx

from autoshard.drawing.boxes import CHAR_WIDTH, LINE_HEIGHT, PADDING, Line
from autoshard.drawing.scene import MARGIN, DrawnEdge, PlacedBox, Scene, curve_svg, make_scene
from autoshard.plan.plan_graph import colour
from cost_model.memory import format_bytes, format_seconds

STYLE = """
text { font: 11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #1f2937; }
.head { font-size: 17px; font-weight: 600; }
.phase { font-size: 13px; font-weight: 600; fill: #6b7280; }
.title { font-weight: 700; }
.ops, .right { fill: #6b7280; }
.param { fill: #3730a3; }
.result { fill: #374151; }
.chip { fill: #ffffff; font-weight: 600; }
.frame { stroke-width: 1; }
.forward .frame { fill: #f5f9ff; stroke: #a9c1e8; }
.backward .frame { fill: #fffaf2; stroke: #e3c391; }
.forward .bar { fill: #5b8def; }
.backward .bar { fill: #e19a38; }
.edge { fill: none; stroke: #9aa3b2; stroke-width: 1.2; }
.memory { fill: #dfe6f3; stroke: #7c8aa5; stroke-width: 1; }
.turn { stroke: #e19a38; stroke-width: 1; stroke-dasharray: 2 2; }
.peak { fill: #c2544d; }
.saved { fill: none; stroke: #b8a4d8; stroke-width: 1; stroke-dasharray: 3 4; opacity: 0.55; }
""".strip()


WHITE = '<rect width="100%" height="100%" fill="#ffffff"/>'


def svg_page(width: float, height: float, parts: Iterable[str], *, style: str = "") -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f"<style>{STYLE}{style}</style>", *parts, "</svg>"]) + "\n"


def svg_text(graph: nx.DiGraph) -> str:
    """The graph of a plan (see `plan_graph`): forward down the left, backward up the right, a module's
    two boxes side by side, repeated layers folded, collectives coloured by kind."""
    scene = make_scene(graph)
    parts = [
        *_arrow_heads(scene),
        WHITE,
        *(
            _edge(edge)
            for edge in sorted(scene.edges, key=lambda edge: (not edge.saved, bool(edge.collective)))
        ),
        *_header(scene),
        *(part for box in scene.boxes.values() for part in _box(box)),
    ]
    return svg_page(scene.width, scene.height, parts)


def _arrow_heads(scene: Scene) -> Iterator[str]:
    colours = {"#9aa3b2", *(colour(edge.collective) for edge in scene.edges if edge.collective)}
    yield "<defs>"
    for tint in sorted(colours):
        yield (
            f'<marker id="arrow-{tint[1:]}" viewBox="0 0 8 8" refX="7" refY="4" orient="auto" '
            f'markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse">'
            f'<path d="M0 0.5 L8 4 L0 7.5 z" fill="{tint}"/></marker>'
        )
    yield "</defs>"


def _header(scene: Scene) -> Iterator[str]:
    moved = sum(total.seconds for total in scene.totals)
    summary = f"{format_seconds(scene.op_seconds)} compute + {format_seconds(moved)} communication"
    yield _text(MARGIN, 34, scene.mesh or "plan", "head")
    yield _text(MARGIN + 12 + 10.4 * len(scene.mesh or "plan"), 34, summary, "right")
    yield from _legend(scene)
    if scene.memory is not None:
        yield _text(MARGIN, 106, "memory", "right")
        yield from curve_svg(scene.memory, MARGIN + CHAR_WIDTH * 10, 94)
    for phase, left, right in scene.phases:
        direction = "forward ↓" if phase == "forward" else "backward ↑"
        yield _text((left + right) / 2 - 36, scene.header - 14, direction, "phase")


def _legend(scene: Scene) -> Iterator[str]:
    """A chip and the totals of every kind of collective: forward on one line, backward on the next."""
    left, line = {"forward": MARGIN, "backward": MARGIN}, {"forward": 58, "backward": 78}
    for total in scene.totals:
        x, y = left[total.phase], line[total.phase]
        if x == MARGIN:
            yield _text(x, y, total.phase, "right")
            x += CHAR_WIDTH * 10
        price = f"×{total.count} {format_bytes(total.nbytes)} {format_seconds(total.seconds)}"
        yield _chip(x, y, total.kind, colour(total.kind))
        x += CHAR_WIDTH * (len(total.kind) + 2) + 6
        yield _text(x, y, price, "right")
        left[total.phase] = x + CHAR_WIDTH * len(price) + 18
    if max(left.values()) == MARGIN:
        yield _text(MARGIN, 58, "no collectives", "right")


def _box(placed: PlacedBox) -> Iterator[str]:
    box = placed.box
    yield f'<g class="box {box.group.phase}">'
    yield f"<title>{escape(box.tooltip)}</title>"
    frame = f'x="{placed.left:.1f}" y="{placed.top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
    yield f'<rect class="frame" {frame} rx="5"/>'
    if box.share >= 0.005:  # the part of the step's compute that this box is
        yield (
            f'<rect class="bar" x="{placed.left + 1:.1f}" y="{placed.top + box.height - 3.5:.1f}" '
            f'width="{max(2.0, (box.width - 2) * box.share):.1f}" height="2.5" rx="1"/>'
        )
    for row, line in enumerate(box.lines):
        baseline = placed.top + PADDING + LINE_HEIGHT * row + 10
        yield from _line(line, placed.left + PADDING, placed.left + box.width - PADDING, baseline)
    yield "</g>"


def _line(line: Line, left: float, right: float, baseline: float) -> Iterator[str]:
    if line.kind == "chip":
        yield _chip(left, baseline, line.left, line.colour)
    else:
        yield _text(left, baseline, line.left, line.kind)
    if line.right:
        yield _text(right, baseline, line.right, "right", anchor="end")


def _chip(x: float, baseline: float, text: str, tint: str) -> str:
    width = CHAR_WIDTH * (len(text) + 2)
    return (
        f'<rect x="{x:.1f}" y="{baseline - 10.5:.1f}" width="{width:.1f}" height="14" rx="7" fill="{tint}"/>'
        + _text(x + CHAR_WIDTH, baseline, text, "chip")
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    end = ' text-anchor="end"' if anchor == "end" else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{end}>{escape(text)}</text>'


def _edge(edge: DrawnEdge) -> str:
    tint = colour(edge.collective) if edge.collective else "#9aa3b2"
    paint = f'style="stroke:{tint};stroke-width:2.2;opacity:1"' if edge.collective else ""
    if edge.saved:
        (x0, y0), (x1, y1) = edge.points[0], edge.points[-1]
        bend = max(40.0, (x1 - x0) / 2)
        path = f"M{x0:.1f} {y0:.1f} C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
        return f'<path class="saved" {paint} d="{path}"/>'
    path = f"M{edge.points[0][0]:.1f} {edge.points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in zip(edge.points, edge.points[1:], strict=False):
        if x0 == x1:
            path += f" L{x1:.1f} {y1:.1f}"
        else:
            middle = (y0 + y1) / 2
            path += f" C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    return f'<path class="edge" {paint} marker-end="url(#arrow-{tint[1:]})" d="{path}"/>'
