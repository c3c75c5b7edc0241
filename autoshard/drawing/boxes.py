"""Boxes of a drawing: what is written in them (title, collectives, parameters, ops and results of a group), in which
row they stand, and where in the row.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import networkx as nx
import numpy as np
from scipy.optimize import isotonic_regression, linprog
from scipy.sparse import coo_array

from autoshard.drawing.drawn_groups import OWN_BOX, Group, Grouping
from autoshard.plan.plan_graph import Moved, collectives, colour, price
from cost_model.memory import format_seconds

CHAR_WIDTH = 6.7  # of the 11 px monospace font that the lines are set in
LINE_HEIGHT = 16.0
PADDING = 9.0
MOST_CHARS = 58
MOST_TOOLTIP = 40

LineKind = Literal["title", "chip", "param", "ops", "result"]


@dataclass(frozen=True)
class Line:
    """left is set flush left, right flush right. A chip has `left` on a background of `colour`."""

    kind: LineKind
    left: str
    right: str = ""
    colour: str = ""

    @property
    def chars(self) -> int:
        return len(self.left) + (2 + len(self.right) if self.right else 0) + (2 if self.kind == "chip" else 0)


@dataclass(frozen=True)
class Box:
    """One group drawn. share: seconds of its ops as a part of the whole step's; tooltip: all ops."""

    group: Group
    lines: tuple[Line, ...]
    tooltip: str
    share: float

    @property
    def width(self) -> float:
        return 2 * PADDING + CHAR_WIDTH * max(line.chars for line in self.lines)

    @property
    def height(self) -> float:
        return 2 * PADDING + LINE_HEIGHT * len(self.lines) - 4


def make_box(graph: nx.DiGraph, grouping: Grouping, group: Group, op_seconds: float) -> Box:
    """The box of `group`; op_seconds: all ops of the graph together, to say what part these are."""
    repeat = graph.nodes[group.members[0]].get("repeat", 1)
    seconds = sum(graph.nodes[node]["seconds"] for node in group.members)
    lines = [
        _title(graph, group, seconds, repeat),
        *_chips(graph, grouping, group),
        *_few([_held(graph, node) for node in group.holds]),
        *_ops(graph, group),
        *_few([Line("result", "→ " + _short(layout)) for layout in _results(graph, grouping, group)], most=3),
    ]
    share = seconds * repeat / op_seconds if op_seconds > 0 else 0.0
    return Box(group, tuple(lines), _tooltip(graph, group), share)


def _title(graph: nx.DiGraph, group: Group, seconds: float, repeat: int) -> Line:
    first = graph.nodes[group.members[0]]
    name = first["module"] if len(group.members) == 1 else group.key
    if first["kind"] in OWN_BOX:
        name = f"{first['kind']} {first['label'].removeprefix(first['kind'] + ' ')}"
        name = name if len(group.members) == 1 else f"{len(group.members)} {first['kind']}s"
    times = f"{repeat} × " if repeat > 1 else ""
    alone = format_seconds(seconds) if seconds > 0 else ""
    return Line("title", _short(name) or "(model)", (times + alone).removesuffix("× "))


def _chips(graph: nx.DiGraph, grouping: Grouping, group: Group) -> list[Line]:
    """The collectives in front of the group's ops, and those that bring its results to the graph's end."""
    found: dict[tuple[str, str], list[Moved]] = {}
    for node in group.members:
        reads = [(_value_name(graph, source), edge) for source, _, edge in graph.in_edges(node, data=True)]
        ends = [("result", e) for _, end, e in graph.out_edges(node, data=True) if end not in grouping.of]
        for value, edge in [*reads, *ends]:
            for moved in collectives(edge):
                found.setdefault((f"{moved.kind}[{moved.axes}]", value), []).append(moved)
    return _few([_chip(text, value, moves) for (text, value), moves in found.items()])


def _chip(text: str, value: str, moves: list[Moved]) -> Line:
    times = f" ×{len(moves)}" if len(moves) > 1 else ""
    return Line("chip", text + times, f"{value} {price(moves)}".strip(), colour(moves[0].kind))


def _value_name(graph: nx.DiGraph, source: str) -> str:
    data = graph.nodes[source]
    return data["label"].rpartition(".")[2] if data["kind"] in ("param", "buffer") else ""


def _held(graph: nx.DiGraph, node: str) -> Line:
    data = graph.nodes[node]
    name = data["label"].rpartition(".")[2] if data["kind"] in ("param", "buffer") else data["label"]
    return Line("param", _short(f"{name}: {data['layout']}"))


def _ops(graph: nx.DiGraph, group: Group) -> list[Line]:
    """The ops, repeats counted, on as many lines as they need (at most 3)."""
    if graph.nodes[group.members[0]]["kind"] in OWN_BOX:
        return []
    names = [
        _op_name(graph.nodes[node]["label"]) for node in group.members if graph.nodes[node]["kind"] == "op"
    ]
    counted = [name if count == 1 else f"{count} {name}" for name, count in Counter(names).items()]
    lines, line = [], ""
    for text in counted:
        joined = f"{line} · {text}" if line else text
        if len(joined) > MOST_CHARS - 10 and line:
            lines.append(line + " ·")
            joined = text
        line = joined
    if line:
        lines.append(line)
    shown = lines if len(lines) <= 3 else [*lines[:2], f"{lines[2]} …"]
    return [Line("ops", _short(text)) for text in shown]


def _op_name(label: str) -> str:
    """ "sum" of "aten.sum.dim_IntList"."""
    return label.removeprefix("aten.").partition(".")[0]


def _results(graph: nx.DiGraph, grouping: Grouping, group: Group) -> list[str]:
    """Layouts of the values that leave the group."""
    leaving = (
        graph.nodes[node]["layout"]
        for node in group.members
        if any(grouping.of.get(reader) != group.index for reader in graph.succ[node])
    )
    return [layout for layout in dict.fromkeys(leaving) if layout]


def _few(lines: list[Line], most: int = 9) -> list[Line]:
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], Line("ops", f"… and {len(lines) - most + 1} more")]


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 1] + "…"


def _tooltip(graph: nx.DiGraph, group: Group) -> str:
    lines: list[str] = []
    for node in [*group.holds, *group.members]:
        data = graph.nodes[node]
        seconds = f"  {format_seconds(data['seconds'])}" if data["seconds"] > 0 else ""
        lines.append(f"{node}: {data['layout']} = {data['label']}{seconds}")
        for source, _, edge in graph.in_edges(node, data=True):
            if edge["collective"]:
                lines.append(f"    {source} through {edge['collective']}: {price(collectives(edge))}")
    if len(lines) > MOST_TOOLTIP:
        lines = [*lines[:MOST_TOOLTIP], f"… and {len(lines) - MOST_TOOLTIP} more lines"]
    sources = sorted({str(graph.nodes[node].get("source", "")) for node in group.members} - {""})
    return "\n".join([*lines, *sources[:3]])


@dataclass
class _Program:
    """minimise cost @ x subject to: for each constraint, the sum of its terms is at most its bound."""

    cost: list[float]
    entries: list[tuple[int, int, float]] = field(default_factory=list)  # (constraint, variable, factor)
    bounds: list[float] = field(default_factory=list)

    def at_most(self, bound: float, *terms: tuple[int, float]) -> None:
        self.entries += [(len(self.bounds), variable, factor) for variable, factor in terms]
        self.bounds.append(bound)

    def solve(self) -> list[float]:
        if not self.bounds:
            return [0.0] * len(self.cost)
        rows, columns, factors = zip(*self.entries, strict=True)
        matrix = coo_array((factors, (rows, columns)), shape=(len(self.bounds), len(self.cost)))
        answer = linprog(
            np.array(self.cost), A_ub=matrix.tocsr(), b_ub=np.array(self.bounds), method="highs-ds"
        )
        assert answer.status == 0, answer.message
        return answer.x.tolist()


def assign_rows(groups: Sequence[Group], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Row of every group, 0 at the top.

    A forward group is below all it reads, a backward group above all it reads. Among the rows that
    keep this the sum of edge lengths is least, and modules have forward and backward side by side
    (a difference costs like four rows of an edge). The program is the dual of a network flow, so its
    vertices, and with them the rows, are whole numbers.
    """
    program = _Program([0.0] * len(groups))
    for source, target in edges:
        if groups[source].phase == groups[target].phase:
            upper, lower = (source, target) if groups[source].phase == "forward" else (target, source)
            program.at_most(-1.0, (upper, 1.0), (lower, -1.0))
            program.cost[upper] -= 1.0
            program.cost[lower] += 1.0
        else:
            # a forward value in the row of the backward op that reads it
            _pull_together(program, source, target, 0.2)
    for forward, backward in _pairs(groups):
        # a module's forward and backward in one row, against the length of one edge
        _pull_together(program, forward, backward, 4.0)
    rows = [round(value) for value in program.solve()[: len(groups)]]
    top = min(rows, default=0)
    return [row - top for row in rows]


def _pull_together(program: _Program, first: int, second: int, weight: float) -> None:
    """Add weight * |row of first - row of second| to the cost."""
    distance = len(program.cost)
    program.cost.append(weight)
    program.at_most(0.0, (first, 1.0), (second, -1.0), (distance, -1.0))
    program.at_most(0.0, (second, 1.0), (first, -1.0), (distance, -1.0))


def _pairs(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """(forward, backward) groups of the same key. If a module is in several groups, the first
    forward one goes with the last backward one: backward runs in reverse."""
    found: dict[tuple[str, str], list[int]] = {}
    for group in groups:
        found.setdefault((group.key, group.phase), []).append(group.index)
    return [
        pair
        for (key, phase), forward in found.items()
        if phase == "forward"
        for pair in zip(forward, reversed(found.get((key, "backward"), [])), strict=False)
    ]


GAP = 18.0
LANE_WIDTH = 6.0


@dataclass(frozen=True)
class Column:
    """centre: box -> x of its middle; lanes: edge -> the (row, x) points it passes between boxes;
    left, right: the extent of all boxes."""

    centre: dict[int, float]
    lanes: dict[tuple[int, int], list[tuple[int, float]]]
    left: float
    right: float


def place_column(rows: dict[int, int], widths: dict[int, float], edges: Sequence[tuple[int, int]]) -> Column:
    """Place the boxes (keys of `rows`, which gives each its row) so that `edges` (upper, lower) are
    short. An edge over several rows gets a lane, a narrow box in every row that it passes."""
    cells: list[list[int]] = [[] for _ in range(1 + max(rows.values(), default=0))]
    for box, row in rows.items():
        cells[row].append(box)
    wide, links, chains = dict(widths), [], {}
    fresh = 1 + max(rows, default=0)
    for upper, lower in edges:
        chain = [upper]
        for row in range(rows[upper] + 1, rows[lower]):
            cells[row].append(fresh)
            wide[fresh] = LANE_WIDTH
            chain.append(fresh)
            fresh += 1
        chain.append(lower)
        links += itertools.pairwise(chain)
        chains[upper, lower] = chain
    neighbours = _neighbours(wide, links)
    _order(cells, neighbours)
    centre = _centres(cells, wide, neighbours)
    lanes = {
        edge: [(rows[edge[0]] + i, centre[c]) for i, c in enumerate(chain)][1:-1]
        for edge, chain in chains.items()
    }
    left = min((centre[box] - widths[box] / 2 for box in rows), default=0.0)
    right = max((centre[box] + widths[box] / 2 for box in rows), default=0.0)
    lane_xs = [x for points in lanes.values() for _, x in points]
    return Column({box: centre[box] for box in rows}, lanes, min([left, *lane_xs]), max([right, *lane_xs]))


def spread(wanted: Sequence[float], weights: Sequence[float], apart: Sequence[float]) -> list[float]:
    """The positions nearest to `wanted` (weighted least squares) with position i+1 at least apart[i] right
    of position i: never falling, less the room that those before them need."""
    offsets = np.cumsum([0.0, *apart])[: len(wanted)]
    rising = isotonic_regression(np.array(wanted) - offsets, weights=weights).x if len(wanted) else offsets
    return (rising + offsets).tolist()


def _neighbours(
    wide: dict[int, float], links: Sequence[tuple[int, int]]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """(cells above each cell, cells below each cell)."""
    above: dict[int, list[int]] = {cell: [] for cell in wide}
    below: dict[int, list[int]] = {cell: [] for cell in wide}
    for upper, lower in links:
        above[lower].append(upper)
        below[upper].append(lower)
    return above, below


def _order(cells: list[list[int]], neighbours: tuple[dict[int, list[int]], dict[int, list[int]]]) -> None:
    """Sort each row by the mean place of its neighbours in the row before; down, then up, a few times."""
    for sweep in range(6):
        near = neighbours[sweep % 2]
        row_order = cells if sweep % 2 == 0 else cells[::-1]
        place: dict[int, float] = {}
        for row in row_order:
            here = {cell: index / max(1, len(row)) for index, cell in enumerate(row)}
            seen = {cell: [place[n] for n in near[cell] if n in place] for cell in row}
            row.sort(key=lambda cell: sum(seen[cell]) / len(seen[cell]) if seen[cell] else here[cell])
            place.update({cell: (index + 0.5) / len(row) for index, cell in enumerate(row)})


def _centres(
    cells: Sequence[Sequence[int]],
    wide: dict[int, float],
    neighbours: tuple[dict[int, list[int]], dict[int, list[int]]],
) -> dict[int, float]:
    """x of every cell: near the weighted mean of its neighbours, long edges straight before all."""
    centre: dict[int, float] = {}
    for row in cells:
        apart = _apart(row, wide)
        start = [-sum(apart) / 2 + offset for offset in itertools.accumulate(apart, initial=0.0)]
        centre.update(zip(row, start, strict=False))
    links = {
        cell: [(n, _weight(wide[cell], wide[n])) for side in neighbours for n in side[cell]] for cell in wide
    }
    for sweep in range(24):
        for row in cells if sweep % 2 == 0 else reversed(cells):
            weights = [sum(weight for _, weight in links[cell]) or 0.1 for cell in row]
            wanted = [
                sum(centre[n] * weight for n, weight in links[cell]) / total if links[cell] else centre[cell]
                for cell, total in zip(row, weights, strict=True)
            ]
            centre.update(zip(row, spread(wanted, weights, _apart(row, wide)), strict=True))
    return centre


def _weight(width: float, other: float) -> float:
    """Of a link, by how many of its ends are lanes."""
    return (1.0, 2.0, 8.0)[(width == LANE_WIDTH) + (other == LANE_WIDTH)]


def _apart(row: Sequence[int], wide: dict[int, float]) -> list[float]:
    return [(wide[a] + wide[b]) / 2 + GAP for a, b in itertools.pairwise(row)]
