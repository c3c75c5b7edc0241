"""Write the graph of a plan, or the timeline and graphs of its stages, in the format that a file's suffix names; and
the page of a plan, or of two beside each other: one HTML file with all that it needs inside."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import networkx as nx

from autoshard.drawing.page_data import page_data
from autoshard.drawing.svg import WHITE, svg_page, svg_text
from autoshard.drawing.timeline_svg import (
    TIMELINE_STYLE,
    Rows,
    rows_height,
    rows_parts,
    timeline_parts,
    timeline_width,
    trace_json,
)
from autoshard.plan.plan_graph import collectives, colour, price
from autoshard.plan.why_not import PlanQuestions
from cost_model.errors import PlanError, checked_path, write_text
from cost_model.memory import format_seconds
from passes.stages.pipeline_orders import PipelineTimeline

_HEAD = re.compile(r'<svg [^>]*viewBox="0 0 (\d+) (\d+)"[^>]*>')
_BETWEEN_STAGES, _BETWEEN_TIMELINES = 40.0, 24.0
_TIMELINES = f"\n{TIMELINE_STYLE}"

PathLike = str | os.PathLike[str]


def draw(graph: nx.DiGraph, path: PathLike) -> Path:
    """Write `graph` (see `plan_graph`) to `path` and return it; the suffix chooses the format.

    .svg  picture: forward beside backward, repeated layers folded
    .dot  for graphviz        .json .graphml  for other tools; every node and edge

    Raises PlanError for another suffix.
    """
    target = checked_path(path, "path", PlanError)
    text_of = _TEXTS.get(target.suffix.lower())
    if text_of is None:
        raise PlanError(
            f"draw({str(target)!r}): no format has the suffix {target.suffix!r}\n"
            f"  try: a name that ends in one of .html {' '.join(_TEXTS)}"
        )
    write_text(target, text_of(graph), "picture", PlanError)
    return target


def draw_pipeline(
    title: str, timeline: PipelineTimeline, stages: Sequence[nx.DiGraph], path: PathLike
) -> Path:
    """Write it to `path` and return that. stages: `plan_graph` of each. PlanError for a suffix other than .svg and
    .json, and where no file can be written."""
    target = checked_path(path, "path", PlanError)
    suffix = target.suffix.lower()
    if suffix not in (".svg", ".json"):
        raise PlanError(
            f"draw({str(target)!r}): plans with stages are not drawn as {target.suffix!r}\n"
            "  try: a name that ends in .svg, .html or .json (a trace for Perfetto), or plan.stages[0].draw(...)"
        )
    if suffix == ".json":
        text = json.dumps(trace_json(title, timeline)) + "\n"
    else:
        text = _pipeline_svg(title, timeline, stages)
    write_text(target, text, "picture", PlanError)
    return target


def _json_text(graph: nx.DiGraph) -> str:
    """networkx's node-link form: {"graph": {...}, "nodes": [{"id": ...}], "edges": [{"source": ...}]}."""
    return json.dumps(nx.node_link_data(graph, edges="edges"), indent=1) + "\n"


def _graphml_text(graph: nx.DiGraph) -> str:
    written = BytesIO()
    nx.write_graphml(graph, written)
    return written.getvalue().decode()


def _pipeline_svg(title: str, timeline: PipelineTimeline, stages: Sequence[nx.DiGraph]) -> str:
    width, top = timeline_width(), rows_height(len(timeline.order.ranks)) + _BETWEEN_STAGES
    parts = [WHITE, *timeline_parts(title, timeline)]
    for number, graph in enumerate(stages):
        picture = svg_text(graph)
        head = _HEAD.search(picture)
        assert head is not None
        body = picture[head.end() :].strip().removesuffix("</svg>")
        body = re.sub(r"<style>.*?</style>", "", body, count=1, flags=re.DOTALL)
        parts.append(f'<text class="head" x="28" y="{top:.0f}">stage {number}</text>')
        parts.append(f'<g transform="translate(0 {top + 10:.0f})">{_framed(body, head[1], head[2])}</g>')
        width, top = max(width, float(head[1])), top + float(head[2]) + _BETWEEN_STAGES
    return svg_page(width, top, parts, style=_TIMELINES)


def _framed(body: str, width: str, height: str) -> str:
    """A picture's background as large as it is, in place of as large as the page."""
    return body.replace('<rect width="100%" height="100%"', f'<rect width="{width}" height="{height}"', 1)


def two_timelines_svg(*titled: tuple[str, PipelineTimeline]) -> str:
    """Each fills the width: bubbles are compared, and the seconds stand below each."""
    parts = [WHITE]
    top = 0.0
    for title, timeline in titled:
        body = "\n".join(timeline_parts(title, timeline))
        parts.append(f'<g transform="translate(0 {top:.0f})">{body}</g>')
        top += rows_height(len(timeline.order.ranks)) + _BETWEEN_TIMELINES
    return svg_page(timeline_width(), top, parts, style=_TIMELINES)


def rows_svg(rows: Rows, seconds: float, legend: Mapping[str, str]) -> str:
    """As of `rows_parts`."""
    parts = [WHITE, *rows_parts(rows, seconds, legend)]
    return svg_page(timeline_width(), rows_height(len(rows)), parts, style=_TIMELINES)


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


_TEXTS: Mapping[str, Callable[[nx.DiGraph], str]] = MappingProxyType(
    {".svg": svg_text, ".dot": dot_text, ".json": _json_text, ".graphml": _graphml_text}
)


_SCRIPTS = ("model.js", "graph.js", "charts.js", "mesh.js", "panel.js", "app.js")


def is_page(path: Any) -> bool:
    """Whether its suffix asks for one. PlanError for what is no path."""
    return checked_path(path, "path", PlanError).suffix.lower() == ".html"


def write_page(path: Any, *plans: tuple[str, PlanQuestions]) -> Path:
    """Of one plan, or of two beside each other, to `path`, which is returned. plans: names, and what they name.
    PlanError where no file can be written."""
    target, (plan, *others) = checked_path(path, "path", PlanError), (plan for _, plan in plans)
    what = f"{plan.mesh}{f', stages along {plan.axis}' if plan.axis else ''}"
    title = " and ".join(name for name, _ in plans) if others else what
    write_text(target, page_text(f"autoshard: {title}", *plans), "report", PlanError)
    return target


def page_text(title: str, *plans: tuple[str, PlanQuestions]) -> str:
    """Nothing is loaded, and no name of a model or file is read as HTML."""
    room = files("autoshard.drawing")
    read = lambda *path: room.joinpath(*path).read_text(encoding="utf-8")
    library = f"/*\n{read('vendor', 'dagre.LICENSE.txt')}*/\n{read('vendor', 'dagre.min.js')}"
    parts = {
        "title": escape(title),
        "style": read("web", "page.css"),
        "library": library,
        "script": "\n".join(read("web", name) for name in _SCRIPTS),
        # Within a script "<" could end it, or begin a comment.
        "data": json.dumps(page_data(*plans), separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], read("web", "page.html"))
