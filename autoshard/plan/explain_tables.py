"""Tables and lines of which explanations are made: prices, race, memory, collectives, parameters, fallbacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from autoshard.plan.equal_layers import fold_numbers
from autoshard.plan.plan_collectives import Collective, collectives_of
from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_memory import MemoryTimeline, kind_lines
from autoshard.plan.plan_origin import Raced
from cost_model.memory import format_bytes
from cost_model.timed import Priced
from passes.layout.layout import Layout
from passes.plan.graph_text import format_seconds

Price = tuple[float, Priced]
"""Seconds, and where they come from."""

_WORDS: dict[Priced, str] = {"timed": "timed", "near": "near a timed one", "modelled": "modelled"}


def refined_line(*plans: PlanContent) -> str:
    """Of all seconds that the search adds up, in the plan, or in those of all stages of one."""
    if not any(plan.origin.timed for plan in plans):
        return "unrefined: every price is modelled"
    records = [record for plan in plans for record in plan.records]
    prices: list[Price] = [(record.seconds, record.priced) for record in records]
    prices.extend((one.seconds, one.priced) for plan in plans for one in collectives_of(plan.records))
    return f"refined on these devices: {_shares(prices)}"


def priced_words(prices: Iterable[Price]) -> str:
    """ "timed", or, of several that differ, by shares of their seconds; "" of what takes no time."""
    found = [price for price in prices if price[0] > 0.0]
    kinds = {_WORDS[priced] for _, priced in found}
    return _shares(found) if len(kinds) > 1 else "".join(kinds)


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
