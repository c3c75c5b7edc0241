"""autoshard: an unmodified PyTorch module, run in parallel by the fastest plan, with proof.

model = autoshard(model, mesh)
"""

from autoshard.api import autoshard
from autoshard.halos import halo_exchange
from autoshard.plan import Plan
from autoshard.planning import find_plan
from autoshard.report import StepReport, report
from autoshard.verify import VerifyReport, verify
from autoshard.version import __version__
from cost_model.errors import (
    AutoshardError,
    CaptureError,
    InfeasibleError,
    PlanError,
    ProfileError,
    ShardingError,
    UnsupportedOpError,
)
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.rules.discover import discover_rule
from passes.rules.registry import register_rule

__all__ = [
    "AutoshardError",
    "CaptureError",
    "InfeasibleError",
    "MeshSpec",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "ShardingError",
    "StepReport",
    "UnsupportedOpError",
    "VerifyReport",
    "__version__",
    "autoshard",
    "discover_rule",
    "find_plan",
    "halo_exchange",
    "register_rule",
    "report",
    "verify",
]
