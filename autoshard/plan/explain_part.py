"""One op, parameter or module of a plan in words; of a parameter, how its gradient is reduced: by which collectives, at
what price, and why.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_memory import fold_numbers
from autoshard.plan.plan_words import Buckets, collective_lines, parameter_lines, price_text, transfer_words
from cost_model.errors import PlanError, few
from cost_model.memory import format_seconds
from passes.layout.layout import Layout
from passes.plan.planned_graph import (
    NodeRecord,
    OperandRecord,
    PlannedGraph,
    Reshard,
    ResultRecord,
    made_of_parameters,
)

_Tied = Mapping[str, str]
"""Further name of a parameter -> the name that its record has."""


def explain_named(plan: PlanContent, name: str) -> str:
    """`explain_part`, and of a parameter how its gradient is reduced; of stages each that has something of that name.
    PlanError where none has."""
    if not plan.axis:
        text, own = explain_part(plan.planned, name, plan.parameter_layouts), _own_name(plan, name)
        named = (r for r in plan.records if r.op == "param" and own in (r.name, r.parameter))
        return text + "".join(f"{line}\n" for record in named for line in _gradient_lines(plan, record))
    errors: list[PlanError] = []
    parts: list[str] = []
    for number, stage in enumerate(plan.stages):
        try:
            parts.append(f"stage {number}\n{explain_named(stage, name)}")
        except PlanError as reason:
            errors.append(reason)
    if not parts:
        raise errors[0]
    places = plan.holders.get(name, ())
    if len(places) > 1 and any(f"grad {_own_name(one, name)}" in one.records[-1].ends for one in plan.stages):
        at = f"{plan.axis}={', '.join(map(str, places))}"
        parts.append(
            f"held at {at}: an all_reduce[{plan.axis}] adds up its gradients at the end, not priced\n"
        )
    return "".join(parts)


def _own_name(plan: PlanContent, name: str) -> str:
    """That which the record of a tied parameter has."""
    return _tied(plan.records, plan.parameter_layouts).get(name, name)


def explain_part(planned: PlannedGraph, name: str, parameters: Iterable[str] = ()) -> str:
    """Of a node or parameter its layouts, seconds and the transfers in front of it; of a parameter its readers too, and
    the transfers that bring it to them; of a module all its parameters, collectives and nodes, those of its modules
    included. PlanError, with near names, where nothing has that name.

    parameters: all names, the further ones of a tied parameter behind the one that its record has.
    """
    records = planned.nodes
    tied = _tied(records, parameters)
    if not name:  # what all ops outside of modules have
        raise PlanError(_unknown(records, name, tied))
    exact = [r for r in records if name in (r.name, r.parameter) or r.parameter == tied.get(name, name)]
    if exact:
        head = [f"{name} is tied to {tied[name]}"] if name in tied else []
        lines = [*head, *_node_lines(exact, planned.buckets), *_reader_lines(records, exact, planned.buckets)]
        return "\n".join(lines) + "\n"
    members = [r for r in records if _is_in(r, name)]
    shared = {other: first for other, first in tied.items() if other.startswith(name + ".")}
    if not members and not shared:
        raise PlanError(_unknown(records, name, tied))
    return "\n".join(_module_lines(planned, members, name, shared)) + "\n"


def _tied(records: Sequence[NodeRecord], parameters: Iterable[str]) -> _Tied:
    own = {record.parameter for record in records}
    tied: dict[str, str] = {}
    first = ""
    for name in parameters:
        if name in own:
            first = name
        else:
            tied[name] = first
    return tied


def _is_in(record: NodeRecord, module: str) -> bool:
    return any(
        place == module or place.startswith(module + ".") for place in (record.module, record.parameter)
    )


def _unknown(records: Sequence[NodeRecord], name: str, tied: _Tied) -> str:
    known: dict[str, None] = dict.fromkeys(tied)
    for record in records:
        known |= dict.fromkeys((record.name, record.parameter))
        path = record.module.split(".")
        known |= dict.fromkeys(".".join(path[:depth]) for depth in range(1, len(path) + 1))
    near = difflib.get_close_matches(name, [n for n in known if n], n=3)
    hint = (
        " or ".join(near)
        or "a name from to_text(), or from the model's named_parameters() or named_modules()"
    )
    return f"explain({name!r}): the plan has no node, parameter or module of that name\n  try: {hint}"


def _module_lines(planned: PlannedGraph, members: Sequence[NodeRecord], name: str, tied: _Tied) -> list[str]:
    inside = {record.name for record in members}
    layouts = {r.parameter: r.results[0].layout for r in planned.nodes if r.op == "param"}
    parameters = {r.parameter: layouts[r.parameter] for r in members if r.op == "param"}
    parameters |= {other: layouts[first] for other, first in tied.items()}
    nodes = [r for r in members if r.op != "param"]
    forward, backward = (
        format_seconds(sum(r.seconds for r in nodes if r.phase == phase)) for phase in ("forward", "backward")
    )
    collectives = [
        c for c in planned.collectives if c.node in inside or (c.value in inside and c.node == "output")
    ]
    lines = [
        f"{name}: {len(nodes)} nodes, {forward} forward, {backward} backward",
        *collective_lines(collectives),
    ]
    if parameters:
        lines += parameter_lines(parameters)
    return [*lines, "nodes", *_layer_lines(nodes, name, planned.buckets)]


def _layer_lines(nodes: Sequence[NodeRecord], module: str, buckets: Buckets) -> list[str]:
    """The nodes layer by layer, equal layers once."""
    layers: dict[str, list[NodeRecord]] = {}
    depth = len(module.split("."))
    for record in nodes:
        path = record.module.split(".")
        numbered = len(path) > depth and path[depth].isdecimal()
        layers.setdefault(".".join(path[: depth + 1]) if numbered else module, []).append(record)
    lines: list[str] = []
    for title, _, count in fold_numbers([(layer, _content(found, layer)) for layer, found in layers.items()]):
        first = next(found for layer, found in layers.items() if _stands_for(title, layer))
        if title != module:
            lines.append(f"  {title}" + (f"  x {count}" if count > 1 else ""))
        lines += ["  " + line for line in _node_lines(first, buckets)]
    return lines


def _stands_for(title: str, layer: str) -> bool:
    """Whether `layer` is the first of the layers that `title`, "layers.0-31", names."""
    before, _, number = title.rpartition(".")
    return layer == ".".join(part for part in (before, number.partition("-")[0]) if part)


def _content(nodes: Sequence[NodeRecord], layer: str) -> Hashable:
    """What equal layers have in common: all but names and places in the source."""
    place = {record.name: i for i, record in enumerate(nodes)}
    return tuple(
        (
            record.op,
            record.text,
            record.results,
            record.phase,
            record.module.removeprefix(layer),
            tuple(
                (place.get(operand.source, -1), tuple((t.step.text(), t.nbytes) for t in operand.transfers))
                for operand in record.operands
            ),
        )
        for record in nodes
    )


def _node_lines(nodes: Sequence[NodeRecord], buckets: Buckets) -> list[str]:
    """The seconds of a transfer that is one of a bucket are what it adds to that."""
    lines: list[str] = []
    for record in nodes:
        results = ", ".join(str(result) for result in record.results)
        price = f"{price_text(record.seconds, record.priced)} {record.source}".rstrip()
        lines.append(f"%{record.name}: {results} = {record.op}  // {price}")
        for operand in record.operands:
            lines += [
                f"    reads %{operand.source} through {how}" for how in transfer_words(operand, buckets)
            ]
    return lines


def _reader_lines(
    records: Sequence[NodeRecord], exact: Sequence[NodeRecord], buckets: Buckets
) -> Iterator[str]:
    """Of a parameter, who reads it or casts and views of it: how laid out, and through which transfers."""
    made = made_of_parameters(records, exact)
    for record in records:
        for operand in record.operands:
            if operand.source in made and record.op != "output":
                ways = ", ".join(f"through {way}" for way in transfer_words(operand, buckets)) or "as it is"
                yield f"    read by %{record.name}, {record.phase}: %{operand.source} {operand.layout}, {ways}"


_ADDS = ("aten.add.Tensor", "aten.cat", "aten.stack")
"""Ops that put gradients together: of several uses of a parameter, or of parts of it."""


def _gradient_lines(plan: PlanContent, parameter: NodeRecord) -> Iterator[str]:
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
    def readers(self) -> Counter[str]:
        return Counter(read.source for record in self.plan.records for read in record.operands)

    def lines(self) -> Iterator[str]:
        reads = list(self.on_the_way(self.last))
        for read in [read for read in reversed(reads) if read.transfers] or [self.last]:
            yield f"    gradient %{read.source}: {self.value(read)}, {self.how(read)}"
        yield f"      {self.why([read for read in reads if not self.carries(self.plan.planned.by_name[read.source])])}"

    def value(self, read: OperandRecord) -> ResultRecord:
        return self.plan.planned.by_name[read.source].results[read.result]

    def on_the_way(self, read: OperandRecord) -> Iterator[OperandRecord]:
        """From the graph's end back to what computes the gradient."""
        yield read
        source = self.plan.planned.by_name[read.source]
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
        source = self.plan.planned.by_name[read.source]
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
