"""A plan as one HTML page: the picture with zoom, pan, search and details on hover."""

from __future__ import annotations

from html import escape
from importlib.resources import files

import networkx as nx

from autoshard.drawing.svg import svg_text

__all__ = ["html_page", "html_text"]


def html_text(graph: nx.DiGraph) -> str:
    """The graph of a plan (see `plan_graph`)."""
    return html_page(str(graph.graph.get("mesh") or "plan"), svg_text(graph))


def html_page(title: str, picture: str) -> str:
    """A picture in SVG on a page. Self-contained: style and script are inside, nothing is loaded."""
    page = files("autoshard.drawing").joinpath("viewer.html").read_text(encoding="utf-8")
    return page.replace("<!-- title -->", escape(title)).replace("<!-- picture -->", picture)
