"""The collectives of a plan, read from its records, and what CUDA's context and their communicators take of a limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cost_model.memory import Axes, reserve_bytes
from cost_model.mesh import MeshSpec
from cost_model.timed import Priced
from passes.plan.records import NodeRecord
from passes.redistribution.steps import Step


@dataclass(frozen=True)
class Collective:
    """kind over axes, of nbytes priced at seconds. value: the tensor moved; node: who reads it.

    kind: as what it is priced, a key of `PAYLOAD_BYTES`. name: the step it performs, as a plan prints it: the kind, or
    of "point_to_point" "halo_exchange", "halo_reduce" or "reshard".
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float
    value: str
    node: str
    phase: str
    name: str
    priced: Priced = "modelled"


def collectives_of(records: Sequence[NodeRecord]) -> tuple[Collective, ...]:
    """Every collective that the records' transfers hold, in graph order; local steps are none.

    What brings a result to the graph's end (a gradient to its parameter's layout) belongs to the
    phase that computed it.
    """
    phases = {record.name: record.phase for record in records}
    return tuple(
        Collective(
            kind=transfer.step.kind,
            axes=transfer.step.axes,
            nbytes=transfer.nbytes,
            seconds=transfer.seconds,
            value=operand.source,
            node=record.name,
            phase=phases[operand.source] if record.op == "output" else record.phase,
            name=transfer.step.name,
            priced=transfer.priced,
        )
        for record in records
        for operand in record.operands
        for transfer in operand.transfers
        if transfer.step.kind is not None
    )


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
