"""The search within a memory limit of which CUDA's context and the communicators take their part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from autoshard.plan.plan_collectives import Collective
from cost_model.errors import InfeasibleError
from cost_model.mesh import MeshSpec
from cost_model.reserve import Axes, reserve_bytes
from cost_model.units import format_bytes
from passes.redistribution.steps import Step
from passes.search.find import Found

__all__ = ["fits_within", "found_within", "plan_reserve"]

_NEIGHBOURS = 2
"""Ranks with which a halo is exchanged: one before, one after. Longer halos reach further, which is not counted."""
_ALL = 2**62
_PEERS = {"all_to_all": _ALL, "reshard": _ALL, "halo_exchange": _NEIGHBOURS, "halo_reduce": _NEIGHBOURS}
"""Ranks with which a rank exchanges messages of its own in a step, by its name."""


def plan_reserve(mesh: MeshSpec, collectives: Iterable[Collective | Step]) -> int:
    """Bytes per device for CUDA's context and the communicators of a plan with these collectives."""
    return reserve_bytes(mesh, _peers(mesh, collectives))


def fits_within(
    found: Found, collectives: Iterable[Collective | Step], mesh: MeshSpec, memory_limit: int | None
) -> bool:
    """Whether its own communicators have room beside it."""
    return memory_limit is None or found.peak_nbytes + plan_reserve(mesh, collectives) <= memory_limit


def found_within(
    find: Callable[[int, bool], Found],
    collectives_of: Callable[[Found], Iterable[Collective | Step]],
    mesh: MeshSpec,
    memory_limit: int | None,
) -> Found:
    """What `find(reserve in bytes, whether again)` finds, with a reserve that is enough for its own communicators.

    Which communicators there are, and whether messages are exchanged over them, is known once there is a
    plan: the first search keeps what every plan needs. If its plan needs more than is left, it is searched
    again with what that one needs. The bound of the first search holds for all: it left most room.

    Raises InfeasibleError if nothing fits. A slower plan without messages is not looked for where there is
    no room for the messages of the fastest.
    """
    peers: dict[Axes, int] = {}
    first: Found | None = None
    while True:
        reserve = reserve_bytes(mesh, peers)
        try:
            found = find(reserve, first is not None)
        except InfeasibleError as error:
            raise error if first is None else _no_room(error, first, reserve) from None
        first = first or found
        if memory_limit is None or not reserve:
            return found
        if fits_within(found, collectives_of(found), mesh, memory_limit):
            return _bounded(found, first)
        mine = _peers(mesh, collectives_of(found))
        # Every turn adds a communicator or peers, so this ends.
        peers = {axes: max(peers.get(axes, 0), mine.get(axes, 0)) for axes in {**peers, **mine}}


def _peers(mesh: MeshSpec, collectives: Iterable[Collective | Step]) -> Mapping[Axes, int]:
    """Axes -> ranks with which one exchanges messages of its own."""
    peers: dict[Axes, int] = {}
    for c in collectives:
        axes = tuple(sorted(c.axes, key=mesh.index))
        others = mesh.size(*axes) - 1
        count = _PEERS.get(c.name, 0)
        peers[axes] = max(peers.get(axes, 0), min(others, count))
    return peers


def _no_room(error: InfeasibleError, first: Found, reserve: int) -> InfeasibleError:
    return InfeasibleError(
        f"{error}\n  the fastest plan that fits beside fewer communicators takes {format_bytes(first.peak_nbytes)}, "
        f"and its own communicators {format_bytes(reserve)}\n"
        f"  try: memory_limit={format_bytes(first.peak_nbytes + reserve)}"
    )


def _bounded(found: Found, first: Found) -> Found:
    """`found` with the bound of the search that left most room, and so proven no further than that."""
    if found is first or math.isclose(found.seconds, first.seconds, rel_tol=1e-9):
        return found if found is first else replace(found, lower_bound=first.lower_bound, status=first.status)
    gap = (found.seconds - first.lower_bound) / found.seconds if found.seconds else 0.0
    return replace(found, lower_bound=first.lower_bound, gap=gap, status="feasible")
