"""Plans found again for a question: with a node pinned, as one of a family, or over other links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autoshard.plan.families import Family
from autoshard.plan.family_choices import family_narrowing
from autoshard.plan.pins import pinned_layout
from autoshard.plan.plan_content import PlanContent
from cost_model.errors import InfeasibleError, PlanError
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.ir.joint import JointGraph, node_value, node_values
from passes.layout.assignment import NodeLayouts
from passes.search.narrowing import Choose, Narrowing
from passes.states.backward_copies import AGAIN

__all__ = ["Again", "Variant", "variant_narrowing"]


@dataclass(frozen=True)
class Variant:
    """What is otherwise when a plan is found again.

    pins: parameter or pattern -> placements, besides the task's own pins. nodes: node name -> placements of the first
    result that it has. family: instead of pins, the task's own included. link: (level, factor) of a bandwidth of the
    profile.
    """

    pins: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[str, Any] = field(default_factory=dict)
    family: Family | None = None
    link: tuple[int, float] | None = None


@dataclass(frozen=True)
class Again:
    """What a plan's own questions need of the task that it was found for.

    profile: its prices. search: the plan of a variant. step_seconds: predicted, of a plan's layouts under a variant's
    prices, lowered as those have it. paced: the same, of a step that takes so many times as long as modelled.

    It holds the model's graph, so it stays in its process: pickled it is None, as in a plan's file.
    """

    profile: Profile
    search: Callable[[Variant], PlanContent]
    step_seconds: Callable[[PlanContent, Variant], float]
    paced: Callable[[float], Again]

    def __deepcopy__(self, memo: dict[int, Any]) -> Again:
        """Itself: nothing of it changes."""
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


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
