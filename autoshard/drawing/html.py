"""A plan as one HTML page: the picture with zoom, pan, search and details on hover."""

from __future__ import annotations

from html import escape
from importlib.resources import files

import networkx as nx

from autoshard.drawing.svg import svg_text

__all__ = ["html_text"]


def html_text(graph: nx.DiGraph) -> str:
    """Self-contained: style and script are inside, nothing is loaded."""
    page = files("autoshard.drawing").joinpath("viewer.html").read_text(encoding="utf-8")
    title = escape(str(graph.graph.get("mesh") or "plan"))
    return page.replace("<!-- title -->", title).replace("<!-- picture -->", svg_text(graph))
