"""Why a plan is not another one: found again with a node pinned, as one of a family, or over other links."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from torch import fx

from autoshard.plan.crossovers import Crossover, SizeCrossover, link_crossovers, size_crossovers, size_lines
from autoshard.plan.explain import plan_difference
from autoshard.plan.families import (
    FAMILIES,
    Again,
    Carried,
    Family,
    Variant,
    asked_otherwise,
    family_named,
    near_families,
)
from autoshard.plan.family_choices import family_narrowing
from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_ends import pinned_layout
from autoshard.plan.plan_words import plan_words
from cost_model.errors import InfeasibleError, PlanError, few, folded, reject
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value, node_values
from passes.ir.routing import checked_routing
from passes.layout.layout import NodeLayouts
from passes.search.search_terms import Choose, Narrowing
from passes.states.compute_again import AGAIN


@dataclass(frozen=True)
class PlanQuestions(PlanContent):
    """again: the task that it was found for; None of a plan that was loaded or unpickled."""

    again: Again | None = field(default=None, compare=False, repr=False)

    def at(self, *, routing: float | Sequence[float] | None = None, **sizes: int) -> Self:
        """The plan at other sizes of its call, `plan.at(sequence=4096)`: its layouts wherever they fit and what it
        computes again, predicted anew; nothing is proven of it, and no memory limit is asked.

        sizes: "batch", "sequence", "height", "width" (docs/plans.md), of the whole call; what is not named stays.
        routing: how unevenly experts are loaded there, as `find_plan` takes it; None: as the plan has it.
        PlanError as `crossovers`, ShardingError for a size that the call does not have, CaptureError for one that the
        model does not take."""
        return cast(
            Self, self._carried("at(...)")(self, sizes, None if routing is None else checked_routing(routing))
        )

    def step_time_at(self, **there: Any) -> float:
        """Predicted seconds of a step of the plan's layouts at other sizes, or with other loads of experts (`at`)."""
        return self.at(**there).step_time

    def memory_at(self, **there: Any) -> int:
        """Predicted bytes on the fullest device at other sizes, or with other loads of experts (`at`)."""
        return self.at(**there).peak_memory

    def size_crossovers(self, **ranges: tuple[int, int]) -> tuple[SizeCrossover, ...]:
        """From which size on another plan wins, and which: of each name the nearest below and above, within the range
        that is given, `plan.size_crossovers(sequence=(1, 8192))`; the other sizes stay. Between, the plan stays the
        fastest of those known. Searches again, at most 4 times a direction, plans in as many pieces; raises as `at`."""
        self._carried("size_crossovers(...)")
        return size_crossovers(self, self._again("size_crossovers(...)", "size_crossovers(...)"), ranges)

    def _asked_sizes(self) -> list[str]:
        ranges = {} if self.again is None else self.again.ranges
        return size_lines(self.size_crossovers(**ranges), ranges) if ranges else []

    def crossovers(self) -> tuple[Crossover, ...]:
        """At which bandwidth of each link level another plan would win, and which: the nearest below and above.

        Searches again, over links of one level up to 16 times slower and faster: at most 4 searches a direction. Of a
        loaded plan, and of one with stages, which are not planned again for a question: PlanError."""
        return link_crossovers(self, self._again("crossovers()", "crossovers()"))

    def why_not(self, parameter: str, placements: Any = None) -> str:
        """The plan found again otherwise, and what it costs more.

        parameter: a parameter, a pattern of them or any op's name in `to_text()`, pinned to `placements` (of an op its
        first result). Without placements a family of plans: "DDP", "FSDP", "TP", ... (docs/patterns.md).

        PlanError for an unknown name, with near ones, and as `crossovers`; InfeasibleError if
        no plan has it so, ShardingError if the placements do not fit. A family without a plan is told why.
        """
        if not isinstance(parameter, str):
            raise PlanError(
                str(reject("parameter", parameter, "a parameter's or node's name, or a family's"))
            )
        again = self._again(f"why_not({parameter!r})", "why_not(...)")
        if placements is None:
            return why_not_family(self, again, parameter)
        return why_not_pinned(self, again, parameter, placements)

    def _carried(self, question: str) -> Carried:
        again = self.again
        if again is None or again.carried is None:
            raise PlanError(
                f"{question} captures the call at other sizes, and this plan is of a stage, or loaded or unpickled\n"
                "  try: the plan of the whole call, plan = find_plan(model, mesh, example_inputs)"
            )
        return again.carried

    def _again(self, question: str, of_a_stage: str) -> Again:
        if self.axis:
            raise PlanError(
                f"{of_a_stage} is not there for plans with stages\n"
                f"  try: plan.stages[0].{of_a_stage}, of one stage as it is cut"
            )
        if self.again is None:
            raise PlanError(
                f"{question} must search again, and this plan was loaded from a file or unpickled, "
                "as that of `autoshard` is on ranks other than 0\n"
                "  try: on rank 0; or plan = find_plan(model, mesh, example_inputs), then ask that plan"
            )
        return self.again


def why_not_family(plan: PlanContent, again: Again, name: str) -> str:
    """The best plan of the family against `plan`. PlanError for a name of no family."""
    family = family_named(name)
    if family is None:
        raise PlanError(_unknown(plan, name, None))
    none = folded(f"{family.name} ({family.text}): no plan", 2)
    try:
        found = again.search(Variant(family=family))
    except InfeasibleError as error:
        return f"{none}\n  {error}\n"
    if not is_of_family(found, family):
        return f"{none}\n  none of the model's weights can be split so\n"
    head = f"{family.name} ({family.text}): {_verdict(plan, found)}", plan_words(found)
    return "".join(f"{folded(line, 2)}\n" for line in head) + plan_difference(plan, found)


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
    listed = ", ".join(family.name for family in FAMILIES)
    near = [asked] if asked else [*difflib.get_close_matches(name, known, n=3), *near_families(name)]
    return (
        f"why_not({name[:100]!r}): the plan has no parameter or node of that name, and no family has it\n"
        f"{folded(f'  the families: {listed}')}\n"
        f"  try: {' or '.join(near) or 'one of these, or a name from to_text()'}"
    )


def is_of_family(plan: PlanContent, family: Family) -> bool:
    """Whether any weight is as each role that splits has it."""
    layouts = plan.parameter_layouts.values()
    splits = [axis for axis, role in family.roles(plan.mesh) if role not in ("whole", "sequence")]
    return all(any(axis in layout.axes for layout in layouts) for axis in splits)


def _verdict(mine: PlanContent, other: PlanContent) -> str:
    change = other.step_time / mine.step_time - 1.0
    # Share of a step under which two plans are said to be equally fast.
    if abs(change) < 1e-3:
        return "the plan is one" if mine.parameter_layouts == other.parameter_layouts else "as fast"
    return f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}"


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
                f"    {few(known, 12, ', ...')}\n"
                "  try: one of these, or a node that reads it"
            )
        return found

    return choose
