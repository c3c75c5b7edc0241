"""A planned graph as plain data: what a plan file holds, prints and draws, without FX or torch.

Each record is its own schema, which msgspec checks; `passes.plan.json_data` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from cost_model.text_files import Count, Text, Word
from cost_model.timed import Priced
from passes.layout.assignment import FactorSplit, NodeLayouts
from passes.layout.layout import Dim, Layout, ReduceOp
from passes.plan.transfers import LoweringPlan
from passes.redistribution.steps import STEPS, Step, step_text
from passes.states.compute_again import copied_ops


class StepRecord(Struct, frozen=True, forbid_unknown_fields=True, rename={"name": "kind"}):
    """A `Step` by its name, without its layouts: it begins where the one before it has led."""

    name: Word
    axes: tuple[Word, ...]
    dim: Dim | None = None
    from_dim: Dim | None = None
    to_dim: Dim | None = None
    op: ReduceOp | None = None

    @property
    def kind(self) -> str | None:
        """The collective that performs it; None for a local step."""
        return STEPS[self.name].kind

    @property
    def arguments(self) -> dict[str, int | str]:
        given = {name: getattr(self, name) for name in ("dim", "from_dim", "to_dim", "op")}
        return {name: value for name, value in given.items() if value is not None}

    def text(self, *operands: str) -> str:
        return step_text(self.name, self.axes, self.arguments, operands)

    def step(self, before: Layout, after: Layout) -> Step:
        """ValueError for one of no kind, or with another kind's arguments."""
        make, given = STEPS.get(self.name), self.arguments
        if make is None:
            raise ValueError(f"there is no step {self.name}, but {', '.join(STEPS)}")
        if given.keys() != set(make.argument_names()):
            wanted = ", ".join(make.argument_names()) or "no argument"
            raise ValueError(f"a step {self.name} has {wanted}, and not {', '.join(given) or 'none'}")
        return make(before=before, after=after, axes=self.axes, **given)


class Transfer(Struct, frozen=True, forbid_unknown_fields=True):
    """One step of a redistribution. nbytes: as the collective is priced (cost_model/collectives.py says of what).
    seconds: in a step, in which pieces of a batch may each need it. after: the layout that it leads to.
    priced: where the seconds come from (`cost_model.timed`)."""

    step: StepRecord
    nbytes: Count
    seconds: float
    after: Layout
    priced: Priced = "modelled"

    @staticmethod
    def of(step: Step, nbytes: int, seconds: float, priced: Priced = "modelled") -> Transfer:
        given: Any = step.arguments
        return Transfer(StepRecord(step.name, step.axes, **given), nbytes, seconds, step.after, priced)

    @property
    def is_local(self) -> bool:
        """Whether nothing moves between ranks."""
        return self.step.kind is None


class OperandRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """source: name of the node read; result: which of its results; layout: as read; hides: whether the
    transfers may run behind computation (`passes.schedule.hiding`); turn: theirs in the order of all ranks, which
    the members of a bucket share, and ahead: how many are in flight when they start
    (`passes.plan.transfers.LoweringPlan`); None where there are none."""

    source: Word
    result: Annotated[int, Meta(ge=0, le=10_000)]
    layout: Layout
    transfers: tuple[Transfer, ...]
    hides: bool
    turn: tuple[Annotated[int, Meta(ge=0, le=3)], Count] | None = None
    ahead: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None

    def steps(self, held: Layout) -> tuple[Step, ...]:
        """Of its transfers. held: the layout of what is read. ValueError for a step that cannot be."""
        befores = (held, *(transfer.after for transfer in self.transfers))
        ways = zip(self.transfers, befores, strict=False)
        return tuple(transfer.step.step(before, transfer.after) for transfer, before in ways)


class ResultRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """A result's global shape, short dtype ("f32") and layout."""

    shape: Annotated[tuple[Count, ...], Meta(max_length=64)]
    dtype: Word
    layout: Layout

    def __str__(self) -> str:
        return self.layout.format(self.shape, self.dtype)


class NodeRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """One node of the global graph. text: the op with `{0}`, `{1}` ... for its tensor operands,
    or "param up.weight", "input x". seconds: the op alone in a step, transfers not counted, every piece of a batch that
    is run in pieces. interior: the factor along which
    it is computed in parts (`passes.lower.interior`), or None. priced: where the seconds come from."""

    name: Word
    op: Text
    text: Text
    operands: tuple[OperandRecord, ...]
    results: tuple[ResultRecord, ...]
    splits: tuple[FactorSplit, ...]
    seconds: float
    phase: Literal["forward", "backward"]
    module: Text
    source: Text
    interior: Text | None = None
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
    held = {record.name: [result.layout for result in record.results] for record in records}
    return LoweringPlan(
        steps={read: o.steps(held[o.source][o.result]) for read, o in reads if o.transfers},
        turns={read: operand.turn for read, operand in reads if operand.turn is not None},
        interiors={record.name: record.interior for record in records if record.interior is not None},
        ahead={read: operand.ahead for read, operand in reads if operand.ahead is not None},
        again=copied_ops(record.name for record in records),
    )
