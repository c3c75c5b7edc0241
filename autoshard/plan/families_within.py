"""What families of plans allow, where a memory limit keeps the fastest plan of all from being taken.

States are chosen by what the search counts; a family's plan is one whole program, as it is judged. Where little room is
left for states, such as in models whose weights are most of what they hold, it may be the faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from autoshard.plan.families import FAMILIES, family_named
from autoshard.plan.family_choices import family_narrowing
from cost_model.errors import InfeasibleError
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.search.narrowing import Narrowing

SMALL_NODES, FEW_NODES = 64, 500
"""Of the largest graphs of which all families are searched, and of which FSDP is. All of them took blocks of 300 nodes
three times as long to plan; of 4 layers of Llama-3-8B FSDP took 6 s of 36, and states did better."""


@dataclass(frozen=True)
class FamilyWithin:
    """allowed: what the family allows."""

    allowed: Narrowing

    def narrowing(self, task: Narrowing) -> Narrowing:
        """Of a task that allows all."""
        return self.allowed


def families_within(joint: JointGraph, mesh: MeshSpec) -> Iterator[FamilyWithin]:
    """FSDP first, which holds least, and in a small graph all others: those that the mesh and the model have."""
    fsdp = family_named("FSDP")
    assert fsdp is not None
    count = len(joint.graph.nodes)
    first = [fsdp] if count <= FEW_NODES else []
    others = [family for family in FAMILIES if family is not fsdp and count <= SMALL_NODES]
    for family in (*first, *others):
        with suppress(InfeasibleError):
            yield FamilyWithin(family_narrowing(family, joint, mesh))
