"""The collectives of a plan, what they reserve, and the prices under which layouts are brought about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autoshard.plan.plan_content import PlanContent
from cost_model.collectives import BucketedPrices, CollectivePrices
from cost_model.compute import ComputePrices
from cost_model.correction import paced_profile, paced_times, scaled_link, with_timed_collectives
from cost_model.memory import ADAMW, Axes, Optimizer, reserve_bytes
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from cost_model.timed import TimedPrices
from passes.plan.planned_graph import Collective
from passes.redistribution.redistribute import Redistributor
from passes.strategies.prices import Prices
from passes.strategies.traffic import timed_traffic_model, traffic_model

MESSAGES = frozenset({"all_to_all", "point_to_point"})
"""Kinds of collectives in which ranks send to each other, and that gathers can do without."""

_NEIGHBOURS = 2
"""Ranks with which a halo is exchanged: one before, one after. Longer halos reach further, which is not counted."""
_ALL = 2**62
_PEERS = {"all_to_all": _ALL, "reshard": _ALL, "halo_exchange": _NEIGHBOURS, "halo_reduce": _NEIGHBOURS}
"""Ranks with which a rank exchanges messages of its own in a step, by its name."""


def plan_reserve(mesh: MeshSpec, collectives: Iterable[Collective]) -> int:
    """Bytes per device for CUDA's context and the communicators of a plan with these collectives."""
    return reserve_bytes(mesh, _peers(mesh, collectives))


def messages_nbytes(mesh: MeshSpec, collectives: Iterable[Collective]) -> int:
    """Bytes of `plan_reserve` that are there for `MESSAGES`."""
    every = list(collectives)
    return plan_reserve(mesh, every) - plan_reserve(mesh, [c for c in every if c.kind not in MESSAGES])


def _peers(mesh: MeshSpec, collectives: Iterable[Collective]) -> Mapping[Axes, int]:
    """Axes -> ranks with which one exchanges messages of its own."""
    peers: dict[Axes, int] = {}
    for c in collectives:
        axes = tuple(sorted(c.axes, key=mesh.index))
        others = mesh.size(*axes) - 1
        count = _PEERS.get(c.name, 0)
        peers[axes] = max(peers.get(axes, 0), min(others, count))
    return peers


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
    pace: how many times as long all of it takes in the midst of a step (`autoshard.plan.derived_plans`)."""
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
    if not spared or any(one.name in _PEERS for one in plan.collectives):
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
