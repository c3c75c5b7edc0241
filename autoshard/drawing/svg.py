"""A plan as a picture: boxes and edges with coordinates, and the size of the whole, in one SVG text (no graphviz)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import networkx as nx

from autoshard.drawing.boxes import (
    CHAR_WIDTH,
    LINE_HEIGHT,
    PADDING,
    Box,
    Column,
    Line,
    assign_rows,
    make_box,
    place_column,
)
from autoshard.drawing.drawn_groups import Grouping, fold_repeats, group_by_module
from autoshard.plan.plan_graph import Total, collectives, colour
from cost_model.memory import format_bytes, format_seconds

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


_MARGIN = 28.0
HEADER = 124.0
ROW_GAP = 34.0
PHASE_GAP = 130.0

Point = tuple[float, float]


@dataclass(frozen=True)
class _PlacedBox:
    """left, top: of the box, in pixels."""

    box: Box
    left: float
    top: float

    @property
    def centre(self) -> float:
        return self.left + self.box.width / 2


@dataclass(frozen=True)
class _DrawnEdge:
    """points: from one box through lanes to the other. collective: of the values passed, the kind of
    the first collective, or "". saved: from forward to backward."""

    source: int
    target: int
    points: tuple[Point, ...]
    collective: str
    saved: bool


@dataclass(frozen=True)
class _Scene:
    """mesh: title. op_seconds, totals: of the whole graph, folded layers included.
    phases: (name, left, right) of each phase that has boxes.
    header: the height above the boxes. memory: the curve in it, if there is one."""

    mesh: str
    op_seconds: float
    totals: tuple[Total, ...]
    boxes: dict[int, _PlacedBox]
    edges: tuple[_DrawnEdge, ...]
    phases: tuple[tuple[str, float, float], ...]
    width: float
    height: float
    header: float = HEADER
    memory: MemoryCurve | None = None


def make_scene(graph: nx.DiGraph) -> _Scene:
    """Fold, group and place the graph of a plan."""
    folded = fold_repeats(graph)
    grouping = group_by_module(folded)
    edges = grouping.edges(folded)
    rows = assign_rows(grouping.groups, edges)
    op_seconds = float(sum(data["seconds"] for _, data in graph.nodes(data=True)))
    boxes = [make_box(folded, grouping, group, op_seconds) for group in grouping.groups]
    memory = curve_of(graph)
    # Pixels that a drawing's header is higher where there is a curve.
    header = HEADER if memory is None else HEADER + 40.0
    tops, bottom = _row_tops(boxes, rows, header)

    placed: dict[int, _PlacedBox] = {}
    lanes: dict[tuple[int, int], list[Point]] = {}
    phases: list[tuple[str, float, float]] = []
    left = _MARGIN
    for phase in ("forward", "backward"):
        column = _column(boxes, rows, edges, phase)
        if not column.centre:
            continue
        shift = left - column.left
        for index, x in column.centre.items():
            placed[index] = _PlacedBox(boxes[index], x + shift - boxes[index].width / 2, tops[rows[index]])
        for edge, points in column.lanes.items():
            lanes[edge] = [(x + shift, tops[row]) for row, x in points]
        phases.append((phase, left, column.right + shift))
        left = column.right + shift + PHASE_GAP
    width = max(left - PHASE_GAP + _MARGIN, 760.0)
    drawn = tuple(_edge(folded, grouping, placed, lanes, edge) for edge in edges)
    return _Scene(
        mesh=str(graph.graph.get("mesh", "")),
        op_seconds=op_seconds,
        totals=tuple(totals(graph)),
        boxes=placed,
        edges=drawn,
        phases=tuple(phases),
        width=width,
        height=bottom + _MARGIN,
        header=header,
        memory=memory,
    )


def _row_tops(boxes: list[Box], rows: list[int], header: float) -> tuple[list[float], float]:
    heights = [0.0] * (1 + max(rows, default=0))
    for box, row in zip(boxes, rows, strict=True):
        heights[row] = max(heights[row], box.height)
    tops, y = [], header
    for height in heights:
        tops.append(y)
        y += height + ROW_GAP
    return tops, y - ROW_GAP


def _column(boxes: list[Box], rows: list[int], edges: list[tuple[int, int]], phase: str) -> Column:
    inside = {box.group.index for box in boxes if box.group.phase == phase}
    downward = [
        edge if phase == "forward" else (edge[1], edge[0])
        for edge in edges
        if edge[0] in inside and edge[1] in inside
    ]
    return place_column(
        {index: rows[index] for index in sorted(inside)}, {i: boxes[i].width for i in inside}, downward
    )


def _edge(
    graph: nx.DiGraph,
    grouping: Grouping,
    placed: dict[int, _PlacedBox],
    lanes: dict[tuple[int, int], list[Point]],
    edge: tuple[int, int],
) -> _DrawnEdge:
    source, target = (placed[index] for index in edge)
    collective = _first_collective(graph, grouping, edge)
    if source.box.group.phase != target.box.group.phase:
        points = (
            (source.left + source.box.width, source.top + 14),
            (target.left, target.top + 14),
        )
        return _DrawnEdge(*edge, points, collective, saved=True)
    if source.box.group.phase == "forward":
        middle = [point for x, y in lanes.get(edge, []) for point in ((x, y), (x, y + 24))]
        ends = (source.centre, source.top + source.box.height), (target.centre, target.top)
    else:
        middle = [p for x, y in reversed(lanes.get((edge[1], edge[0]), [])) for p in ((x, y + 24), (x, y))]
        ends = (source.centre, source.top), (target.centre, target.top + target.box.height)
    return _DrawnEdge(*edge, (ends[0], *middle, ends[1]), collective, saved=False)


def _first_collective(graph: nx.DiGraph, grouping: Grouping, edge: tuple[int, int]) -> str:
    for node in grouping.groups[edge[1]].members:
        for source, _, data in graph.in_edges(node, data=True):
            if grouping.of.get(source) == edge[0]:
                for moved in collectives(data):
                    return moved.kind
    return ""


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
            _edge_svg(edge)
            for edge in sorted(scene.edges, key=lambda edge: (not edge.saved, bool(edge.collective)))
        ),
        *_header(scene),
        *(part for box in scene.boxes.values() for part in _box(box)),
    ]
    return svg_page(scene.width, scene.height, parts)


def _arrow_heads(scene: _Scene) -> Iterator[str]:
    colours = {"#9aa3b2", *(colour(edge.collective) for edge in scene.edges if edge.collective)}
    yield "<defs>"
    for tint in sorted(colours):
        yield (
            f'<marker id="arrow-{tint[1:]}" viewBox="0 0 8 8" refX="7" refY="4" orient="auto" '
            f'markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse">'
            f'<path d="M0 0.5 L8 4 L0 7.5 z" fill="{tint}"/></marker>'
        )
    yield "</defs>"


def _header(scene: _Scene) -> Iterator[str]:
    moved = sum(total.seconds for total in scene.totals)
    summary = f"{format_seconds(scene.op_seconds)} compute + {format_seconds(moved)} communication"
    yield _text(_MARGIN, 34, scene.mesh or "plan", "head")
    yield _text(_MARGIN + 12 + 10.4 * len(scene.mesh or "plan"), 34, summary, "right")
    yield from _legend(scene)
    if scene.memory is not None:
        yield _text(_MARGIN, 106, "memory", "right")
        yield from curve_svg(scene.memory, _MARGIN + CHAR_WIDTH * 10, 94)
    for phase, left, right in scene.phases:
        direction = "forward ↓" if phase == "forward" else "backward ↑"
        yield _text((left + right) / 2 - 36, scene.header - 14, direction, "phase")


def _legend(scene: _Scene) -> Iterator[str]:
    """A chip and the totals of every kind of collective: forward on one line, backward on the next."""
    left, line = {"forward": _MARGIN, "backward": _MARGIN}, {"forward": 58, "backward": 78}
    for total in scene.totals:
        x, y = left[total.phase], line[total.phase]
        if x == _MARGIN:
            yield _text(x, y, total.phase, "right")
            x += CHAR_WIDTH * 10
        price = f"×{total.count} {format_bytes(total.nbytes)} {format_seconds(total.seconds)}"
        yield _chip(x, y, total.kind, colour(total.kind))
        x += CHAR_WIDTH * (len(total.kind) + 2) + 6
        yield _text(x, y, price, "right")
        left[total.phase] = x + CHAR_WIDTH * len(price) + 18
    if max(left.values()) == _MARGIN:
        yield _text(_MARGIN, 58, "no collectives", "right")


def _box(placed: _PlacedBox) -> Iterator[str]:
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


def _edge_svg(edge: _DrawnEdge) -> str:
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


def totals(graph: nx.DiGraph) -> list[Total]:
    """One total per (kind, phase), forward first.

    What brings a gradient to the graph's end belongs to the phase that computed it.
    """
    found: dict[tuple[str, str], Total] = {}
    for source, reader, edge in graph.edges(data=True):
        end = source if graph.nodes[reader].get("kind") == "output" else reader
        phase = graph.nodes[end]["phase"]
        for moved in collectives(edge):
            kind = moved.kind
            old = found.get((phase, kind), Total(kind, phase, 0, 0, 0.0))
            new = Total(kind, phase, old.count + 1, old.nbytes + moved.nbytes, old.seconds + moved.seconds)
            found[phase, kind] = new
    return [found[key] for key in sorted(found, key=lambda key: (key[0] != "forward", key[1]))]
