"""Why a plan is not another one: found again with a node pinned, as one of a family, or over other links."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autoshard.plan.explain import plan_difference
from autoshard.plan.families import (
    FAMILIES,
    Again,
    Family,
    Variant,
    asked_otherwise,
    family_named,
    near_families,
)
from autoshard.plan.family_choices import family_narrowing
from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_ends import pinned_layout
from autoshard.plan.plan_words import plan_words, words_apart
from cost_model.errors import InfeasibleError, PlanError
from cost_model.groups import mesh_occupancies
from cost_model.memory import format_bytes, format_seconds
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value, node_values
from passes.layout.assignment import NodeLayouts
from passes.search.narrowing import Choose, Narrowing
from passes.states.compute_again import AGAIN

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
        # Behind the first search at most so many more.
        for _ in range(3):
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
        # Share of a step by which another plan must be faster.
        return found if found.step_time < (1.0 - 5e-3) * self._seconds(self.plan, factor) else None

    def _equal(self, rival: PlanContent, end: float) -> float:
        """The factor between 1 and `end`, where the rival wins, at which both take equally long; 1.0 if it wins there
        too. Seconds are nearly linear in the inverse of the factor: regula falsi (Illinois) in that."""
        loses, wins = 1.0, 1.0 / end
        low, high = self._ahead(rival, loses), self._ahead(rival, wins)
        if low >= 0.0:
            return 1.0
        middle = wins
        # At the most, of pricing two plans to find where they are.
        for _ in range(12):
            middle = (loses * high - wins * low) / (high - low)
            value = self._ahead(rival, middle)
            # Share of a step by which two plans may differ to be taken for equally fast.
            if abs(value) < 1e-5:
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


def why_not_family(plan: PlanContent, again: Again, name: str) -> str:
    """The best plan of the family against `plan`. PlanError for a name of no family."""
    family = family_named(name)
    if family is None:
        raise PlanError(_unknown(plan, name, None))
    try:
        found = again.search(Variant(family=family))
    except InfeasibleError as error:
        return f"{family.name} ({family.text}): no plan\n  {error}\n"
    if not is_of_family(found, family):
        return f"{family.name} ({family.text}): no plan\n  none of the model's weights can be split so\n"
    head = f"{family.name} ({family.text}): {_verdict(plan, found)}\n{plan_words(found)}\n"
    return head + plan_difference(plan, found)


def why_not_pinned(plan: PlanContent, again: Again, name: str, placements: Any) -> str:
    """The plan with a parameter, those of a pattern, or a node so. PlanError for a name of none; InfeasibleError if
    there is no such plan; ShardingError for placements that do not fit."""
    variant = (
        Variant(pins={name: placements}) if _parameters(plan, name) else _node_variant(plan, name, placements)
    )
    return plan_difference(plan, again.search(variant))


def _node_variant(plan: PlanContent, name: str, placements: Any) -> Variant:
    record = next((r for r in plan.records if r.name == name), None)
    if record is None:
        raise PlanError(_unknown(plan, name, placements))
    if record.op == "param":
        return Variant(pins={record.parameter: placements})
    if record.op in _ENDS:
        raise PlanError(
            f"why_not({name!r}, ...): its layout is not the search's to choose\n  try: {_ENDS[record.op]}"
        )
    return Variant(nodes={name: placements})


_FIXED = "the name of a parameter or of an op"
_ENDS = {
    "input": "find_plan(..., in_placements=...), and plan.diff(other)",
    "output": "find_plan(..., out_placements=...), and plan.diff(other)",
    "tangent": "find_plan(..., out_placements=...), and plan.diff(other)",
    "buffer": _FIXED,
    "constant": _FIXED,
    "seed": _FIXED,
}
"""What decides the layouts of the ends of a graph."""


def _parameters(plan: PlanContent, pattern: str) -> list[str]:
    return [name for name in plan.parameter_layouts if fnmatch.fnmatchcase(name, pattern)]


def _unknown(plan: PlanContent, name: str, placements: Any) -> str:
    """A node's name lacks placements, a family's has them, or nobody has it."""
    known = [*plan.parameter_layouts, *(record.name for record in plan.records)]
    if placements is None and (name in known or _parameters(plan, name)):
        return f"why_not({name!r}) lacks placements\n  try: why_not({name!r}, [Replicate(), ...]), one per mesh axis"
    if family_named(name) is not None:
        return f"why_not({name!r}, ...): a family of plans takes no placements\n  try: why_not({name!r})"
    asked = asked_otherwise(name)
    near = [asked] if asked else [*difflib.get_close_matches(name, known, n=3), *near_families(name)]
    return (
        f"why_not({name[:100]!r}): the plan has no parameter or node of that name, and no family has it\n"
        f"  the families: {', '.join(family.name for family in FAMILIES)}\n"
        f"  try: {' or '.join(near) or 'one of these, or a name from to_text()'}"
    )


def is_of_family(plan: PlanContent, family: Family) -> bool:
    """Whether any weight is as each role that splits has it."""
    layouts = plan.parameter_layouts.values()
    roles = family.roles(plan.mesh).items()
    return all(role == "whole" or any(axis in layout.axes for layout in layouts) for axis, role in roles)


def _verdict(mine: PlanContent, other: PlanContent) -> str:
    change = other.step_time / mine.step_time - 1.0
    times = f"step {format_seconds(mine.step_time)} -> {format_seconds(other.step_time)}"
    # Share of a step under which two plans are said to be equally fast.
    if abs(change) < 1e-3:
        same = mine.parameter_layouts == other.parameter_layouts
        return f"the plan is one, {times}" if same else f"as fast, {times}"
    return f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}, {times}"


def variant_narrowing(variant: Variant, joint: JointGraph, mesh: MeshSpec) -> Narrowing:
    """What the variant allows. InfeasibleError for a family that cannot be, PlanError for a node that `joint` lacks."""
    if variant.family is not None:
        return family_narrowing(variant.family, joint, mesh)
    named = {node.name: node for node in joint.graph.nodes}
    for name in variant.nodes.keys() - named.keys():
        raise PlanError(_only_in_the_plan(name, named))
    return Narrowing(
        allowed={name: _pinned(named[name], given, mesh) for name, given in variant.nodes.items()}
    )


def _only_in_the_plan(name: str, named: Mapping[str, fx.Node]) -> str:
    """Of a node that a limit made, such as an op's copy in the backward: other plans have other ones."""
    origin = name.partition(AGAIN)[0]
    known = repr(origin) if origin in named else "a node without a limit"
    return (
        f"why_not({name!r}, ...): it is there for the memory limit of this plan, and another plan may not have it\n"
        f"  try: why_not({known}, ...)"
    )


def _pinned(node: fx.Node, placements: Any, mesh: MeshSpec) -> Choose:
    # A convolution's backward that makes no gradient of its input has none as its first.
    first = next(i for i, value in enumerate(node_values(node)) if value is not None)
    layout = pinned_layout(placements, tuple(node_value(node, first).shape), mesh, f"node {node.name}")

    def choose(strategies: Sequence[NodeLayouts]) -> Sequence[int]:
        found = [i for i, strategy in enumerate(strategies) if strategy.results[first] == layout]
        if not found:
            known = list(dict.fromkeys(str(strategy.results[first]) for strategy in strategies))
            raise InfeasibleError(
                f"no way to compute node {node.name} leaves {layout}; those there are leave one of\n"
                f"    {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}\n"
                "  try: one of these, or a node that reads it"
            )
        return found

    return choose
