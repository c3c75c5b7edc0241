"""Where another plan wins: over other links, and at other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.plan.families import Again, Ranges, Variant
from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_words import words_apart
from cost_model.errors import folded, reject
from cost_model.groups import mesh_occupancies
from cost_model.memory import format_bytes, format_seconds
from passes.ir.size_names import size_named

RANGE = 16.0
"""How many times slower and faster links are looked at."""


@dataclass(frozen=True)
class Crossover:
    """level, link: place and name of the link level in the profile. bytes_per_second: of it, where the plan and `plan`
    take equally long, `step_time` seconds; now: what the profile says. slower_links: whether `plan` wins at this
    bandwidth and less, or at this and more. words: `plan` in a line. confirmed: a search at this bandwidth found none
    that is faster than both; without, one may win still nearer to `now`.

    Where `bytes_per_second` is `now`, `plan` is faster with the links as they are: the search had not found it."""

    level: int
    link: str
    bytes_per_second: float
    now: float
    slower_links: bool
    step_time: float
    words: str
    confirmed: bool
    plan: PlanContent = field(repr=False, compare=False)

    def __str__(self) -> str:
        if self.bytes_per_second == self.now:
            return folded(
                f"{self.link} (level {self.level}, {_rate(self.now)}): faster even now: {self.words}"
            )
        sign = "less" if self.slower_links else "more"
        unsure = "" if self.confirmed else " or nearer to it"
        return folded(
            f"{self.link} (level {self.level}, now {_rate(self.now)}) at {_rate(self.bytes_per_second)} or {sign}"
            f"{unsure}: {self.words}"
        )


@dataclass(frozen=True)
class SizeCrossover:
    """name: of the size. size: from it on, away from `now`, `plan` takes less than the plan; step_time: seconds of both
    there, nearly. words, confirmed, plan: as of `Crossover`. Where `size` is `now`, `plan` is faster there."""

    name: str
    size: int
    now: int
    step_time: float
    words: str
    confirmed: bool
    plan: PlanContent = field(repr=False, compare=False)

    def __str__(self) -> str:
        if self.size == self.now:
            return folded(f"{self.name} {self.now}: faster even now: {self.words}")
        sign = "less" if self.size < self.now else "more"
        unsure = "" if self.confirmed else " or nearer to it"
        seconds = format_seconds(self.step_time)
        return folded(
            f"{self.name} (now {self.now}) of {self.size} or {sign}{unsure}, {seconds} a step: {self.words}"
        )


def link_crossovers(plan: PlanContent, again: Again) -> tuple[Crossover, ...]:
    """For every level that the mesh uses, the nearest bandwidth below and above the profile's, if another plan wins
    within `RANGE`."""
    return tuple(itertools.chain.from_iterable(_of_level(plan, again, one) for one in _levels(plan, again)))


def _of_level(plan: PlanContent, again: Again, level: int) -> Iterator[Crossover]:
    # Seconds are nearly linear in the inverse of the factor.
    variant = lambda inverse: Variant(link=(level, 1.0 / inverse))
    seconds = lambda one, inverse: again.step_seconds(one, variant(inverse))
    line = _Line(plan, 1.0, seconds, lambda inverse: again.search(variant(inverse)))
    link = again.profile.links[level]
    now = link.bytes_per_second
    for end in (RANGE, 1.0 / RANGE):
        if (nearest := line.nearest(end)) is not None:
            inverse, won = nearest
            yield Crossover(level, link.name, now / inverse, now, end > 1.0, *won)


def size_crossovers(plan: PlanContent, again: Again, ranges: Ranges) -> tuple[SizeCrossover, ...]:
    """For every name, the nearest size below and above the call's, if another plan wins within the range."""
    return tuple(itertools.chain.from_iterable(_of_size(plan, again, *one) for one in ranges.items()))


def _of_size(plan: PlanContent, again: Again, name: str, ends: object) -> Iterator[SizeCrossover]:
    """Between the ends, sizes that all ranks share evenly are looked at alone."""
    first, last = checked_range(name, ends)
    now, carried = size_named(again.shapes, name), again.carried
    assert carried is not None
    known: dict[tuple[int, int], tuple[PlanContent, float]] = {}

    def seconds(one: PlanContent, size: float) -> float:
        key = id(one), int(size)
        if key not in known:
            known[key] = one, carried(one, {name: int(size)}, None).step_time
        return known[key][1]

    search = lambda size: again.search(Variant(sizes={name: int(size)}))
    line = _Line(plan, now, seconds, search, plan.mesh.device_count)
    for end in dict.fromkeys((min(first, now), max(last, now))):
        nearest = line.nearest(end) if end != now else None
        if nearest is not None:
            size, won = nearest
            yield SizeCrossover(name, int(size), now, *won)


def checked_range(name: str, ends: object) -> tuple[int, int]:
    """ShardingError for what is no range of sizes."""
    match ends:
        case (int(first), int(last)) if 1 <= first <= last:
            return first, last
        case _:
            raise reject(f"the range of {name!r}", ends, "the least and the largest size, such as (1, 8192)")


def crossover_lines(found: Sequence[Crossover]) -> list[str]:
    """For `explain`."""
    head = f"crossovers, links of one level up to {RANGE:g} times slower or faster, searched again"
    return [head, *(_listed(found) or ["  none: this plan stays the fastest"])]


def size_lines(found: Sequence[SizeCrossover], ranges: Ranges) -> list[str]:
    """For `explain`."""
    asked = ", ".join(f"{name} {first} to {last}" for name, (first, last) in ranges.items())
    lines = _listed(found) or ["  none: of those known this plan stays the fastest"]
    return [f"crossovers in sizes, {asked}, one at a time, searched again", *lines]


def _listed(found: Sequence[Crossover | SizeCrossover]) -> list[str]:
    """Folded anew, further in."""
    return [folded(f"  {' '.join(str(one).split())}") for one in found]


def _rate(bytes_per_second: float) -> str:
    return f"{format_bytes(round(bytes_per_second))}/s"


def _levels(plan: PlanContent, again: Again) -> list[int]:
    axes = plan.mesh.real_axes()
    groups = mesh_occupancies(plan.mesh, axes, again.profile.link_domains) if axes else frozenset()
    return sorted({use.level for group in groups for use in group.uses})


@dataclass(frozen=True)
class _Line:
    """The plans along a number of which their seconds are nearly linear. now: of it. seconds: of a plan's layouts at a
    number; search: the plan found there. step: of whole numbers, those between that are looked at; 0: any number."""

    plan: PlanContent
    now: float
    seconds: Callable[[PlanContent, float], float]
    search: Callable[[float], PlanContent]
    step: int = 0

    def nearest(self, end: float) -> tuple[float, tuple[float, str, bool, PlanContent]] | None:
        """The crossover nearest to `now` between it and `end`: the number, seconds there, the other plan in words,
        whether that is confirmed, and the plan; None if no plan wins at `end`."""
        rival, number, confirmed = self._rival(end, self.plan), end, False
        if rival is None:
            return None
        # Behind the first search at most so many more.
        for _ in range(3):
            number = self._equal(rival, number)
            closer = self._rival(number, self.plan, rival) if number != self.now else None
            if closer is None:
                confirmed = True
                break
            rival = closer
        return number, (self.seconds(self.plan, number), words_apart(self.plan, rival), confirmed, rival)

    def _rival(self, number: float, *known: PlanContent) -> PlanContent | None:
        """What the search finds there, if it is faster than the plans that are known."""
        found = self.search(number)
        least = min(self.seconds(one, number) for one in known)
        # Share of a step by which another plan must be faster.
        return found if found.step_time < (1.0 - 5e-3) * least else None

    def _equal(self, rival: PlanContent, end: float) -> float:
        """Between `now` and `end`, where the rival wins, the number at which both take equally long, of whole ones the
        first at which the rival wins; `now` if it wins there too. Regula falsi (Illinois)."""
        loses, wins = self.now, end
        low, high = self._ahead(rival, loses), self._ahead(rival, wins)
        if low >= 0.0:
            return self.now
        # At the most, of pricing two plans to find where they are.
        for _ in range(12):
            middle = self._between(loses, wins, low / (low - high))
            if middle is None:
                break
            value = self._ahead(rival, middle)
            if value > 0.0:
                wins, high, low = middle, value, low / 2
            else:
                loses, low, high = middle, value, high / 2
            # Share of a step by which two plans may differ to be taken for equally fast.
            if not self.step and abs(value) < 1e-5:
                return middle
        return wins

    def _between(self, loses: float, wins: float, share: float) -> float | None:
        """So far from one to the other; of whole numbers one that is between, or None."""
        middle = loses + share * (wins - loses)
        if not self.step:
            return middle
        low, high = sorted((int(loses), int(wins)))
        first, last = (low // self.step + 1) * self.step, (high - 1) // self.step * self.step
        return min(max(round(middle / self.step) * self.step, first), last) if first <= last else None

    def _ahead(self, rival: PlanContent, number: float) -> float:
        """Share of a step by which the rival is faster."""
        return 1.0 - self.seconds(rival, number) / self.seconds(self.plan, number)
