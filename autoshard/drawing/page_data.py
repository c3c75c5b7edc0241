"""What the page of a plan shows, as one JSON: the folded graph with its layouts, timelines, memory.

Names of nodes, modules and layouts are told once, and by their place from then on. Seconds of spans are microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import networkx as nx
import numpy as np
from msgspec.structs import astuple

from autoshard.drawing.drawn_groups import fold_repeats
from autoshard.drawing.timeline_svg import rank_spans
from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_graph import COLOURS, OTHER, collectives, plan_graph
from autoshard.plan.plan_memory import Lived, MemoryTimeline, fold_numbers
from autoshard.plan.plan_summary import step_parts, summary_lines
from autoshard.plan.stage_schedule import fullest_rank
from autoshard.plan.why_not import PlanQuestions
from cost_model.deadline import Deadline, OutOfTime
from cost_model.mesh import MeshSpec
from passes.layout.layout import spans_of
from passes.plan.planned_graph import ResultRecord
from passes.predict.prediction import KINDS, TimelinePart
from passes.stages.pipeline_orders import PipelineTimeline

Json = dict[str, Any]

_PATIENCE = 60.0
"""Seconds for alternatives of all ops."""
_NOT_KNOWN = (
    "This plan was read from a file, which holds no other layouts' prices: draw the plan of find_plan itself."
)


def page_data(*plans: tuple[str, PlanQuestions]) -> Json:
    """Of one plan, or of two beside each other. plans: names, and what they name."""
    data: Json = {"plans": [_plan_data(name, plan) for name, plan in plans], "kinds": KINDS}
    data["colours"] = {**COLOURS, "point_to_point": COLOURS["halo_exchange"], "other": OTHER}
    if len(plans) == 2:
        data["differences"] = _differences(*(plan for _, plan in plans))
    return data


def _plan_data(name: str, plan: PlanQuestions) -> Json:
    stages = [_Stage(cast(PlanQuestions, stage)) for stage in plan.stages]
    single = len(stages) == 1 and not plan.axis
    charts = (
        [one.chart() for one in stages] if single else [_pipeline(plan), *(one.chart(1) for one in stages)]
    )
    return {
        "name": name,
        "summary": list(summary_lines(plan)),
        "step": plan.step_time,
        "parts": step_parts(plan) if single else None,
        "peak": plan.peak_memory + plan.reserve,
        "limit": plan.memory_limit,
        "stages": [one.data() for one in stages],
        "charts": charts,
    }


def _differences(mine: PlanQuestions, other: PlanQuestions) -> list[tuple[str, str, str]]:
    """Parameters that are laid out otherwise: name, and how in each; those of equal layers as one."""
    held = lambda plan, name: str(plan.parameter_layouts.get(name, "absent"))
    names = dict.fromkeys([*mine.parameter_layouts, *other.parameter_layouts])
    ways = [(name, (held(mine, name), held(other, name))) for name in names]
    return [(name, *both) for name, both, _ in fold_numbers([way for way in ways if len(set(way[1])) == 2])]


@dataclass
class _Stage:
    """The whole plan, or one of its stages. modules: their names, by their places."""

    plan: PlanQuestions
    modules: dict[str, int] = field(default_factory=dict[str, int])
    layouts: dict[str, Json] = field(default_factory=dict[str, Json])

    @cached_property
    def graph(self) -> nx.DiGraph:
        return fold_repeats(plan_graph(self.plan.planned, self.plan.mesh))

    @cached_property
    def place(self) -> dict[str, int]:
        """Of every op and placeholder the folded node that stands for it."""
        numbered = enumerate(self.graph.nodes(data="twins"))
        return {twin: i for i, (name, twins) in numbered for twin in twins or [name]}

    @cached_property
    def readers(self) -> dict[tuple[int, ...], int]:
        """Turn -> the folded node that reads first what comes in it."""
        found: dict[tuple[int, ...], int] = {}
        for record in self.plan.records:
            for read in record.operands:
                if read.turn is not None:
                    end = record.name if record.op != "output" else read.source
                    found.setdefault(read.turn, self.place.get(end, self.place.get(read.source, -1)))
        return found

    def data(self) -> Json:
        nodes = [self._node(name, data) for name, data in self.graph.nodes(data=True)]
        edges = [
            [self.place[source], self.place[reader], data["layout"], _moved(data)]
            for source, reader, data in self.graph.edges(data=True)
        ]
        return {
            "mesh": dict(zip(self.plan.mesh.names, self.plan.mesh.sizes, strict=True)),
            "nodes": nodes,
            "edges": edges,
            "layouts": self.layouts,
            "modules": list(self.modules),
            **self._alternatives(nodes),
        }

    def _node(self, name: str, data: Mapping[str, Any]) -> Json:
        record = self.plan.planned.by_name[name]
        said = {key: data[key] for key in ("label", "kind", "module", "phase", "seconds", "source")}
        results = [self._layout(result) for result in record.results]
        more = {"repeat": data["repeat"]} if "repeat" in data else {}
        return {"name": name, **said, **more, "results": results}

    def _layout(self, result: ResultRecord) -> str:
        text = str(result)
        if text not in self.layouts:
            self.layouts[text] = layout_data(result, self.plan.mesh)
        return text

    def _alternatives(self, nodes: Sequence[Json]) -> Json:
        """Of every op what else the search had, cheapest first; the plan's own is the first."""
        if self.plan.again is None:
            return {"alternatives": None, "why": _NOT_KNOWN}
        names = [node["name"] for node in nodes if node["kind"] == "op"]
        try:
            found = self.plan.again.alternatives(self.plan, names, Deadline.after(_PATIENCE))
        except OutOfTime:
            return {"alternatives": None, "why": f"Their prices were not known within {_PATIENCE:.0f} s."}
        told = lambda one: [
            [str(layout) for layout in one.layouts.results],
            [str(layout) for layout in one.layouts.operands],
            *(_rounded(seconds) for seconds in (one.seconds, one.moved, one.more)),
        ]
        return {"alternatives": {name: [told(one) for one in ways] for name, ways in found.items()}}

    def chart(self, times: int | None = None) -> Json:
        """Kernels and collectives on their streams. times: how often a piece is drawn, if not as often as it runs."""
        parts = [(one, one.times if times is None else times) for one in self.plan.ran]
        return {
            "kind": "step",
            "seconds": sum(count * part.seconds for part, count in parts),
            "parts": [{"times": count, "seconds": p.seconds, **self._spans(p)} for p, count in parts],
            "memory": _memory(self.plan.memory, _steps_at(parts), self.plan.memory_limit),
        }

    def _spans(self, part: TimelinePart) -> Json:
        at = lambda name: self.place.get(name, -1)
        place = lambda name: self.modules.setdefault(name, len(self.modules))
        known = self.plan.planned.by_name
        module = lambda name: place(known[name].module if name in known else "")
        micro = lambda seconds: round(1e6 * seconds, 3)
        kernels = [[at(k.of), module(k.of), k.phase[0], micro(k.start), micro(k.end)] for k in part.kernels]
        moved = [
            [
                self.readers.get(one.turn, -1) if one.turn else -1,
                *(place(one.serves), one.phase[0], micro(one.start), micro(one.end)),
                *(one.kind, ",".join(one.axes), one.nbytes, micro(one.exposed)),
            ]
            for one in part.moved
        ]
        return {"kernels": kernels, "moved": moved}


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def _moved(edge: Mapping[str, Any]) -> list[Json]:
    names = "kind", "axes", "text", "nbytes", "seconds", "bucket"
    return [{name: getattr(one, name) for name in names} for one in collectives(edge)]


def layout_data(result: ResultRecord, mesh: MeshSpec) -> Json:
    """Per dim its length, the axes that split it, and what each place along them holds of it."""
    layout = result.layout
    dims: list[Json] = []
    for dim, axes in enumerate(layout.dims):
        halo = layout.halos[dim]
        spans = halo.spans if halo is not None else spans_of(layout.split_sizes(result.shape, mesh, dim))
        dims.append({"length": result.shape[dim], "axes": axes, "spans": spans if axes else []})
    return {"dtype": result.dtype, "dims": dims, "partial": layout.partial}


StepsAt = Callable[[str, str], float | None]
"""Phase and node of a step of memory -> when it begins, if that is known."""


def _steps_at(parts: Sequence[tuple[TimelinePart, int]]) -> StepsAt:
    found: dict[tuple[str, str], float] = {}
    begin = 0.0
    for part, count in parts:
        for kernel in part.kernels:
            found.setdefault((kernel.phase, kernel.node), begin + kernel.start)
        begin += count * part.seconds
    return lambda phase, node: found.get((phase, node))


def _memory(memory: MemoryTimeline | None, at: StepsAt, limit: int | None) -> Json | None:
    """The curve by kind over time, and what lives when. Steps of no known time stand between their neighbours."""
    if memory is None:
        return None
    # Of a curve of memory.
    outline = memory.outline(400)
    known = [(step.place, at(step.phase, step.node)) for step in memory.steps]
    places, times = [0], [0.0]
    for place, seconds in known:
        if seconds is not None and seconds >= times[-1]:
            places.append(place)
            times.append(seconds)
    when = lambda steps: np.interp(steps, places, times).tolist()
    peak = [(*astuple(row), 0, memory.count) for row in memory.at_peak]
    return {
        "seconds": [_rounded(s) for s in when([step.place for step in outline.steps])],
        "bytes": [step.by_kind for step in outline.steps],
        "nodes": [step.node for step in outline.steps],
        "peak": outline.steps.index(outline.peak),
        "values": [
            [KINDS.index(one.kind), *astuple(one)[1:6], *map(_rounded, when([one.first, one.last + 1]))]
            for one in memory.values or [Lived(*fields) for fields in peak]  # type: ignore[call-arg]
        ],
        "everywhere": bool(memory.values),
        "limit": limit,
    }


def _pipeline(plan: PlanContent) -> Json:
    """All ranks along the axis of stages, what passes between stages, and the bytes of the fullest rank."""
    timeline = plan.timeline
    sent = _sent(timeline)
    rows: list[Json] = []
    for rank, spans in enumerate(rank_spans(timeline)):
        own = [[s.kind, s.stage, s.piece, _rounded(s.start), _rounded(s.end)] for s in spans]
        rows += [{"name": f"{plan.axis}={rank}", "spans": own}, {"name": "sends", "spans": sent[rank]}]
    fullest = fullest_rank(plan.scheduled)
    begins = {
        (e.action.kind, f"(stage {e.action.stage}, piece {e.action.piece})"): e.start
        for e in timeline.events
        if e.rank == fullest
    }
    at = lambda phase, node: begins.get((phase, node[node.rfind("(stage") :]))
    return {
        "kind": "pipeline",
        "seconds": timeline.seconds,
        "rows": rows,
        "fullest": fullest,
        "memory": _memory(plan.memory, at, plan.memory_limit),
    }


def _sent(timeline: PipelineTimeline) -> list[list[Any]]:
    """Of each rank what it sends to others, by the stage that it is of."""
    found: list[list[Any]] = [[] for _ in timeline.order.ranks]
    for one in timeline.transfers:
        stage = one.boundary + (one.direction == "returned")
        span = [one.direction, stage, one.piece, _rounded(one.start), _rounded(one.end)]
        found[timeline.order.rank_of(stage)].append(span)
    return found
