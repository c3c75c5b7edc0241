"""What is written in a box: title, collectives, parameters, ops and results of a group."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import networkx as nx

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
