"""Write the graph of a plan to a file, in the format that the file's suffix names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import networkx as nx

from autoshard.drawing.dot import dot_text
from autoshard.drawing.html import html_text
from autoshard.drawing.svg import svg_text
from cost_model.checked_arguments import checked_path
from cost_model.errors import PlanError

__all__ = ["draw", "write_dot", "write_graphml", "write_html", "write_json", "write_svg"]

PathLike = str | os.PathLike[str]


def draw(graph: nx.DiGraph, path: PathLike) -> Path:
    """Write `graph` (see `plan_graph`) to `path` and return it; the suffix chooses the format.

    .svg  picture: forward beside backward, repeated layers folded
    .html the same with zoom, search and details on hover; one file, no network
    .dot  for graphviz        .json .graphml  for other tools; every node and edge

    Raises PlanError for another suffix.
    """
    target = checked_path(path, "path", PlanError)
    writer = WRITERS.get(target.suffix.lower())
    if writer is None:
        raise PlanError(
            f"draw({str(target)!r}): no format has the suffix {target.suffix!r}\n"
            f"  try: a name that ends in one of {' '.join(WRITERS)}"
        )
    try:
        writer(graph, target)
    except OSError as error:
        raise PlanError(f"cannot write {str(target)!r}: {error.strerror}\n  try: another path") from None
    return target


def write_svg(graph: nx.DiGraph, path: PathLike) -> None:
    Path(path).write_text(svg_text(graph), encoding="utf-8")


def write_html(graph: nx.DiGraph, path: PathLike) -> None:
    Path(path).write_text(html_text(graph), encoding="utf-8")


def write_dot(graph: nx.DiGraph, path: PathLike) -> None:
    Path(path).write_text(dot_text(graph), encoding="utf-8")


def write_json(graph: nx.DiGraph, path: PathLike) -> None:
    """networkx's node-link form: {"graph": {...}, "nodes": [{"id": ...}], "edges": [{"source": ...}]}."""
    data = nx.node_link_data(graph, edges="edges")
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def write_graphml(graph: nx.DiGraph, path: PathLike) -> None:
    nx.write_graphml(graph, os.fspath(path))


WRITERS: Mapping[str, Callable[[nx.DiGraph, PathLike], None]] = MappingProxyType(
    {
        ".svg": write_svg,
        ".html": write_html,
        ".dot": write_dot,
        ".json": write_json,
        ".graphml": write_graphml,
    }
)
