"""A plan in words: where time and bytes go, when stages run and what passes between them, how two plans differ.

One part of it: `explain_part`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autoshard.plan.plan_content import PlanContent, Rehearsed, pace_of
from autoshard.plan.plan_memory import fold_numbers
from autoshard.plan.plan_words import (
    collective_lines,
    fallback_lines,
    memory_lines,
    parameter_lines,
    race_lines,
    refined_line,
    stages_words,
    times,
)
from autoshard.plan.stage_schedule import fullest_rank
from cost_model.errors import folded
from cost_model.memory import communicators, format_bytes, format_seconds
from passes.layout.layout import joined_text
from passes.plan.describe import format_graph, raced_mark


def plan_text(plan: PlanContent, *, seconds: bool) -> str:
    """The planned graph; of stages every one's under a line that says where it runs."""
    if not plan.axis:
        return format_graph(
            plan.planned, plan.mesh, seconds=seconds, joined=plan.joined_axes, raced=len(plan.race)
        )
    parts = [f"{plan.mesh}, {stages_words(plan)}{raced_mark(len(plan.race) if seconds else 0)}\n"]
    for number, stage in enumerate(plan.stages):
        head = f"\nstage {number} at {plan.axis}={number % plan.ranks}{_ends(plan, number)}\n"
        body = format_graph(stage.planned, stage.mesh, seconds=seconds, joined=stage.joined_axes)
        parts.append(head + body)
    return "".join(parts)


def explain_plan(plan: PlanContent) -> str:
    """A page: the prediction and its proof, stages, memory, the parameters' placements, collectives."""
    origin = plan.origin
    nominal = " (nominal: not measured on any machine)" if origin.nominal else ""
    limit = "" if plan.memory_limit is None else f"; limit {format_bytes(plan.memory_limit)}"
    peak = f"predicted peak memory {format_bytes(plan.peak_memory)} per device"
    if plan.axis:
        division = f", {stages_words(plan)}"
        sections = _stages_proof(plan), [f"{peak}{_reserved(plan)}{limit}"], _stages_tables(plan)
        top = "" if plan.memory is None else f", at {plan.memory.peak.node}, {plan.memory.peak.phase}"
        at = f" of {plan.axis}={fullest_rank(plan.scheduled)}{top}"
    else:
        division = ""
        sections = _proof(plan), [f"{peak}, at {plan.peak_node}{_reserved(plan)}{limit}"], _time_table(plan)
        at = ""
    proof, memory, times = sections
    head = f"{plan.mesh}{division}, prices of profile {origin.profile}{nominal}"
    lines = [
        *map(folded, (head, refined_line(plan), *proof, *memory)),
        *times,
        "",
        *memory_lines(plan.memory, f"memory at the peak{at}"),
        *collective_lines(plan.collectives),
        "",
        *parameter_lines(plan.parameter_layouts),
    ]
    if plan.axis:
        lines += _shared(plan)
    if plan.fallbacks:
        lines += ["", *fallback_lines(plan.stages)]
    return "\n".join(lines) + "\n"


def _proof(plan: PlanContent) -> Iterator[str]:
    yield f"predicted step {format_seconds(plan.step_time)}{_rehearsed(plan.rehearsed)}"
    those = "" if plan.memory_limit is None else " without a limit"
    yield (
        f"the search counts {format_seconds(plan.cost)}, {plan.status}: for no plan{those} less than "
        f"{format_seconds(plan.lower_bound)} (gap {plan.gap:.2%})"
    )
    if plan.latency_decides:
        gain = f"{plan.most_gain:.1%}"
        yield f"latency decides: no plan saves more than {gain} of a step in which every rank does all the work"
    if plan.joined_axes:
        together = joined_text(plan.joined_axes)
        yield f"axes searched together: {together}; the bound is of plans that use them so"
    yield from race_lines(plan.race)


def _stages_proof(plan: PlanContent) -> Iterator[str]:
    yield from race_lines(plan.race)
    waits = f", of which ranks wait {plan.bubble:.1%}"
    yield f"predicted step {format_seconds(plan.step_time)}{waits}{_rehearsed(plan.rehearsed)}"
    yield (
        f"the search counts for no plans of these stages, with the same between them, less than "
        f"{format_seconds(plan.lower_bound)} (gap {plan.gap:.2%})"
    )
    yield _cut_line(plan)


def plan_difference(mine: PlanContent, other: PlanContent) -> str:
    """What changes from `mine` to `other`, both with stages or both without: step time, what the search counts, memory,
    schedule and cut, parameters, collectives."""
    lines = [f"step   {(step := _change(mine.step_time, other.step_time))}"]
    memory = f"memory {format_bytes(mine.peak_memory)} -> {format_bytes(other.peak_memory)}"
    if mine.axis:
        lines.append(memory)
        if stages_words(mine) != stages_words(other):
            lines.append(f"  {stages_words(mine)} -> {stages_words(other)}")
        if mine.cut != other.cut:
            lines.append(f"  cut at {', '.join(mine.cut)} -> {', '.join(other.cut)}")
    else:
        cost = _change(mine.cost, other.cost)
        lines += [*([] if cost == step else [f"cost   {cost}"]), memory]
    names = sorted({*mine.parameter_layouts, *other.parameter_layouts})
    held = [(name, (_held(mine, name), _held(other, name))) for name in names]
    changes = fold_numbers([(name, both) for name, both in held if both[0] != both[1]])
    if not mine.axis:
        before, after = _kind_counts(mine), _kind_counts(other)
        kinds = [(key, (str(before[key]), str(after[key])), 1) for key in sorted({*before, *after})]
        changes += [kind for kind in kinds if kind[1][0] != kind[1][1]]
    lines += [f"  {name}: {was} -> {now}{times(count)}" for name, (was, now), count in changes]
    return "\n".join(lines) + "\n"


def _change(before: float, after: float) -> str:
    ratio = f" ({after / before - 1.0:+.1%})" if before else ""
    return f"{format_seconds(before)} -> {format_seconds(after)}{ratio}"


def _kind_counts(plan: PlanContent) -> Counter[str]:
    return Counter(f"{c.phase} {c.name}[{','.join(c.axes)}]" for c in plan.collectives)


def _rehearsed(rehearsed: Rehearsed | None) -> str:
    """Behind the predicted step: nothing of a plan that was not rehearsed."""
    if rehearsed is None:
        return ""
    said = f", as it took when it was rehearsed; {format_seconds(rehearsed.modelled)} were modelled"
    if rehearsed.busy is None:
        return f"{said}, and all seconds are times {pace_of(rehearsed):.2f}"
    return f"{said}, and ranks were seen to compute {rehearsed.busy:.1%} of it"


def _held(plan: PlanContent, name: str) -> str:
    layout = plan.parameter_layouts.get(name)
    if layout is None or not plan.axis:
        return str(layout or "absent")
    places = ", ".join(map(str, plan.holders.get(name, ())))
    return f"{layout} at {plan.axis}={places}"


def _ends(plan: PlanContent, number: int) -> str:
    part, said = plan.parts[number], list[str]()
    for what, positions in (("reads input", part.reads), ("returns output", part.returns)):
        if positions:
            said.append(f"{what} {', '.join(map(str, positions))}")
    return f": {'; '.join(said)}" if said else ""


def _cut_line(plan: PlanContent) -> str:
    where = f"cut before {', '.join(plan.cut)}"
    if plan.bound_of_cut is None:
        return f"{where}, where each stage reads the parameters that it holds already"
    if plan.bound_of_cut <= 1e-9:
        return f"{where}: no cut has a shorter longest stage, as stages were estimated"
    return (
        f"{where}: the longest stage is at most {plan.bound_of_cut:.1%} longer than of any cut, as estimated"
    )


def _reserved(plan: PlanContent) -> str:
    if not plan.reserve:
        return ""
    made = "communicators"
    if not plan.axis:
        count = len(communicators(plan.mesh, [c.axes for c in plan.collectives]))
        made = f"{count} communicator{'s' * (count != 1)}"
    return f", and {format_bytes(plan.reserve)} for CUDA's context and {made}"


def _time_table(plan: PlanContent) -> Iterator[str]:
    if plan.moved_nbytes is not None:
        held = f"that are merged or in flight together hold no more than {format_bytes(plan.moved_nbytes)}"
        yield f"memory is short: transfers {held if plan.moved_nbytes else 'go one by one'}"
    if (count := plan.micro_batches) > 1:
        yield f"the batch runs in {count} pieces, one after the other: times are of all, collectives of one"
    if plan.head_pieces > 1:
        yield f"memory is short: head and loss run in {plan.head_pieces} pieces over tokens"
    yield from ("", "time")
    for phase in ("forward", "backward"):
        ops = sum(r.seconds for r in plan.records if r.phase == phase and r.op != "param")
        moved = sum(c.seconds for c in plan.collectives if c.phase == phase)
        yield f"  {phase:9} {format_seconds(ops):>9} compute, {format_seconds(moved):>9} communication"
    update = sum(r.seconds for r in plan.records if r.op == "param")
    yield f"  {'optimizer':9} {format_seconds(update):>9}"


def _stages_tables(plan: PlanContent) -> Iterator[str]:
    """Seconds of one piece, what passes between stages, and what ranks hold."""
    yield ""
    heads = ("forward", "backward", "once", "holds", "a piece")
    yield f"  {'stage':>5} {plan.axis:>5} {' '.join(f'{head:>9}' for head in heads)}  modules"
    prices = plan.scheduled.prices
    for number, (stage, figures) in enumerate(zip(plan.stages, prices.stages, strict=True)):
        once = figures.before + figures.after + figures.update
        times = (figures.forward, figures.backward, once)
        columns = [*map(format_seconds, times), format_bytes(figures.held), format_bytes(figures.kept)]
        place = f"  {number:>5} {number % plan.ranks:>5}"
        yield f"{place} {' '.join(f'{column:>9}' for column in columns)}  {_modules(stage)}"
    yield ""
    ways = zip(prices.sent, prices.returned, strict=True)
    for boundary, (sent, returned) in enumerate(ways):
        back = f", gradients in {format_seconds(returned)}" if returned else ""
        yield f"  from stage {boundary} to {boundary + 1}: a piece in {format_seconds(sent)}{back}"
    timeline = plan.timeline
    for rank, (busy, peak) in enumerate(zip(timeline.busy, plan.scheduled.peaks, strict=True)):
        waits = 1.0 - busy / timeline.seconds if timeline.seconds else 0.0
        yield f"  {plan.axis}={rank}: holds {format_bytes(peak)}, waits {waits:.1%}"


def _modules(stage: PlanContent) -> str:
    """The first and the last whose products run in a stage's forward."""
    ops = [r for r in stage.records if r.module and r.phase == "forward" and r.op != "param"]
    names = [r.module for r in ops if r.op == "contract"] or [r.module for r in ops]
    return f"{names[0]} to {names[-1]}" if names else ""


def _shared(plan: PlanContent) -> list[str]:
    shared = {name: places for name, places in plan.holders.items() if len(places) > 1}
    return [f"  {name} is held at {plan.axis}={', '.join(map(str, p))}" for name, p in shared.items()]
