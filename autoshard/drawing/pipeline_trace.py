"""The timeline of a pipeline as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from autoshard.drawing.timeline_spans import rank_spans
from passes.stages.pipeline_timeline import PipelineTimeline

__all__ = ["trace_json"]

_MICROSECONDS = 1e6


def trace_json(title: str, timeline: PipelineTimeline) -> dict[str, Any]:
    """Trace Event Format: a thread for each rank, and one for each direction of each boundary."""
    events: list[dict[str, Any]] = [_named("process_name", 0, 0, title)]
    ranks = rank_spans(timeline)
    for rank, spans in enumerate(ranks):
        events.append(_named("thread_name", 0, rank, f"rank {rank}"))
        for span in spans:
            content = {"stage": span.stage, "piece": span.piece} if span.piece is not None else {}
            events.append(_slice(span.words, span.kind, span.start, span.end, rank, content))
    threads: dict[tuple[int, str], int] = {}
    for moved in timeline.transfers:
        way = moved.boundary, moved.direction
        if way not in threads:
            threads[way] = len(ranks) + len(threads)
            words = f"{moved.direction} over boundary {moved.boundary}"
            events.append(_named("thread_name", 0, threads[way], words))
        words = f"piece {moved.piece} {moved.direction}"
        events.append(_slice(words, "transfer", moved.start, moved.end, threads[way], {"piece": moved.piece}))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, kind: str, start: float, end: float, thread: int, content: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "pid": 0,
        "tid": thread,
        "args": content,
    }
