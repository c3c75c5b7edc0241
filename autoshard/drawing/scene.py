"""Everything that a drawing shows, with coordinates: boxes, edges, and the size of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import networkx as nx

from autoshard.drawing.boxes import Box, make_box
from autoshard.drawing.drawn_groups import Grouping, fold_repeats, group_by_module
from autoshard.drawing.placing import Column, assign_rows, place_column
from autoshard.plan.plan_graph import Total, collectives, totals

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


MARGIN = 28.0
HEADER = 124.0
ROW_GAP = 34.0
PHASE_GAP = 130.0

Point = tuple[float, float]


@dataclass(frozen=True)
class PlacedBox:
    """left, top: of the box, in pixels."""

    box: Box
    left: float
    top: float

    @property
    def centre(self) -> float:
        return self.left + self.box.width / 2


@dataclass(frozen=True)
class DrawnEdge:
    """points: from one box through lanes to the other. collective: of the values passed, the kind of
    the first collective, or "". saved: from forward to backward."""

    source: int
    target: int
    points: tuple[Point, ...]
    collective: str
    saved: bool


@dataclass(frozen=True)
class Scene:
    """mesh: title. op_seconds, totals: of the whole graph, folded layers included.
    phases: (name, left, right) of each phase that has boxes.
    header: the height above the boxes. memory: the curve in it, if there is one."""

    mesh: str
    op_seconds: float
    totals: tuple[Total, ...]
    boxes: dict[int, PlacedBox]
    edges: tuple[DrawnEdge, ...]
    phases: tuple[tuple[str, float, float], ...]
    width: float
    height: float
    header: float = HEADER
    memory: MemoryCurve | None = None


def make_scene(graph: nx.DiGraph) -> Scene:
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

    placed: dict[int, PlacedBox] = {}
    lanes: dict[tuple[int, int], list[Point]] = {}
    phases: list[tuple[str, float, float]] = []
    left = MARGIN
    for phase in ("forward", "backward"):
        column = _column(boxes, rows, edges, phase)
        if not column.centre:
            continue
        shift = left - column.left
        for index, x in column.centre.items():
            placed[index] = PlacedBox(boxes[index], x + shift - boxes[index].width / 2, tops[rows[index]])
        for edge, points in column.lanes.items():
            lanes[edge] = [(x + shift, tops[row]) for row, x in points]
        phases.append((phase, left, column.right + shift))
        left = column.right + shift + PHASE_GAP
    width = max(left - PHASE_GAP + MARGIN, 760.0)
    drawn = tuple(_edge(folded, grouping, placed, lanes, edge) for edge in edges)
    return Scene(
        mesh=str(graph.graph.get("mesh", "")),
        op_seconds=op_seconds,
        totals=tuple(totals(graph)),
        boxes=placed,
        edges=drawn,
        phases=tuple(phases),
        width=width,
        height=bottom + MARGIN,
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
    placed: dict[int, PlacedBox],
    lanes: dict[tuple[int, int], list[Point]],
    edge: tuple[int, int],
) -> DrawnEdge:
    source, target = (placed[index] for index in edge)
    collective = _first_collective(graph, grouping, edge)
    if source.box.group.phase != target.box.group.phase:
        points = (
            (source.left + source.box.width, source.top + 14),
            (target.left, target.top + 14),
        )
        return DrawnEdge(*edge, points, collective, saved=True)
    if source.box.group.phase == "forward":
        middle = [point for x, y in lanes.get(edge, []) for point in ((x, y), (x, y + 24))]
        ends = (source.centre, source.top + source.box.height), (target.centre, target.top)
    else:
        middle = [p for x, y in reversed(lanes.get((edge[1], edge[0]), [])) for p in ((x, y + 24), (x, y))]
        ends = (source.centre, source.top), (target.centre, target.top + target.box.height)
    return DrawnEdge(*edge, (ends[0], *middle, ends[1]), collective, saved=False)


def _first_collective(graph: nx.DiGraph, grouping: Grouping, edge: tuple[int, int]) -> str:
    for node in grouping.groups[edge[1]].members:
        for source, _, data in graph.in_edges(node, data=True):
            if grouping.of.get(source) == edge[0]:
                for moved in collectives(data):
                    return moved.kind
    return ""
