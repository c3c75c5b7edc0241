"""A planned graph as plain data: what a plan file holds, prints and draws, without FX or torch.

Each record is its own schema, which msgspec checks; `autoshard.plan.plan_file` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from cost_model.checked_arguments import Count, Text, Word
from cost_model.memory import format_seconds
from cost_model.mesh import MeshSpec
from cost_model.timed import Priced
from passes.layout.assignment import FactorSplit, NodeLayouts
from passes.layout.joined_axes import JoinedAxes, joined_text
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

    @property
    def parameter(self) -> str:
        """The name of the parameter that it is; "" of any other node."""
        return self.text.removeprefix("param ") if self.op == "param" else ""


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


def format_graph(
    records: Sequence[NodeRecord],
    mesh: MeshSpec,
    *,
    seconds: bool = True,
    joined: JoinedAxes = (),
    raced: int = 0,
) -> str:
    """The planned graph, forward then backward. With `seconds=False` no prices (golden files).

    `use` nodes are not printed: what they redistribute appears as collectives on the value. raced: of how many
    plans that ran it is the fastest.
    """
    writer = _Writer(records, seconds)
    body = "\n".join(f"  {line}" for line in writer.lines())
    together = f"  // axes searched together: {joined_text(joined)}" if joined else ""
    return f"{mesh}{together}{raced_mark(raced if seconds else 0)}\ngraph joint {{\n{body}\n}}\n"


def raced_mark(count: int) -> str:
    """Behind the mesh, of a plan that is the fastest of so many that ran; 0: none did."""
    return f"  // raced: the fastest of {count} by the clock" if count else ""


class _Writer:
    def __init__(self, records: Sequence[NodeRecord], seconds: bool) -> None:
        self._records = records
        self._seconds = seconds
        self._by_name = {record.name: record for record in records}
        self._shown: dict[tuple[str, int], str] = {}  # value -> the name it is printed by
        self._copies: dict[str, int] = {}

    def lines(self) -> Iterator[str]:
        backward = False
        for record in self._records:
            if record.phase == "backward" and record.operands and not backward:
                backward = True
                yield "// backward"
            yield from self._node(record)

    def _node(self, record: NodeRecord) -> Iterator[str]:
        names: list[str] = []
        for operand in record.operands:
            lines, name = self._operand(operand)
            yield from lines
            names.append(name)
        if record.op == "use":
            self._shown[record.name, 0] = names[0]
            return
        if record.op == "output":
            yield f"return ({', '.join(names)})"
            return
        yield self._line(record, names)

    def _operand(self, operand: OperandRecord) -> tuple[list[str], str]:
        name = self._value(operand.source, operand.result)
        shape = self._by_name[operand.source].results[operand.result]
        lines: list[str] = []
        for transfer in operand.transfers:
            copy = self._copy(name)
            value = ResultRecord(shape.shape, shape.dtype, transfer.after)
            lines.append(self._priced(f"{copy}: {value} = {transfer.step.text(name)}", transfer.seconds))
            name = copy
        return lines, name

    def _line(self, record: NodeRecord, names: Sequence[str]) -> str:
        kinds = ", ".join(str(result) for result in record.results)
        value = kinds if len(record.results) == 1 else f"({kinds})"
        return self._priced(f"%{record.name}: {value} = {record.text.format(*names)}", record.seconds)

    def _priced(self, line: str, seconds: float) -> str:
        return f"{line}  // {format_seconds(seconds)}" if self._seconds and seconds > 0 else line

    def _value(self, source: str, result: int) -> str:
        if (source, result) in self._shown:
            return self._shown[source, result]
        many = len(self._by_name[source].results) > 1
        return f"%{source}[{result}]" if many else f"%{source}"

    def _copy(self, name: str) -> str:
        base = name.split(".")[0]
        self._copies[base] = self._copies.get(base, 0) + 1
        return f"{base}.{self._copies[base]}"
