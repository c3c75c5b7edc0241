"""Two timelines of a pipeline, one above the other."""

from __future__ import annotations

from autoshard.drawing.svg import STYLE
from autoshard.drawing.timeline_svg import TIMELINE_STYLE, timeline_height, timeline_parts, timeline_width
from passes.stages.pipeline_timeline import PipelineTimeline

__all__ = ["two_timelines_svg"]

_GAP = 24.0


def two_timelines_svg(*titled: tuple[str, PipelineTimeline]) -> str:
    """Each fills the width: bubbles are compared, and the seconds stand below each."""
    parts: list[str] = []
    top = 0.0
    for title, timeline in titled:
        body = "\n".join(timeline_parts(title, timeline))
        parts.append(f'<g transform="translate(0 {top:.0f})">{body}</g>')
        top += timeline_height(timeline) + _GAP
    size = f'width="{timeline_width():.0f}" height="{top:.0f}" viewBox="0 0 {timeline_width():.0f} {top:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{STYLE}\n{TIMELINE_STYLE}</style>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )
