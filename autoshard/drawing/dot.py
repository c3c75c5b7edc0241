"""A plan as a graphviz text: every op and value, clustered by module, nothing folded."""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from autoshard.drawing.transfer_marks import collectives, colour, price
from passes.plan.graph_text import format_seconds

FILL = {"forward": "#f5f9ff", "backward": "#fffaf2"}


def dot_text(graph: nx.DiGraph) -> str:
    """`dot -Tpdf` draws it. Phases and modules are clusters; an edge with a collective is coloured and
    labelled by it."""
    lines = [
        "digraph plan {",
        f"  label={_quoted(str(graph.graph.get('mesh', '')))} labelloc=t fontname=Helvetica newrank=true",
        '  node [shape=box style="rounded,filled" fontname=Courier fontsize=10]',
        "  edge [fontname=Courier fontsize=9 color=gray50]",
        *(line for phase in ("forward", "backward") for line in _phase(graph, phase)),
        *(_edge(*edge) for edge in graph.edges(data=True)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _phase(graph: nx.DiGraph, phase: str) -> Iterator[str]:
    modules: dict[str, list[str]] = {}
    for node, data in graph.nodes(data=True):
        if data["phase"] == phase:
            modules.setdefault(str(data["module"]), []).append(node)
    if not modules:
        return
    yield f"  subgraph cluster_{phase} {{"
    yield f"    label={phase} color=gray80"
    for index, (module, nodes) in enumerate(modules.items()):
        if module:
            yield f"    subgraph cluster_{phase}_{index} {{"
            yield f"      label={_quoted(module)} color=gray60"
        for node in nodes:
            yield f"      {_node(node, graph.nodes[node])}"
        if module:
            yield "    }"
    yield "  }"


def _node(name: str, data: dict[str, str | float]) -> str:
    rows = [str(data["label"]), str(data["layout"])]
    if float(data["seconds"]) > 0:
        rows.append(format_seconds(float(data["seconds"])))
    label = "\n".join(row for row in rows if row)
    return f'{_quoted(name)} [label={_quoted(label)} fillcolor="{FILL[str(data["phase"])]}"]'


def _edge(source: str, reader: str, data: dict[str, str | float]) -> str:
    found = collectives(data)
    if not found:
        return f"  {_quoted(source)} -> {_quoted(reader)}"
    label = _quoted("\n".join([*(moved.text for moved in found), price(found)]))
    tint = colour(found[0].kind)
    paint = f'color="{tint}" fontcolor="{tint}" penwidth=2'
    return f"  {_quoted(source)} -> {_quoted(reader)} [label={label} {paint}]"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
