from __future__ import annotations

from dataclasses import dataclass

from passes.ir.graph_pass import GraphPass
from passes.ir.graph_properties import NO_DEAD_CODE
from passes.ir.joint import JointGraph
from passes.ir.rewrite import erase_dead

__all__ = ["RemoveDeadCode"]


@dataclass(frozen=True)
class RemoveDeadCode(GraphPass):
    """Erase ops whose results nothing reads. Placeholders stay: they are the calling convention.

    %unused: f32[8] = aten.relu(%x)
    ->
    (nothing)
    """

    ensures = (NO_DEAD_CODE,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        erase_dead(joint.graph)
        return joint
