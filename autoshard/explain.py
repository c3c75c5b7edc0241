"""Why a plan is what it is: its collectives, where time and bytes go, how two plans differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost_model.errors import PlanError
from cost_model.units import format_bytes
from passes.graph_text import format_seconds
from passes.records import NodeRecord

if TYPE_CHECKING:
    from autoshard.plan import Plan

__all__ = ["Collective", "collectives_of", "explain_node", "explain_plan", "plan_difference"]


@dataclass(frozen=True)
class Collective:
    """kind over axes, of nbytes priced at seconds. value: the tensor moved; node: who reads it.

    kind: as what it is priced, a key of `PAYLOAD_BYTES`. name: the step it performs, as a plan prints it: the kind, or
    of "point_to_point" "halo_exchange", "halo_reduce" or "reshard".
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float
    value: str
    node: str
    phase: str
    name: str


def collectives_of(records: Sequence[NodeRecord]) -> tuple[Collective, ...]:
    """Every collective that the records' transfers hold, in graph order; local steps are none.

    What brings a result to the graph's end (a gradient to its parameter's layout) belongs to the
    phase that computed it.
    """
    phases = {record.name: record.phase for record in records}
    return tuple(
        Collective(
            kind=transfer.step.kind,
            axes=transfer.step.axes,
            nbytes=transfer.nbytes,
            seconds=transfer.seconds,
            value=operand.source,
            node=record.name,
            phase=phases[operand.source] if record.op == "output" else record.phase,
            name=transfer.step.name,
        )
        for record in records
        for operand in record.operands
        for transfer in operand.transfers
        if transfer.step.kind is not None
    )


def explain_plan(plan: Plan) -> str:
    """A page: the prediction, its proof, the parameters' placements, collectives and costly modules."""
    origin = plan.origin
    nominal = " (nominal: not measured on any machine)" if origin.nominal else ""
    lines = [
        f"{plan.mesh}, prices of profile {origin.profile}{nominal}",
        f"predicted step {format_seconds(plan.step_time)}",
        f"the search counts {format_seconds(plan.cost)}, {plan.status}: for no plan less than "
        f"{format_seconds(plan.lower_bound)} (gap {plan.gap:.2%})",
        f"predicted peak memory {format_bytes(plan.peak_memory)} per device, at {plan.peak_node}"
        + _reserved(plan)
        + ("" if plan.memory_limit is None else f"; limit {format_bytes(plan.memory_limit)}"),
        "",
        *_time_table(plan),
        "",
        *_collective_table(plan),
        "",
        *_parameter_table(plan),
    ]
    if plan.fallbacks:
        lines += ["", *_fallback_table(plan)]
    return "\n".join(lines) + "\n"


def explain_node(plan: Plan, name: str) -> str:
    """One node, parameter or module: layouts, seconds and the transfers in front of it."""
    found = [r for r in plan.records if name in (r.name, r.module) or r.text == f"param {name}"]
    if not found:
        raise PlanError(
            f"explain({name!r}): the plan has no node, parameter or module of that name\n"
            "  try: a name from to_text(), or from the model's named_parameters() or named_modules()"
        )
    lines: list[str] = []
    for record in found:
        results = ", ".join(str(result) for result in record.results)
        lines.append(
            f"%{record.name}: {results} = {record.op}  // {format_seconds(record.seconds)} {record.source}"
        )
        for operand in record.operands:
            for transfer in operand.transfers:
                cost = f"{format_bytes(transfer.nbytes)}, {format_seconds(transfer.seconds)}"
                lines.append(f"    reads %{operand.source} through {transfer.step.text()}: {cost}")
    return "\n".join(lines) + "\n"


def plan_difference(mine: Plan, other: Plan) -> str:
    """What changes from `mine` to `other`: step time, memory, parameters, collectives."""
    slower = other.cost - mine.cost
    ratio = f" ({slower / mine.cost:+.1%})" if mine.cost else ""
    lines = [
        f"step   {format_seconds(mine.cost)} -> {format_seconds(other.cost)}{ratio}",
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


def _kind_counts(plan: Plan) -> Counter[str]:
    return Counter(f"{c.phase} {c.name}[{','.join(c.axes)}]" for c in plan.collectives)


def _reserved(plan: Plan) -> str:
    if not plan.reserve:
        return ""
    count = len(plan.communicators)
    return (
        f", and {format_bytes(plan.reserve)} for CUDA's context and {count} communicator{'s' * (count != 1)}"
    )


def _time_table(plan: Plan) -> list[str]:
    update = sum(r.seconds for r in plan.records if r.op == "param")
    lines = ["time"]
    for phase in ("forward", "backward"):
        ops = sum(r.seconds for r in plan.records if r.phase == phase and r.op != "param")
        moved = sum(c.seconds for c in plan.collectives if c.phase == phase)
        lines.append(
            f"  {phase:9} {format_seconds(ops):>9} compute, {format_seconds(moved):>9} communication"
        )
    return [*lines, f"  {'optimizer':9} {format_seconds(update):>9}"]


def _collective_table(plan: Plan) -> list[str]:
    totals: dict[tuple[str, str, str], list[float]] = {}
    for c in plan.collectives:
        row = totals.setdefault((c.phase, c.name, ",".join(c.axes)), [0, 0, 0.0])
        row[0] += 1
        row[1] += c.nbytes
        row[2] += c.seconds
    if not totals:
        return ["collectives: none"]
    lines = ["collectives"]
    for (phase, name, axes), (count, nbytes, seconds) in sorted(totals.items(), key=lambda item: -item[1][2]):
        size, time = format_bytes(int(nbytes)), format_seconds(seconds)
        lines.append(f"  {phase:8} {name:14} [{axes}] x{int(count):<4} {size:>8} {time:>9}")
    return lines


def _parameter_table(plan: Plan) -> list[str]:
    width = max((len(name) for name in plan.parameter_layouts), default=0)
    return ["parameters"] + [f"  {name:{width}} {layout}" for name, layout in plan.parameter_layouts.items()]


def _fallback_table(plan: Plan) -> list[str]:
    """Every place in the model where an op without a rule runs, and how often."""
    lines = ["ops without a rule, run replicated with their inputs gathered"]
    for name in plan.fallbacks:
        op = name.removesuffix(".default").removeprefix("autoshard.")
        places = Counter((r.source, r.module) for r in plan.records if r.op == op)
        lines += [f"  {name}{_place(*place)} x{count}" for place, count in places.items()] or [f"  {name}"]
    return lines


def _place(source: str, module: str) -> str:
    return (f" at {source}" if source else "") + (f" in {module}" if module else "")
