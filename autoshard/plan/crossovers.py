"""At which bandwidth of which links another plan would be faster: searched again over slower and faster links.

Of a link level the search runs at the far end of the range. If another plan wins there, both are priced at bandwidths
between, until they take equally long, and there it searches again: a third plan that wins takes the other's place, and
so on, until none does [Eisner and Severance 1976, for parametric problems].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_words import words_apart
from autoshard.plan.why_not import Again, Variant
from cost_model.groups import mesh_occupancies
from cost_model.memory import format_bytes

RANGE = 16.0
"""How many times slower and faster links are looked at."""
_WINS = 5e-3
"""Share of a step by which another plan must be faster."""
_EQUAL = 1e-5
"""Share of a step by which two plans may differ to be taken for equally fast."""
_STEPS = 12
"""At the most, of pricing two plans to find where they are."""
_SEARCHES = 4
"""At the most, of one level in one direction."""


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
            return f"{self.link} (level {self.level}, {_rate(self.now)}): faster even now: {self.words}"
        sign = "less" if self.slower_links else "more"
        unsure = "" if self.confirmed else " or nearer to it"
        return (
            f"{self.link} (level {self.level}, now {_rate(self.now)}) at {_rate(self.bytes_per_second)} or {sign}"
            f"{unsure}: {self.words}"
        )


def crossovers(plan: PlanContent, again: Again) -> tuple[Crossover, ...]:
    """For every level that the mesh uses, the nearest bandwidth below and above the profile's, if another plan wins
    within `RANGE`."""
    lines = [_Line(plan, again, level) for level in _levels(plan, again)]
    found = [line.nearest(end) for line in lines for end in (1.0 / RANGE, RANGE)]
    return tuple(one for one in found if one is not None)


def crossover_lines(found: Sequence[Crossover]) -> list[str]:
    """For `explain`."""
    head = f"crossovers, links of one level up to {RANGE:g} times slower or faster, searched again"
    return [head, *(f"  {one}" for one in found)] if found else [head, "  none: this plan stays the fastest"]


def _rate(bytes_per_second: float) -> str:
    return f"{format_bytes(round(bytes_per_second))}/s"


def _levels(plan: PlanContent, again: Again) -> list[int]:
    axes = plan.mesh.real_axes()
    groups = mesh_occupancies(plan.mesh, axes, again.profile.link_domains) if axes else frozenset()
    return sorted({use.level for group in groups for use in group.uses})


@dataclass(frozen=True)
class _Line:
    """The plans over one link level, by the factor of its bandwidth."""

    plan: PlanContent
    again: Again
    level: int

    def nearest(self, end: float) -> Crossover | None:
        """The crossover nearest to factor 1 between it and `end`; None if no plan wins at `end`."""
        rival, factor, confirmed = self._rival(end), end, False
        if rival is None:
            return None
        for _ in range(_SEARCHES - 1):
            factor = self._equal(rival, factor)
            closer = self._rival(factor) if factor != 1.0 else None
            if closer is None:
                confirmed = True
                break
            rival = closer
        link = self.again.profile.links[self.level]
        return Crossover(
            level=self.level,
            link=link.name,
            bytes_per_second=link.bytes_per_second * factor,
            now=link.bytes_per_second,
            slower_links=end < 1.0,
            step_time=self._seconds(self.plan, factor),
            words=words_apart(self.plan, rival),
            confirmed=confirmed,
            plan=rival,
        )

    def _rival(self, factor: float) -> PlanContent | None:
        """What the search finds with links so fast, if it is faster there than the plan."""
        found = self.again.search(self._variant(factor))
        return found if found.step_time < (1.0 - _WINS) * self._seconds(self.plan, factor) else None

    def _equal(self, rival: PlanContent, end: float) -> float:
        """The factor between 1 and `end`, where the rival wins, at which both take equally long; 1.0 if it wins there
        too. Seconds are nearly linear in the inverse of the factor: regula falsi (Illinois) in that."""
        loses, wins = 1.0, 1.0 / end
        low, high = self._ahead(rival, loses), self._ahead(rival, wins)
        if low >= 0.0:
            return 1.0
        middle = wins
        for _ in range(_STEPS):
            middle = (loses * high - wins * low) / (high - low)
            value = self._ahead(rival, middle)
            if abs(value) < _EQUAL:
                break
            if value > 0.0:
                wins, high, low = middle, value, low / 2
            else:
                loses, low, high = middle, value, high / 2
        return 1.0 / middle

    def _ahead(self, rival: PlanContent, inverse: float) -> float:
        """Share of a step by which the rival is faster."""
        return 1.0 - self._seconds(rival, 1.0 / inverse) / self._seconds(self.plan, 1.0 / inverse)

    def _seconds(self, plan: PlanContent, factor: float) -> float:
        return self.again.step_seconds(plan, self._variant(factor))

    def _variant(self, factor: float) -> Variant:
        return Variant(link=(self.level, factor))
