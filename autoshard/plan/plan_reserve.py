"""What CUDA's context and the communicators of a plan take of a memory limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoshard.plan.plan_collectives import Collective
from cost_model.memory import Axes, reserve_bytes
from cost_model.mesh import MeshSpec
from passes.redistribution.steps import Step

__all__ = ["MESSAGES", "messages_nbytes", "plan_reserve"]

MESSAGES = frozenset({"all_to_all"})
"""Kinds of collectives in which every rank sends to every other, and that gathers can do without."""

_NEIGHBOURS = 2
"""Ranks with which a halo is exchanged: one before, one after. Longer halos reach further, which is not counted."""
_ALL = 2**62
_PEERS = {"all_to_all": _ALL, "reshard": _ALL, "halo_exchange": _NEIGHBOURS, "halo_reduce": _NEIGHBOURS}
"""Ranks with which a rank exchanges messages of its own in a step, by its name."""


def plan_reserve(mesh: MeshSpec, collectives: Iterable[Collective | Step]) -> int:
    """Bytes per device for CUDA's context and the communicators of a plan with these collectives."""
    return reserve_bytes(mesh, _peers(mesh, collectives))


def messages_nbytes(mesh: MeshSpec, steps: Iterable[Step]) -> int:
    """Bytes of `plan_reserve` that are there for `MESSAGES`."""
    every = list(steps)
    return plan_reserve(mesh, every) - plan_reserve(mesh, [s for s in every if s.kind not in MESSAGES])


def _peers(mesh: MeshSpec, collectives: Iterable[Collective | Step]) -> Mapping[Axes, int]:
    """Axes -> ranks with which one exchanges messages of its own."""
    peers: dict[Axes, int] = {}
    for c in collectives:
        axes = tuple(sorted(c.axes, key=mesh.index))
        others = mesh.size(*axes) - 1
        count = _PEERS.get(c.name, 0)
        peers[axes] = max(peers.get(axes, 0), min(others, count))
    return peers
