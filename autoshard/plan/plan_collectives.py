"""The collectives of a plan, read from its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.timed import Priced
from passes.plan.records import NodeRecord

__all__ = ["Collective", "collectives_of"]


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
