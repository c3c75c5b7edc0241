"""How the gradient of a parameter is reduced, in words: by which collectives, at what price, and why."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_words import transfer_words
from cost_model.errors import few
from cost_model.memory import format_seconds
from passes.layout.layout import Layout
from passes.plan.planned_graph import NodeRecord, OperandRecord, Reshard, ResultRecord

_ADDS = ("aten.add.Tensor", "aten.cat", "aten.stack")
"""Ops that put gradients together: of several uses of a parameter, or of parts of it."""


def gradient_lines(plan: PlanContent, parameter: NodeRecord) -> Iterator[str]:
    """Of one without stages; nothing where nothing is trained. A line for each value that is moved, in their order, or
    for what is returned, and one that says why."""
    end = plan.records[-1]
    named = dict(zip(end.ends, end.operands, strict=False))
    last = named.get(f"grad {parameter.parameter}")
    if last is not None:
        yield from _Gradient(plan, parameter, last).lines()
    elif any(name.startswith("grad ") for name in named):
        yield "    no gradient"
    elif not named and any(record.operands and record.phase == "backward" for record in plan.records[:-1]):
        yield "    gradient not named: the plan is of an earlier version; find_plan(...) names it"


@dataclass(frozen=True)
class _Gradient:
    """last: what the graph returns, as it is read."""

    plan: PlanContent
    parameter: NodeRecord
    last: OperandRecord

    @cached_property
    def records(self) -> dict[str, NodeRecord]:
        return {record.name: record for record in self.plan.records}

    @cached_property
    def readers(self) -> Counter[str]:
        return Counter(read.source for record in self.plan.records for read in record.operands)

    def lines(self) -> Iterator[str]:
        reads = list(self.on_the_way(self.last))
        for read in [read for read in reversed(reads) if read.transfers] or [self.last]:
            yield f"    gradient %{read.source}: {self.value(read)}, {self.how(read)}"
        yield f"      {self.why([read for read in reads if not self.carries(self.records[read.source])])}"

    def value(self, read: OperandRecord) -> ResultRecord:
        return self.records[read.source].results[read.result]

    def on_the_way(self, read: OperandRecord) -> Iterator[OperandRecord]:
        """From the graph's end back to what computes the gradient."""
        yield read
        source = self.records[read.source]
        if self.carries(source):
            for operand in source.operands:
                yield from self.on_the_way(operand)

    def carries(self, record: NodeRecord) -> bool:
        """Whether an op, for one reader, only adds up or casts or views what it reads, with as many elements."""
        if record.phase != "backward" or self.readers[record.name] > 1 or len(record.results) != 1:
            return False
        if len(record.operands) != 1:
            return record.op in _ADDS
        return math.prod(self.value(record.operands[0]).shape) == math.prod(record.results[0].shape)

    def how(self, read: OperandRecord) -> str:
        if not read.transfers:
            return "as it is"
        ways = zip(transfer_words(read, self.plan.planned.buckets), read.transfers, strict=True)
        when = ""
        if self.plan.micro_batches > 1 and read.turn is not None:
            # First number of the turns after the pieces of a batch.
            when = ", once, after the pieces" if read.turn[0] == 3 else ", in each piece"
        return ", ".join(f"through {way}{self.exposed(read, moved)}" for way, moved in ways) + when

    def exposed(self, read: OperandRecord, moved: Reshard) -> str:
        """How long a step waits for it, or for the bucket that it is in; "" where that is not known."""
        what = read.turn, moved.step.kind, moved.step.axes
        waits = [
            part.times * one.exposed
            for part in self.plan.ran
            for one in part.moved
            if (one.turn, one.kind, one.axes) == what
        ]
        if not waits:
            return ""
        seconds = sum(waits)
        how = f"exposed for {format_seconds(seconds)}" if seconds > 1e-9 else "hidden"
        return f" that is {how}" if self.plan.planned.buckets[read.turn] > 1 else f", {how}"

    def why(self, ends: Sequence[OperandRecord]) -> str:
        """ends: reads of what computes it."""
        held, mesh = self.parameter.results[0].layout, self.plan.mesh
        said: dict[str, list[str]] = defaultdict(list)
        for axis in (axis for axis in mesh.names if mesh.size(axis) > 1):
            seen: set[str] = set()
            makers = [name for read in ends for name in self.makers(read, axis, seen)]
            split = any(self.value(read).layout.dim_of(axis) is not None for read in ends)
            said[_reason(makers, split, held.dim_of(axis) is not None)].append(axis)
        reasons = (reason.format(", ".join(axes)) for reason, axes in said.items())
        return "; ".join(reasons) or "one rank computes all of it"

    def makers(self, read: OperandRecord, axis: str, seen: set[str]) -> Iterator[str]:
        """The ops, not yet `seen`, that began the sum that is pending over `axis` in what is read."""
        source = self.records[read.source]
        if source.name in seen or not _is_pending(self.value(read).layout, axis):
            return
        seen.add(source.name)
        before = [operand for operand in source.operands if _is_pending(operand.layout, axis)]
        for operand in before:
            yield from self.makers(operand, axis, seen)
        if not before:
            yield source.name


def _is_pending(layout: Layout, axis: str) -> bool:
    return any(name == axis and op.startswith("sum") for name, op in layout.partial)


def _reason(makers: Sequence[str], split: bool, held: bool) -> str:
    """Why, of the axes of its field. makers: ops whose sums are pending over them. split: whether the gradient is
    computed in parts; held: whether the parameter is in parts."""
    if makers:
        sums = f"{few([f'%{name}' for name in makers], 2)} sum{'s' * (len(makers) == 1)}"
        whose = "{0} splits the parameter: each rank keeps its part"
        whole = "the parameter is whole over {0}: each rank needs all of it"
        return f"{sums} over what {{0}} splits, and {whose if held else whole}"
    if split:
        own = "so is the parameter" if held else "the parameter is whole"
        return f"the gradient is computed in parts over {{0}}, and {own}"
    return "over {0} each rank sums over all" + (" and keeps its part" if held else "")
