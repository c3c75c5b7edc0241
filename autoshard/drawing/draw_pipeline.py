"""A plan with stages as a picture or a trace: the timeline of all stages, and below it each stage's graph."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import networkx as nx

from autoshard.drawing.html import html_page
from autoshard.drawing.pipeline_trace import trace_json
from autoshard.drawing.svg import STYLE, svg_text
from autoshard.drawing.timeline_svg import (
    TIMELINE_STYLE,
    timeline_height,
    timeline_parts,
    timeline_width,
)
from cost_model.checked_arguments import checked_path
from cost_model.errors import PlanError
from cost_model.text_files import write_text
from passes.stages.pipeline_timeline import PipelineTimeline

__all__ = ["draw_pipeline", "pipeline_svg"]

_HEAD = re.compile(r'<svg [^>]*viewBox="0 0 (\d+) (\d+)"[^>]*>')
_NUMBERED = re.compile(r'data-(index|from|to)="')
_GAP = 40.0


def draw_pipeline(
    title: str, timeline: PipelineTimeline, stages: Sequence[nx.DiGraph], path: str | os.PathLike[str]
) -> Path:
    """Write it to `path` and return that. stages: `plan_graph` of each. PlanError for a suffix other than .svg, .html
    and .json, and where no file can be written."""
    target = checked_path(path, "path", PlanError)
    suffix = target.suffix.lower()
    if suffix not in (".svg", ".html", ".json"):
        raise PlanError(
            f"draw({str(target)!r}): plans with stages are not drawn as {target.suffix!r}\n"
            "  try: a name that ends in .svg, .html or .json (a trace for Perfetto), or plan.stages[0].draw(...)"
        )
    if suffix == ".json":
        text = json.dumps(trace_json(title, timeline)) + "\n"
    else:
        picture = pipeline_svg(title, timeline, stages)
        text = picture if suffix == ".svg" else html_page(title, picture)
    write_text(target, text, "picture", PlanError)
    return target


def pipeline_svg(title: str, timeline: PipelineTimeline, stages: Sequence[nx.DiGraph]) -> str:
    width, top = timeline_width(), timeline_height(timeline) + _GAP
    parts = list(timeline_parts(title, timeline))
    for number, graph in enumerate(stages):
        picture = svg_text(graph)
        head = _HEAD.search(picture)
        assert head is not None
        body = picture[head.end() :].strip().removesuffix("</svg>")
        body = re.sub(r"<style>.*?</style>", "", body, count=1, flags=re.DOTALL)
        # Boxes of all stages are found by one number.
        body = _NUMBERED.sub(lambda found, stage=number: f'data-{found[1]}="{stage}.', body)
        parts.append(f'<text class="head" x="28" y="{top:.0f}">stage {number}</text>')
        parts.append(f'<g transform="translate(0 {top + 10:.0f})">{_framed(body, head[1], head[2])}</g>')
        width, top = max(width, float(head[1])), top + float(head[2]) + _GAP
    size = f'width="{width:.0f}" height="{top:.0f}" viewBox="0 0 {width:.0f} {top:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} data-left="0" data-span="{timeline_width():.0f}">',
            f"<style>{STYLE}\n{TIMELINE_STYLE}</style>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _framed(body: str, width: str, height: str) -> str:
    """A picture's background as large as it is, in place of as large as the page."""
    return body.replace('<rect width="100%" height="100%"', f'<rect width="{width}" height="{height}"', 1)
