"""From the captured graph to the primitive ops that rules are written for."""

from __future__ import annotations

from passes.canonicalize.absorb_permutes import AbsorbPermutes
from passes.canonicalize.drop_kept_dims import DropKeptDims
from passes.canonicalize.drop_unit_dims import DropUnitDims
from passes.canonicalize.fuse_permutes import FusePermutes
from passes.canonicalize.insert_uses import InsertUses
from passes.canonicalize.mark_causal_masks import MarkCausalMasks
from passes.canonicalize.matmul_to_contract import MatmulToContract
from passes.canonicalize.merge_duplicates import MergeDuplicates
from passes.canonicalize.normalize_arguments import NormalizeArguments
from passes.canonicalize.normalize_creations import NormalizeCreations
from passes.canonicalize.pads_to_cat import PadsToCat
from passes.canonicalize.push_views import PushViews
from passes.canonicalize.random_to_uniform import RandomToUniform
from passes.canonicalize.remove_dead_code import RemoveDeadCode
from passes.canonicalize.remove_noops import RemoveNoops
from passes.canonicalize.scatter_to_where import ScatterToWhere
from passes.canonicalize.sink_expands import SinkExpands
from passes.canonicalize.split_convolution_backward import SplitConvolutionBackward
from passes.canonicalize.write_conjugates import WriteConjugates
from passes.ir.autocast_off import autocast_off
from passes.ir.collector import collector_paused
from passes.ir.graph_pass import GraphPass, run_passes
from passes.ir.joint import JointGraph
from passes.ir.rewrite import copy_joint

__all__ = ["PIPELINE", "canonicalize"]

PIPELINE: tuple[GraphPass, ...] = (
    # One spelling for everything, so that the passes below match few forms.
    WriteConjugates(),  # before clones are dropped: of a conjugate they are more than copies
    NormalizeArguments(),
    NormalizeCreations(),
    RemoveNoops(),
    RemoveDeadCode(),  # before draws are given streams: an unread draw should not take one
    RandomToUniform(),
    ScatterToWhere(),
    PadsToCat(),
    SplitConvolutionBackward(),
    SinkExpands(),
    MergeDuplicates(),  # equal flattenings become one node before they are pushed
    # Products with their own dims. Permutes first, so that a dim is met in the order it was flattened.
    MatmulToContract(),
    FusePermutes(),
    AbsorbPermutes(),
    DropUnitDims(),
    PushViews(),
    # Pushing uncovers permutes next to products, identities and equal expressions.
    RemoveNoops(),
    FusePermutes(),
    AbsorbPermutes(),
    DropKeptDims(),
    MergeDuplicates(),
    RemoveDeadCode(),
    MarkCausalMasks(),
    # Last: nothing looks through a use.
    InsertUses(),
)


@collector_paused()
@autocast_off()
def canonicalize(joint: JointGraph) -> JointGraph:
    """A new joint graph of primitive ops that computes the same; `joint` is left as it was."""
    return copy_joint(run_passes(copy_joint(joint), PIPELINE))
