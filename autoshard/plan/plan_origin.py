"""What a plan was found for and with, and how it ran where it was tried."""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta, Struct

from autoshard.version import __version__
from cost_model.checked_arguments import Seconds, Text
from cost_model.profile import Profile
from cost_model.timed import TimedPrices
from passes.ir.joint import JointGraph
from passes.plan.describe import graph_hash


class PlanOrigin(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan was found for and with.

    profile, profile_hash, nominal: the prices; nominal ones were never measured.
    graph_hash: of the canonical joint graph. autoshard, torch: versions. timed: hash of the kernels and collectives
    whose times took the place of modelled prices; "": none, the plan is unrefined. optimizer: by its name in
    `cost_model.memory.OPTIMIZERS`, whose states and update are counted; "": none, or an older file does not say.
    """

    profile: Text
    profile_hash: Text
    nominal: bool
    graph_hash: Text
    autoshard: Text
    torch: Text
    timed: Text = ""
    optimizer: Text = ""

    @staticmethod
    def of(
        profile: Profile, joint: JointGraph, optimizer: str, timed: TimedPrices | None = None
    ) -> PlanOrigin:
        """optimizer: that is counted where something is trained. timed: what took the place of modelled prices, if
        anything did."""
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


class Raced(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that ran for a few real steps. name: how it was found. words: the plan in a line. predicted, measured:
    seconds of a step; measured: of the slowest rank, its median."""

    name: Text
    words: Text
    predicted: Seconds
    measured: Seconds


class Rehearsed(Struct, frozen=True, forbid_unknown_fields=True):
    """Real steps of a plan. modelled: seconds of a step under modelled and timed prices. measured: of the slowest rank,
    its median. busy: of stages, the share of all ranks' time in which they computed; None where it was not measured."""

    modelled: Annotated[float, Meta(gt=0.0, le=1e30)]
    measured: Annotated[float, Meta(gt=0.0, le=1e30)]
    busy: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None


def pace_of(rehearsed: Rehearsed | None) -> float:
    """How many times as long as modelled a step took: all seconds of the plan are times that."""
    return 1.0 if rehearsed is None else rehearsed.measured / rehearsed.modelled
