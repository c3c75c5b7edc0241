"""autoshard: an unmodified PyTorch module, run in parallel by the fastest plan, with proof.

model = autoshard(model, mesh)
"""

from autoshard.api import autoshard, is_tuned, random_state
from autoshard.checkpoints import last_checkpoint, new_checkpoint
from autoshard.data.loader import ArrayDataset, PartialDataset, data_loader
from autoshard.data.scatter import gather, scatter, weighted_mean
from autoshard.neighborhood import halo_exchange
from autoshard.plan.answer import Answer
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.planning import find_plan
from autoshard.reporting.report_steps import StepReport, report
from autoshard.verification.verify_parallel import verify_parallel
from autoshard.verification.verify_plan import VerifyReport, verify
from autoshard.version import __version__
from cost_model.errors import (
    AutoshardError,
    CaptureError,
    InfeasibleError,
    PlanError,
    ProfileError,
    RankError,
    ShardingError,
    UnsupportedOpError,
)
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.rules.check.discover import discover_rule
from passes.rules.core.rule_registry import register_rule

__all__ = [
    "Answer",
    "ArrayDataset",
    "AutoshardError",
    "CaptureError",
    "InfeasibleError",
    "MeshSpec",
    "PartialDataset",
    "PipelinePlan",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "RankError",
    "ShardingError",
    "StepReport",
    "UnsupportedOpError",
    "VerifyReport",
    "__version__",
    "autoshard",
    "data_loader",
    "discover_rule",
    "find_plan",
    "gather",
    "halo_exchange",
    "is_tuned",
    "last_checkpoint",
    "new_checkpoint",
    "random_state",
    "register_rule",
    "report",
    "scatter",
    "verify",
    "verify_parallel",
    "weighted_mean",
]
