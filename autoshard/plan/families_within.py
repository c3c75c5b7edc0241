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

__all__ = ["FEW_NODES", "FamilyWithin", "families_within"]

FEW_NODES = 500
"""Of the largest graph of which families are searched. In larger ones a search takes seconds: of 4 layers of Llama-3-8B
FSDP took 6 of 36, and what states made of the fastest plan was faster."""


@dataclass(frozen=True)
class FamilyWithin:
    """allowed: what the family allows."""

    allowed: Narrowing

    def narrowing(self, task: Narrowing) -> Narrowing:
        """Of a task that allows all."""
        return self.allowed


def families_within(joint: JointGraph, mesh: MeshSpec) -> Iterator[FamilyWithin]:
    """Those that the mesh and the model have, FSDP first, which holds least; of a large graph none."""
    first = family_named("FSDP")
    assert first is not None
    if len(joint.graph.nodes) > FEW_NODES:
        return
    for family in (first, *(family for family in FAMILIES if family is not first)):
        with suppress(InfeasibleError):
            yield FamilyWithin(family_narrowing(family, joint, mesh))
