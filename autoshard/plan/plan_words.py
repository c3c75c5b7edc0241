"""A plan in lines and tables: where its weights are and what travels; prices, race, memory, collectives, parameters."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autoshard.plan.plan_content import PlanContent, Raced
from autoshard.plan.plan_memory import MemoryTimeline, fold_numbers, kind_lines
from cost_model.errors import few
from cost_model.memory import format_bytes, format_seconds
from cost_model.timed import Priced
from passes.layout.layout import Layout
from passes.plan.planned_graph import Collective, OperandRecord, Turn, made_of_parameters

_SAID = 0.1
"""Share of the weights, or of the seconds of a kind of transfer, from which on it is said."""


def plan_words(plan: PlanContent) -> str:
    """ "weights split over dp; weights by all_gather[dp]; gradients by reduce_scatter[dp]".

    Of stages `stages_words`."""
    if plan.axis:
        return stages_words(plan)
    parts = [f"weights {_held(plan)}"]
    moved = _moved(plan)
    for what in ("weights", "gradients", "activations"):
        if moved[what]:
            parts.append(f"{what} by {', '.join(moved[what])}")
    return "; ".join(parts)


def stages_words(plan: PlanContent) -> str:
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
    return f"{words}; {few(differ, 3, ', and {} more')}" if differ else words


def _layouts(plan: PlanContent) -> dict[str, str]:
    """Of the parameters by their names, then of the ops by theirs."""
    ordered = sorted(plan.records, key=lambda record: record.op != "param")
    return {
        record.parameter or record.name: str(record.results[0].layout)
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
    parameters = made_of_parameters(plan.records)
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    for collective in plan.collectives:
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


def _largest(parts: Counter[str]) -> list[str]:
    whole = sum(parts.values())
    return [name for name, share in parts.most_common() if share >= _SAID * whole]


Price = tuple[float, Priced]
"""Seconds, and where they come from."""

_WORDS: dict[Priced, str] = {"timed": "timed", "near": "near a timed one", "modelled": "modelled"}


def refined_line(plan: PlanContent) -> str:
    """Of all seconds that the search adds up, in the plan, or in those of all stages of one."""
    if not any(stage.origin.timed for stage in plan.stages):
        return "unrefined: every price is modelled"
    priced = [*(record for stage in plan.stages for record in stage.records), *plan.collectives]
    prices: list[Price] = [(one.seconds, one.priced) for one in priced]
    return f"refined on these devices: {_shares(prices)}"


def priced_words(prices: Iterable[Price]) -> str:
    """ "timed", or, of several that differ, by shares of their seconds; "" of what takes no time."""
    found = [price for price in prices if price[0] > 0.0]
    kinds = {_WORDS[priced] for _, priced in found}
    return _shares(found) if len(kinds) > 1 else "".join(kinds)


Buckets = Mapping[Turn | None, int]
"""Turn -> how many reads have it: their transfers are merged."""


def transfer_words(operand: OperandRecord, buckets: Buckets) -> Iterator[str]:
    """ "all_gather[dp](dim=0): 4KB, 12 us timed" of each of its steps; of one that is merged with others, what it adds
    to them."""
    members = buckets.get(operand.turn, 1)
    bucket = f" more in a bucket of {members}" if members > 1 else ""
    for transfer in operand.transfers:
        cost = f"{format_bytes(transfer.nbytes)}, {price_text(transfer.seconds, transfer.priced)}{bucket}"
        yield f"{transfer.step.text()}: {cost}"


def price_text(seconds: float, priced: Priced) -> str:
    """ "12 us timed"."""
    return f"{format_seconds(seconds)} {priced_words([(seconds, priced)])}".rstrip()


def _shares(prices: Iterable[Price]) -> str:
    found = list(prices)
    whole = sum(seconds for seconds, _ in found) or 1.0
    shares = {word: sum(s for s, priced in found if priced == kind) / whole for kind, word in _WORDS.items()}
    return ", ".join(f"{share:.0%} {word}" for word, share in shares.items() if share)


def race_lines(race: Sequence[Raced]) -> list[str]:
    """One line that says who won and by how much, and one for each plan. race: the fastest first; nothing if empty."""
    if not race:
        return []
    width = max(len(one.name) for one in race)
    head = f"raced, {len(race)} plans: {race[0].name} is kept, {format_seconds(race[0].measured)} a step"
    if len(race) > 1:
        gain = race[1].measured / race[0].measured - 1.0 if race[0].measured > 0.0 else 0.0
        head += f", {gain:.1%} faster than {race[1].name}"
    return [
        head,
        *(
            f"  {one.name:{width}}  measured {format_seconds(one.measured)}, "
            f"predicted {format_seconds(one.predicted)}: {one.words}"
            for one in race
        ),
    ]


def memory_words(plan: PlanContent) -> str:
    """All that counts against the limit, and how much of it is no tensor."""
    limit = "" if plan.memory_limit is None else f" of {format_bytes(plan.memory_limit)}"
    tensors, reserve = format_bytes(plan.peak_memory), format_bytes(plan.reserve)
    beside = f": {tensors} of tensors, {reserve} for context and communicators" if plan.reserve else ""
    return f"{format_bytes(plan.peak_memory + plan.reserve)}{limit} on the fullest device, predicted{beside}"


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
    return ["parameters"] + [f"  {name:{width}} {layout}{times(count)}" for name, layout, count in rows]


def times(count: int) -> str:
    """Behind a line that stands for several."""
    return f"  x {count}" if count > 1 else ""


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
