"""A plan in words: its collectives, where time and bytes go, how two plans differ. One part of it: `explain_part`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autoshard.plan.equal_layers import fold_numbers
from autoshard.plan.plan_collectives import Collective, collectives_of
from autoshard.plan.plan_content import PlanContent, Rehearsed, pace_of
from autoshard.plan.plan_memory import MemoryTimeline, kind_lines
from autoshard.plan.plan_prices import priced_words, refined_line
from autoshard.plan.race_result import race_lines
from cost_model.memory import communicators
from cost_model.units import format_bytes
from passes.layout.joined_axes import joined_text
from passes.layout.layout import Layout
from passes.plan.graph_text import format_seconds

__all__ = [
    "collective_lines",
    "explain_plan",
    "fallback_lines",
    "memory_lines",
    "parameter_lines",
    "plan_difference",
    "rehearsed_words",
]


def explain_plan(plan: PlanContent) -> str:
    """A page: the prediction, its proof, the parameters' placements, collectives and costly modules."""
    origin = plan.origin
    nominal = " (nominal: not measured on any machine)" if origin.nominal else ""
    lines = [
        f"{plan.mesh}, prices of profile {origin.profile}{nominal}",
        refined_line(plan),
        f"predicted step {format_seconds(plan.step_time)}" + rehearsed_words(plan.rehearsed),
        f"the search counts {format_seconds(plan.cost)}, {plan.status}: for no plan {_of_those(plan)} less than "
        f"{format_seconds(plan.lower_bound)} (gap {plan.gap:.2%})",
        *_joined(plan),
        *race_lines(plan.race),
        f"predicted peak memory {format_bytes(plan.peak_memory)} per device, at {plan.peak_node}"
        + _reserved(plan)
        + ("" if plan.memory_limit is None else f"; limit {format_bytes(plan.memory_limit)}"),
        *_moved(plan),
        *_in_pieces(plan),
        "",
        *_time_table(plan),
        "",
        *memory_lines(plan.memory, "memory at the peak"),
        *collective_lines(collectives_of(plan.records)),
        "",
        *parameter_lines(plan.parameter_layouts),
    ]
    if plan.fallbacks:
        lines += ["", *fallback_lines([plan])]
    return "\n".join(lines) + "\n"


def _of_those(plan: PlanContent) -> str:
    """Which plans the bound is of."""
    return "that overlaps so" if plan.memory_limit is None else "without a limit"


def plan_difference(mine: PlanContent, other: PlanContent) -> str:
    """What changes from `mine` to `other`: step time, what the search counts, memory, parameters, collectives."""
    lines = [
        f"step   {_change(mine.step_time, other.step_time)}",
        f"cost   {_change(mine.cost, other.cost)}",
        f"memory {format_bytes(mine.peak_memory)} -> {format_bytes(other.peak_memory)}",
    ]
    for name in sorted({*mine.parameter_layouts, *other.parameter_layouts}):
        before, after = mine.parameter_layouts.get(name), other.parameter_layouts.get(name)
        if before != after:
            lines.append(f"  {name}: {before or 'absent'} -> {after or 'absent'}")
    before_counts, after_counts = _kind_counts(mine), _kind_counts(other)
    for key in sorted({*before_counts, *after_counts}):
        if before_counts[key] != after_counts[key]:
            lines.append(f"  {key}: {before_counts[key]} -> {after_counts[key]}")
    return "\n".join(lines) + "\n"


def _change(before: float, after: float) -> str:
    ratio = f" ({after / before - 1.0:+.1%})" if before else ""
    return f"{format_seconds(before)} -> {format_seconds(after)}{ratio}"


def _kind_counts(plan: PlanContent) -> Counter[str]:
    return Counter(f"{c.phase} {c.name}[{','.join(c.axes)}]" for c in collectives_of(plan.records))


def rehearsed_words(rehearsed: Rehearsed | None) -> str:
    """Behind the predicted step: nothing of a plan that was not rehearsed."""
    if rehearsed is None:
        return ""
    said = f", as it took when it was rehearsed; {format_seconds(rehearsed.modelled)} were modelled"
    if rehearsed.busy is None:
        return f"{said}, and all seconds are times {pace_of(rehearsed):.2f}"
    return f"{said}, and ranks were seen to compute {rehearsed.busy:.1%} of it"


def _joined(plan: PlanContent) -> list[str]:
    if not plan.joined_axes:
        return []
    together = joined_text(plan.joined_axes)
    return [f"axes searched together: {together}; the bound is of plans that use them so"]


def _moved(plan: PlanContent) -> list[str]:
    if plan.moved_nbytes is None:
        return []
    if not plan.moved_nbytes:
        return ["memory is short: transfers go one by one"]
    held = format_bytes(plan.moved_nbytes)
    return [f"memory is short: transfers that are merged or in flight together hold no more than {held}"]


def _in_pieces(plan: PlanContent) -> list[str]:
    lines: list[str] = []
    if plan.micro_batches > 1:
        count = plan.micro_batches
        lines.append(
            f"the batch runs in {count} pieces, one after the other: times are of all, collectives of one"
        )
    if plan.head_pieces > 1:
        lines.append(f"memory is short: head and loss run in {plan.head_pieces} pieces over tokens")
    return lines


def _reserved(plan: PlanContent) -> str:
    if not plan.reserve:
        return ""
    count = len(communicators(plan.mesh, [c.axes for c in collectives_of(plan.records)]))
    return (
        f", and {format_bytes(plan.reserve)} for CUDA's context and {count} communicator{'s' * (count != 1)}"
    )


def _time_table(plan: PlanContent) -> list[str]:
    update = sum(r.seconds for r in plan.records if r.op == "param")
    lines = ["time"]
    for phase in ("forward", "backward"):
        ops = sum(r.seconds for r in plan.records if r.phase == phase and r.op != "param")
        moved = sum(c.seconds for c in collectives_of(plan.records) if c.phase == phase)
        lines.append(
            f"  {phase:9} {format_seconds(ops):>9} compute, {format_seconds(moved):>9} communication"
        )
    return [*lines, f"  {'optimizer':9} {format_seconds(update):>9}"]


def memory_lines(memory: MemoryTimeline | None, head: str) -> list[str]:
    """What lives at the peak, by kind, with the largest values of each; nothing where that is not known."""
    return [] if memory is None else [head, *(f"  {line}" for line in kind_lines(memory)), ""]


def collective_lines(collectives: Sequence[Collective]) -> list[str]:
    """A line for the collectives of each phase, kind and axes, the longest first."""
    rows: dict[tuple[str, str, str], list[Collective]] = {}
    for c in collectives:
        rows.setdefault((c.phase, c.name, ",".join(c.axes)), []).append(c)
    if not rows:
        return ["collectives: none"]
    seconds = {row: sum(c.seconds for c in members) for row, members in rows.items()}
    lines = ["collectives"]
    for (phase, name, axes), members in sorted(rows.items(), key=lambda item: -seconds[item[0]]):
        size = format_bytes(sum(c.nbytes for c in members))
        time = format_seconds(seconds[phase, name, axes])
        priced = priced_words((c.seconds, c.priced) for c in members)
        lines.append(
            f"  {phase:8} {name:14} [{axes}] x{len(members):<4} {size:>8} {time:>9}  {priced}".rstrip()
        )
    return lines


def parameter_lines(layouts: Mapping[str, Layout]) -> list[str]:
    """A line for each parameter; those of equal layers, "layers.0-31.w", share one."""
    rows = fold_numbers([(name, str(layout)) for name, layout in layouts.items()])
    width = max((len(name) for name, _, _ in rows), default=0)
    times = lambda count: f"  x {count}" if count > 1 else ""
    return ["parameters"] + [f"  {name:{width}} {layout}{times(count)}" for name, layout, count in rows]


def fallback_lines(plans: Sequence[PlanContent]) -> list[str]:
    """Every place in the model where an op without a rule runs, and how often, of a plan or of its stages; [] if none
    does."""
    lines: list[str] = []
    for name in sorted({name for plan in plans for name in plan.fallbacks}):
        op = name.removesuffix(".default").removeprefix("autoshard.")
        places = Counter((r.source, r.module) for plan in plans for r in plan.records if r.op == op)
        lines += [f"  {name}{_place(*place)} x{count}" for place, count in places.items()] or [f"  {name}"]
    return ["ops without a rule, run replicated with their inputs gathered", *lines] if lines else []


def _place(source: str, module: str) -> str:
    return (f" at {source}" if source else "") + (f" in {module}" if module else "")
