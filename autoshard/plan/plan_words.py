"""A plan in one line: where its weights are, and what travels; its stages and their schedule."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from autoshard.plan.plan_collectives import Collective, collectives_of
from autoshard.plan.plan_content import AnyContent, PipelineContent, PlanContent
from passes.plan.records import NodeRecord

_SAID = 0.1
"""Share of the weights, or of the seconds of a kind of transfer, from which on it is said."""


def plan_words(plan: AnyContent) -> str:
    """ "weights split over dp; weights by all_gather[dp]; gradients by reduce_scatter[dp]".

    Of stages `stages_words`."""
    if isinstance(plan, PipelineContent):
        return stages_words(plan)
    parts = [f"weights {_held(plan)}"]
    moved = _moved(plan)
    for what in ("weights", "gradients", "activations"):
        if moved[what]:
            parts.append(f"{what} by {', '.join(moved[what])}")
    return "; ".join(parts)


def stages_words(plan: PipelineContent) -> str:
    """ "4 stages along pp, 1f1b of 8 pieces"."""
    several = f", {plan.stages_per_rank} a rank" if plan.stages_per_rank > 1 else ""
    pieces = f"{plan.micro_batches} piece{'s' * (plan.micro_batches != 1)}"
    return f"{len(plan.stages)} stages along {plan.axis}{several}, {plan.schedule} of {pieces}"


def words_apart(mine: PlanContent, other: PlanContent) -> str:
    """`other` in one line, with layouts that differ where `mine` has the same line."""
    words = plan_words(other)
    if words != plan_words(mine):
        return words
    before, after = _layouts(mine), _layouts(other)
    differ = [f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after.get(name)]
    more = f", and {len(differ) - 3} more" if len(differ) > 3 else ""
    return f"{words}; {', '.join(differ[:3])}{more}" if differ else words


def _layouts(plan: PlanContent) -> dict[str, str]:
    """Of the parameters by their names, then of the ops by theirs."""
    ordered = sorted(plan.records, key=lambda record: record.op != "param")
    return {
        record.text.removeprefix("param ") if record.op == "param" else record.name: str(
            record.results[0].layout
        )
        for record in ordered
        if record.results and record.op != "output"
    }


def _held(plan: PlanContent) -> str:
    held: Counter[str] = Counter()
    for record in plan.records:
        if record.op == "param":
            axes = [axis for axis in plan.mesh.names if axis in record.results[0].layout.axes]
            held[f"split over {', '.join(axes)}" if axes else "whole"] += math.prod(record.results[0].shape)
    said = _largest(held)
    if len(said) < 2:
        return "".join(said) or "none"
    total = sum(held.values())
    return " and ".join(f"{held[how] / total:.0%} {how}" for how in said)


def _moved(plan: PlanContent) -> Mapping[str, list[str]]:
    """What moves -> "all_gather[dp]", those that take longest first."""
    parameters = _made_of_parameters(plan.records)
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    for collective in collectives_of(plan.records):
        way = f"{collective.name}[{','.join(collective.axes)}]"
        seconds[_what(collective, parameters)][way] += collective.seconds  # type: ignore[assignment]
    whole = sum(sum(ways.values()) for ways in seconds.values())
    return defaultdict(
        list,
        {what: _largest(ways) for what, ways in seconds.items() if sum(ways.values()) >= _SAID / 4 * whole},
    )


def _what(collective: Collective, parameters: set[str]) -> str:
    if collective.value in parameters:
        return "weights"
    gradient = collective.node == "output" and collective.phase == "backward"
    return "gradients" if gradient else "activations"


def _made_of_parameters(records: Iterable[NodeRecord]) -> set[str]:
    """Parameters, and what ops of one operand make of them: casts and views."""
    found: set[str] = set()
    for record in records:
        sources = [operand.source for operand in record.operands]
        if record.op == "param" or (len(sources) == 1 and sources[0] in found):
            found.add(record.name)
    return found


def _largest(parts: Counter[str]) -> list[str]:
    whole = sum(parts.values())
    return [name for name, share in parts.most_common() if share >= _SAID * whole]
