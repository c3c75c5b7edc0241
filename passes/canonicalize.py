"""From the captured graph to the primitive ops that rules are written for."""

from __future__ import annotations

from passes.base import GraphPass, run_passes
from passes.canonicalization.absorb_permutes import AbsorbPermutes
from passes.canonicalization.drop_kept_dims import DropKeptDims
from passes.canonicalization.drop_unit_dims import DropUnitDims
from passes.canonicalization.fuse_permutes import FusePermutes
from passes.canonicalization.insert_uses import InsertUses
from passes.canonicalization.matmul_to_contract import MatmulToContract
from passes.canonicalization.merge_duplicates import MergeDuplicates
from passes.canonicalization.normalize_arguments import NormalizeArguments
from passes.canonicalization.normalize_creations import NormalizeCreations
from passes.canonicalization.pads_to_cat import PadsToCat
from passes.canonicalization.push_views import PushViews
from passes.canonicalization.random_to_uniform import RandomToUniform
from passes.canonicalization.remove_dead_code import RemoveDeadCode
from passes.canonicalization.remove_noops import RemoveNoops
from passes.canonicalization.scatter_to_where import ScatterToWhere
from passes.canonicalization.sink_expands import SinkExpands
from passes.canonicalization.split_convolution_backward import SplitConvolutionBackward
from passes.canonicalization.write_conjugates import WriteConjugates
from passes.collector import collector_paused
from passes.joint import JointGraph
from passes.rewrite import copy_joint

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
    # Last: nothing looks through a use.
    InsertUses(),
)


@collector_paused()
def canonicalize(joint: JointGraph) -> JointGraph:
    """A new joint graph of primitive ops that computes the same; `joint` is left as it was."""
    return copy_joint(run_passes(copy_joint(joint), PIPELINE))
