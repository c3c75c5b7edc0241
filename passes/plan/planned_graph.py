"""A planned graph as plain data: what a plan file holds, prints and draws, without FX or torch.

Each record is its own schema, which msgspec checks; `autoshard.plan.plan` writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from cost_model.errors import Count, Text, Word
from cost_model.timed import Priced
from passes.layout.layout import KEYS, RING, Assignment, Dim, FactorSplit, Layout, NodeLayouts, ReduceOp
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


class Reshard(Struct, frozen=True, forbid_unknown_fields=True):
    """One step of a redistribution. nbytes: as the collective is priced (cost_model/collectives.py says of what).
    seconds: in a step, in which pieces of a batch may each need it. after: the layout that it leads to.
    priced: where the seconds come from (`cost_model.timed`)."""

    step: StepRecord
    nbytes: Count
    seconds: float
    after: Layout
    priced: Priced = "modelled"

    @staticmethod
    def of(step: Step, nbytes: int, seconds: float, priced: Priced = "modelled") -> Reshard:
        given: Any = step.arguments
        return Reshard(StepRecord(step.name, step.axes, **given), nbytes, seconds, step.after, priced)

    @property
    def is_local(self) -> bool:
        """Whether nothing moves between ranks."""
        return self.step.kind is None


class OperandRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """source: name of the node read; result: which of its results; layout: as read; hides: whether the transfers
    may run behind computation (`passes.plan.transfers`); turn: theirs in the order of all ranks, which the
    members of a bucket share, and ahead: how many are in flight when they start (`PlannedGraph.turns`); None where
    there are none. starts: of those before the last that start before the turn, the place in that order and how many
    are in flight."""

    source: Word
    result: Annotated[int, Meta(ge=0, le=10_000)]
    layout: Layout
    transfers: tuple[Reshard, ...]
    hides: bool
    turn: tuple[Annotated[int, Meta(ge=0, le=3)], Count] | None = None
    ahead: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    starts: tuple[tuple[Count, Count], ...] = ()

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
    it is computed in parts (`passes.lower.op_on_rank`), or None. priced: where the seconds come from. ends: of the node
    `output`, what each operand is: "grad up.weight", "output 0"; () in files of earlier versions."""

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
    ends: tuple[Text, ...] = ()

    @property
    def layouts(self) -> NodeLayouts:
        read, left = tuple(read.layout for read in self.operands), tuple(one.layout for one in self.results)
        return NodeLayouts(read, left, self.splits)

    @property
    def parameter(self) -> str:
        """The name of the parameter that it is; "" of any other node."""
        return self.text.removeprefix("param ") if self.op == "param" else ""


def made_of_parameters(records: Iterable[NodeRecord], among: Iterable[NodeRecord] | None = None) -> set[str]:
    """Parameters, and what ops of one operand make of them: casts and views. among: of all parameters, those."""
    own = None if among is None else {record.name for record in among}
    found: set[str] = set()
    for record in records:
        sources = [operand.source for operand in record.operands]
        if (record.op == "param" and (own is None or record.name in own)) or (
            len(sources) == 1 and sources[0] in found
        ):
            found.add(record.name)
    return found


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


Transfer = tuple[str, int]
"""(global name of the reader, which of its tensor operands)."""

Turn = tuple[int, int]
"""(0 in the forward, 1 in the backward; place in the phase's order). Where a batch is run in pieces: 0 before them, 1
and 2 in forward and backward of each, 3 after. Meta "turn" of a transfer's nodes."""


@dataclass(frozen=True)
class PlannedGraph:
    """A joint graph as it is planned: every node with its layouts and prices, every change of a layout with its steps
    and its turn. It is what a plan's file holds, what is printed, explained and drawn, and what programs are made of.

    nodes: one for each of the joint graph, `getitem`s left out, in its order.

    What else the forward saves and the backward computes again, where that costs nothing, follows from a rank's program
    (`passes.states.compute_again`): it is not written down.
    """

    nodes: tuple[NodeRecord, ...]

    @cached_property
    def by_name(self) -> Mapping[str, NodeRecord]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def layouts(self) -> Assignment:
        """The layouts of every node; equal ones are one object."""
        same: dict[NodeLayouts, NodeLayouts] = {}
        made = {node.name: node.layouts for node in self.nodes}
        return {name: same.setdefault(one, one) for name, one in made.items()}

    @cached_property
    def reads(self) -> dict[Transfer, OperandRecord]:
        """The operands that are read in another layout than they are held in."""
        reads = {(node.name, i): read for node in self.nodes for i, read in enumerate(node.operands)}
        return {transfer: read for transfer, read in reads.items() if read.transfers}

    @cached_property
    def steps(self) -> dict[Transfer, tuple[Step, ...]]:
        """How each is brought there; equal ways are one object. ValueError for a step that cannot be."""
        same: dict[tuple[Step, ...], tuple[Step, ...]] = {}
        held = lambda read: self.layouts[read.source].results[read.result]
        made = {transfer: read.steps(held(read)) for transfer, read in self.reads.items()}
        return {transfer: same.setdefault(way, way) for transfer, way in made.items()}

    @cached_property
    def turns(self) -> dict[Transfer, Turn]:
        """Every transfer -> its place in the one order of all ranks; those of one turn are merged, a bucket."""
        return {transfer: read.turn for transfer, read in self.reads.items() if read.turn is not None}

    @cached_property
    def ahead(self) -> dict[Transfer, int]:
        """Transfers whose operand is at hand -> how many of their collectives are in flight at most when they start."""
        return {transfer: read.ahead for transfer, read in self.reads.items() if read.ahead is not None}

    @cached_property
    def starts(self) -> dict[Transfer, tuple[tuple[int, int], ...]]:
        """Those at hand of several collectives -> place in the phase's order, and such a limit, of those that start
        before its turn."""
        return {transfer: read.starts for transfer, read in self.reads.items() if read.starts}

    @cached_property
    def buckets(self) -> Mapping[Turn | None, int]:
        """Turn -> how many reads have it: their transfers are merged."""
        return Counter(self.turns.values())

    @cached_property
    def interiors(self) -> dict[str, str]:
        """Ops computed in parts, so that a halo travels meanwhile (`passes.lower.op_on_rank`) -> the factor cut."""
        return {node.name: node.interior for node in self.nodes if node.interior is not None}

    @cached_property
    def rings(self) -> dict[str, tuple[str, ...]]:
        """Ops that exchange within themselves -> the axes over which."""
        found = ((node.name, split) for node in self.nodes for split in node.splits)
        return {name: split.axes for name, split in found if split.factor in (RING, KEYS)}

    @cached_property
    def again(self) -> tuple[str, ...]:
        """Ops of the forward that the backward computes once more (`passes.states.compute_again`)."""
        return copied_ops(node.name for node in self.nodes)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective, in graph order; local steps are none.

        What brings a result to the graph's end (a gradient to its parameter's layout) belongs to the phase that
        computed it.
        """
        phases = {node.name: node.phase for node in self.nodes}
        return tuple(
            Collective(
                kind=transfer.step.kind,
                axes=transfer.step.axes,
                nbytes=transfer.nbytes,
                seconds=transfer.seconds,
                value=read.source,
                node=node.name,
                phase=phases[read.source] if node.op == "output" else node.phase,
                name=transfer.step.name,
                priced=transfer.priced,
            )
            for node in self.nodes
            for read in node.operands
            for transfer in read.transfers
            if transfer.step.kind is not None
        )
