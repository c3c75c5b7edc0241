"""A planned graph as plain data: what a plan file holds, prints and draws, without FX or torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.assignment import FactorSplit, NodeLayouts
from passes.layout import Layout

__all__ = ["NodeRecord", "OperandRecord", "ResultRecord", "Transfer", "layouts_of"]


@dataclass(frozen=True)
class Transfer:
    """One step of a redistribution.

    kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", or a local step ("slice",
    "to_partial"). text: as printed, "reduce_scatter[tp](dim=1)". nbytes: as the collective is
    priced (cost_model/collectives.py says of what). after: the layout it leaves.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float
    text: str
    after: Layout


@dataclass(frozen=True)
class OperandRecord:
    """source: name of the node read; result: which of its results; layout: as read; hides: whether the
    transfers may run behind computation (`passes.hiding`)."""

    source: str
    result: int
    layout: Layout
    transfers: tuple[Transfer, ...]
    hides: bool


@dataclass(frozen=True)
class ResultRecord:
    """A result's global shape, short dtype ("f32") and layout."""

    shape: tuple[int, ...]
    dtype: str
    layout: Layout

    def __str__(self) -> str:
        return self.layout.format(self.shape, self.dtype)


@dataclass(frozen=True)
class NodeRecord:
    """One node of the global graph. text: the op with `{0}`, `{1}` ... for its tensor operands,
    or "param up.weight", "input x". seconds: the op alone, transfers not counted."""

    name: str
    op: str
    text: str
    operands: tuple[OperandRecord, ...]
    results: tuple[ResultRecord, ...]
    splits: tuple[FactorSplit, ...]
    seconds: float
    phase: str
    module: str
    source: str


def layouts_of(records: Sequence[NodeRecord]) -> dict[str, NodeLayouts]:
    """The assignment that the records describe."""
    return {
        record.name: NodeLayouts(
            tuple(operand.layout for operand in record.operands),
            tuple(result.layout for result in record.results),
            record.splits,
        )
        for record in records
    }
