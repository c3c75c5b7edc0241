"""The page of a plan, or of two beside each other: one HTML file with all that it needs inside."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from autoshard.drawing.page_data import page_data
from autoshard.plan.why_not import PlanQuestions
from cost_model.errors import PlanError, checked_path, write_text

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
