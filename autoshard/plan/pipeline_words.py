"""A plan with stages in words: when its stages run, what they hold, what passes between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard.plan.explain import (
    collective_lines,
    fallback_lines,
    memory_lines,
    parameter_lines,
    rehearsed_words,
)
from autoshard.plan.pipeline_content import PipelineContent
from autoshard.plan.pipeline_memory import fullest_rank
from autoshard.plan.plan_collectives import collectives_of
from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_prices import refined_line
from autoshard.plan.race_result import race_lines
from cost_model.units import format_bytes
from passes.plan.graph_text import format_graph, format_seconds, raced_mark

__all__ = ["explain_pipeline", "pipeline_difference", "pipeline_text", "pipeline_words"]

Pipeline = PipelineContent[Any]


def pipeline_text(plan: Pipeline, *, seconds: bool) -> str:
    """Every stage's graph under a line that says where it runs."""
    parts = [f"{plan.mesh}, {pipeline_words(plan)}{raced_mark(len(plan.race) if seconds else 0)}\n"]
    for number, stage in enumerate(plan.stages):
        head = f"\nstage {number} at {plan.axis}={number % plan.ranks}{_ends(plan, number)}\n"
        body = format_graph(stage.records, stage.mesh, seconds=seconds, joined=stage.joined_axes)
        parts.append(head + body)
    return "".join(parts)


def explain_pipeline(plan: Pipeline) -> str:
    """A page: the prediction and its bound, the stages, what passes, memory, parameters and collectives."""
    origin = plan.origin
    nominal = " (nominal: not measured on any machine)" if origin.nominal else ""
    limit = "" if plan.memory_limit is None else f"; limit {format_bytes(plan.memory_limit)}"
    lines = [
        f"{plan.mesh}, {pipeline_words(plan)}, prices of profile {origin.profile}{nominal}",
        refined_line(*plan.stages),
        *race_lines(plan.race),
        f"predicted step {format_seconds(plan.step_time)}, of which ranks wait {plan.bubble:.1%}"
        + rehearsed_words(plan.rehearsed),
        f"the search counts for no plans of these stages, with the same between them, less than "
        f"{format_seconds(plan.lower_bound)} (gap {plan.gap:.2%})",
        *_cut_lines(plan),
        f"predicted peak memory {format_bytes(plan.peak_memory)} per device{_reserved(plan)}{limit}",
        "",
        *_stage_table(plan),
        "",
        *_passing(plan),
        *_rank_table(plan),
        "",
        *memory_lines(
            plan.memory, f"memory at the peak of {plan.axis}={fullest_rank(plan.scheduled)}{_peak_at(plan)}"
        ),
        *collective_lines([c for stage in plan.stages for c in collectives_of(stage.records)]),
        "",
        *parameter_lines(plan.parameter_layouts),
        *_shared(plan),
    ]
    if plan.fallbacks:
        lines += ["", *fallback_lines(plan.stages)]
    return "\n".join(lines) + "\n"


def pipeline_difference(mine: Pipeline, other: Pipeline) -> str:
    """What changes from `mine` to `other`."""
    before, after = format_seconds(mine.step_time), format_seconds(other.step_time)
    lines = [
        f"step   {before} -> {after} ({other.step_time / max(mine.step_time, 1e-300) - 1.0:+.1%})",
        f"memory {format_bytes(mine.peak_memory)} -> {format_bytes(other.peak_memory)}",
    ]
    if pipeline_words(mine) != pipeline_words(other):
        lines.append(f"  {pipeline_words(mine)} -> {pipeline_words(other)}")
    if mine.cut != other.cut:
        lines.append(f"  cut at {', '.join(mine.cut)} -> {', '.join(other.cut)}")
    for name in sorted({*mine.parameter_layouts, *other.parameter_layouts}):
        held, then = _held(mine, name), _held(other, name)
        if held != then:
            lines.append(f"  {name}: {held} -> {then}")
    return "\n".join(lines) + "\n"


def pipeline_words(plan: Pipeline) -> str:
    """ "4 stages along pp, 1f1b of 8 pieces"."""
    several = f", {plan.stages_per_rank} a rank" if plan.stages_per_rank > 1 else ""
    pieces = f"{plan.micro_batches} piece{'s' * (plan.micro_batches != 1)}"
    return f"{len(plan.stages)} stages along {plan.axis}{several}, {plan.schedule} of {pieces}"


def _held(plan: Pipeline, name: str) -> str:
    layout = plan.parameter_layouts.get(name)
    places = ", ".join(map(str, plan.holders.get(name, ())))
    return "absent" if layout is None else f"{layout} at {plan.axis}={places}"


def _ends(plan: Pipeline, number: int) -> str:
    said: list[str] = []
    for what, positions in (("reads input", plan.reads[number]), ("returns output", plan.returns[number])):
        if positions:
            said.append(f"{what} {', '.join(map(str, positions))}")
    return f": {'; '.join(said)}" if said else ""


def _cut_lines(plan: Pipeline) -> list[str]:
    where = f"cut before {', '.join(plan.cut)}"
    if plan.bound_of_cut is None:
        return [f"{where}, where each stage reads the parameters that it holds already"]
    if plan.bound_of_cut <= 1e-9:
        return [f"{where}: no cut has a shorter longest stage, as stages were estimated"]
    return [
        f"{where}: the longest stage is at most {plan.bound_of_cut:.1%} longer than of any cut, as estimated"
    ]


def _reserved(plan: Pipeline) -> str:
    return f", and {format_bytes(plan.reserve)} for CUDA's context and communicators" if plan.reserve else ""


def _stage_table(plan: Pipeline) -> Iterator[str]:
    """Seconds of one piece."""
    heads = ("forward", "backward", "once", "holds", "a piece")
    yield f"  {'stage':>5} {plan.axis:>5} {' '.join(f'{head:>9}' for head in heads)}  modules"
    for number, (stage, figures) in enumerate(zip(plan.stages, plan.prices.stages, strict=True)):
        once = figures.before + figures.after + figures.update
        times = (figures.forward, figures.backward, once)
        columns = [*map(format_seconds, times), format_bytes(figures.held), format_bytes(figures.kept)]
        place = f"  {number:>5} {number % plan.ranks:>5}"
        yield f"{place} {' '.join(f'{column:>9}' for column in columns)}  {_modules(stage)}"


def _modules(stage: PlanContent) -> str:
    """The first and the last whose products run in a stage's forward."""
    ops = [r for r in stage.records if r.module and r.phase == "forward" and r.op != "param"]
    names = [r.module for r in ops if r.op == "contract"] or [r.module for r in ops]
    return f"{names[0]} to {names[-1]}" if names else ""


def _passing(plan: Pipeline) -> Iterator[str]:
    ways = zip(plan.prices.sent, plan.prices.returned, strict=True)
    for boundary, (sent, returned) in enumerate(ways):
        back = f", gradients in {format_seconds(returned)}" if returned else ""
        yield f"  from stage {boundary} to {boundary + 1}: a piece in {format_seconds(sent)}{back}"


def _rank_table(plan: Pipeline) -> Iterator[str]:
    timeline = plan.timeline
    for rank, (busy, peak) in enumerate(zip(timeline.busy, plan.scheduled.peaks, strict=True)):
        waits = 1.0 - busy / timeline.seconds if timeline.seconds else 0.0
        yield f"  {plan.axis}={rank}: holds {format_bytes(peak)}, waits {waits:.1%}"


def _peak_at(plan: Pipeline) -> str:
    return "" if plan.memory is None else f", at {plan.memory.peak.node}, {plan.memory.peak.phase}"


def _shared(plan: Pipeline) -> list[str]:
    shared = {name: places for name, places in plan.holders.items() if len(places) > 1}
    return [f"  {name} is held at {plan.axis}={', '.join(map(str, p))}" for name, p in shared.items()]
