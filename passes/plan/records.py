"""A planned graph as plain data: what a plan file holds, prints and draws, without FX or torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.timed import Priced
from passes.layout.assignment import FactorSplit, NodeLayouts
from passes.layout.layout import Layout
from passes.plan.lowering_plan import LoweringPlan
from passes.plan.transfers import Turn
from passes.redistribution.steps import Step
from passes.states.backward_copies import copied_ops

__all__ = ["NodeRecord", "OperandRecord", "ResultRecord", "Transfer", "layouts_of", "lowering_of"]


@dataclass(frozen=True)
class Transfer:
    """One step of a redistribution. nbytes: as the collective is priced (cost_model/collectives.py says of what).
    seconds: in a step, in which pieces of a batch may each need it.
    priced: where the seconds come from (`cost_model.timed`)."""

    step: Step
    nbytes: int
    seconds: float
    priced: Priced = "modelled"

    @property
    def is_local(self) -> bool:
        """Whether nothing moves between ranks."""
        return self.step.kind is None


@dataclass(frozen=True)
class OperandRecord:
    """source: name of the node read; result: which of its results; layout: as read; hides: whether the
    transfers may run behind computation (`passes.schedule.hiding`); turn: theirs in the order of all ranks, which
    the members of a bucket share, and ahead: how many are in flight when they start
    (`passes.plan.lowering_plan`); None where there are none."""

    source: str
    result: int
    layout: Layout
    transfers: tuple[Transfer, ...]
    hides: bool
    turn: Turn | None = None
    ahead: int | None = None


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
    or "param up.weight", "input x". seconds: the op alone in a step, transfers not counted, every piece of a batch that
    is run in pieces. interior: the factor along which
    it is computed in parts (`passes.lower.interior`), or None. priced: where the seconds come from."""

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
    interior: str | None = None
    priced: Priced = "modelled"


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


def lowering_of(records: Sequence[NodeRecord]) -> LoweringPlan:
    """What else the records decide: every transfer's steps and turn, and the interiors."""
    reads = [((r.name, i), operand) for r in records for i, operand in enumerate(r.operands)]
    return LoweringPlan(
        steps={
            read: tuple(t.step for t in operand.transfers) for read, operand in reads if operand.transfers
        },
        turns={read: operand.turn for read, operand in reads if operand.turn is not None},
        interiors={record.name: record.interior for record in records if record.interior is not None},
        ahead={read: operand.ahead for read, operand in reads if operand.ahead is not None},
        again=copied_ops(record.name for record in records),
    )
