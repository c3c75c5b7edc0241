"""What a plan was found for and with."""

from __future__ import annotations

import torch

from autoshard.plan.plan_content import PlanOrigin
from autoshard.version import __version__
from cost_model.profile import Profile
from cost_model.timed import TimedPrices
from passes.ir.joint import JointGraph
from passes.plan.describe import graph_hash

__all__ = ["plan_origin"]


def plan_origin(
    profile: Profile, joint: JointGraph, optimizer: str, timed: TimedPrices | None = None
) -> PlanOrigin:
    """optimizer: that is counted where something is trained. timed: what took the place of modelled prices, if anything
    did."""
    return PlanOrigin(
        profile=profile.name,
        profile_hash=profile.hash(),
        nominal=profile.nominal,
        graph_hash=graph_hash(joint),
        autoshard=__version__,
        torch=torch.__version__,
        timed="" if timed is None else timed.hash,
        optimizer=optimizer if joint.trained else "",
    )
