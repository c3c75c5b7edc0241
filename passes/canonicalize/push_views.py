from __future__ import annotations

from dataclasses import dataclass

from passes.canonicalize.matmul_to_contract import PRODUCTS_ARE_CONTRACTS
from passes.canonicalize.merge_duplicates import NO_DUPLICATES
from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.canonicalize.push_rules import push_rule
from passes.canonicalize.push_sweep import Sweep
from passes.canonicalize.view_properties import ONE_RESHAPE, PERMUTES_ABSORBED, PERMUTES_FUSED
from passes.ir.graph_pass import GraphPass
from passes.ir.graph_properties import NO_USES
from passes.ir.joint import JointGraph
from passes.ir.rewrite import erase_dead

__all__ = ["PushViews"]


@dataclass(frozen=True)
class PushViews(GraphPass):
    """Compute on the finer dims: move flattening reshapes down past every op that need not see them.

        %f: f32[64, 96]    = aten.reshape(%x, [64, 96])              // %x: f32[4, 16, 96]
        %m: f32[64, 1]     = aten.amax(%f, [1], True)
        %d: f32[64, 96]    = aten.sub(%f, %m)
        %y: f32[64, 32]    = contract(%d, %w, "m k, k n -> m n")
        %z: f32[4, 16, 32] = aten.reshape(%y, [4, 16, 32])
        ->
        %m: f32[4, 16, 1]  = aten.amax(%x, [2], True)
        %d: f32[4, 16, 96] = aten.sub(%x, %m)
        %z: f32[4, 16, 32] = contract(%d, %w, "m0 m1 k, k n -> m0 m1 n")

    A dim flattened from (batch, sequence) can be split only by whole batches; once the two are dims
    of their own, the sequence can be split alone. One forward sweep: a reshape emits nothing where it
    only merges dims, but is remembered as a `Flat`; ops in push_rules.py compute on the finer dims and
    hand the flattening on; any other reader, and the output, gets the reshape. Where partners
    disagree about the finer dims of a dim, `dim_groups.resolve` says which win.
    """

    requires = (ONE_SPELLING, NO_USES, PRODUCTS_ARE_CONTRACTS)
    ensures = (ONE_RESHAPE,)
    breaks = (NO_DUPLICATES, PERMUTES_FUSED, PERMUTES_ABSORBED)

    def __call__(self, joint: JointGraph) -> JointGraph:
        sweep = Sweep(push_rule)
        for node in list(joint.graph.nodes):
            sweep.visit(node)
        erase_dead(joint.graph)
        return joint
