"""A profile, and what was timed, as the prices of one mesh and one backend."""

from __future__ import annotations

from dataclasses import replace

from autoshard.plan.plan_collectives import MESSAGES, collectives_of
from autoshard.plan.plan_content import PlanContent
from cost_model.collectives import BucketedPrices, CollectivePrices
from cost_model.compute import ComputePrices
from cost_model.correction import paced_profile, paced_times, scaled_link, with_timed_collectives
from cost_model.memory import ADAMW, Optimizer
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from cost_model.timed import TimedPrices
from passes.redistribution.redistribute import Redistributor
from passes.strategies.prices import Prices
from passes.strategies.traffic import timed_traffic_model, traffic_model


def prices_of(
    profile: Profile,
    mesh: MeshSpec,
    backend: str = "inductor",
    timed: TimedPrices | None = None,
    optimizer: Optimizer = ADAMW,
    links: MeshSpec | None = None,
    pace: float = 1.0,
) -> Prices:
    """Collectives, kernels as `backend` makes them and the update on one device, from `profile`; in place of them what
    was timed.

    links: where the ranks of `mesh` sit, if that is one stage of a larger mesh: groups are as far apart as there.
    pace: how many times as long all of it takes in the midst of a step (`autoshard.plan.rehearsed_plan`)."""
    placed = links or mesh
    profile = paced_profile(profile, pace)
    if timed is not None:
        timed = paced_times(timed, pace)
        profile = with_timed_collectives(profile, placed, timed.collectives)
    compute = ComputePrices(profile, mesh.device_type, timed)
    collectives = CollectivePrices(profile, placed)
    return Prices(
        mesh=mesh,
        compute=compute,
        redistributor=Redistributor(mesh, collectives),
        merged=Redistributor(mesh, BucketedPrices(collectives.seconds, mesh, compute)),
        optimizer_seconds=lambda nbytes: compute.update_seconds(nbytes, optimizer.passes),
        traffic=traffic_model(backend) if timed is None else timed_traffic_model(backend),
        overlap_efficiency=profile.overlap_efficiency,
        optimizer=optimizer,
        lateness=profile.lateness,
        links=links,
        shares_memory=collectives.shares_memory,
    )


def prices_as_in(plan: PlanContent, prices: Prices) -> Prices:
    """Those under which the layouts of `plan` are brought about as it does: with as many bytes at once, and within a
    limit, where messages between all ranks take memory, without any if it has none."""
    joined = prices.joining(plan.joined_axes)
    if plan.moved_nbytes is not None:
        joined = joined.holding(plan.moved_nbytes)
    spared = plan.memory_limit is not None and plan.reserve > 0
    if not spared or any(one.name in MESSAGES for one in collectives_of(plan.records)):
        return joined
    return joined.avoiding(MESSAGES)


def over_link(
    profile: Profile, timed: TimedPrices | None, mesh: MeshSpec, level: int, factor: float
) -> tuple[Profile, TimedPrices | None]:
    """With a level of links so much faster: the collectives that were timed as well."""
    if timed is not None:
        profile = with_timed_collectives(profile, mesh, timed.collectives)
        timed = replace(timed, collectives=())
    return scaled_link(profile, level, factor), timed
