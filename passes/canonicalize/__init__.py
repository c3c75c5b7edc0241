"""From the captured graph to the primitive ops that rules are written for."""

from __future__ import annotations

from passes.canonicalize.attention_operands import GroupHeads
from passes.canonicalize.gradients import PadsToCat, ScatterToWhere, SinkExpands, SplitConvolutionBackward
from passes.canonicalize.insert_uses import MarkCausalMasks
from passes.canonicalize.mark_rows import LAST
from passes.canonicalize.normalize_arguments import MergeDuplicates, NormalizeArguments
from passes.canonicalize.permutes import AbsorbPermutes, DropUnitDims, FusePermutes, MatmulToContract
from passes.canonicalize.push_views import PushViews
from passes.canonicalize.random_to_uniform import NormalizeCreations, RandomToUniform
from passes.canonicalize.remove_noops import DropKeptDims, RemoveDeadCode, RemoveNoops, WriteConjugates
from passes.canonicalize.token_order import TokenOrder
from passes.ir.graph_pass import GraphPass, copy_joint, run_passes
from passes.ir.joint import JointGraph
from passes.ir.process_state import autocast_off, collector_paused

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
    TokenOrder(),
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
    GroupHeads(),
    MergeDuplicates(),
    RemoveDeadCode(),
    MarkCausalMasks(),
    *LAST,
)


@collector_paused()
@autocast_off()
def canonicalize(joint: JointGraph) -> JointGraph:
    """A new joint graph of primitive ops that computes the same; `joint` is left as it was."""
    return copy_joint(run_passes(copy_joint(joint), PIPELINE))
