"""What a planned graph counts of rows, in symbols: parts with halos, and explicit parts of dims that are sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs
from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value, result_shapes, tensor_operands
from passes.ir.torch_sizes import SYMBOLIC, SizesLost, counts_as
from passes.layout.layout import Halo, Layout, NodeLayouts, Span, spans_of
from passes.plan.planned_graph import NodeRecord, OperandRecord, PlannedGraph, Reshard
from passes.rules.core.rule import OpRule
from passes.rules.core.rule_registry import rule_for
from passes.states.compute_again import compute_again
from passes.strategies.strategies import enumerate_strategies

Place = tuple[str, int]
"""A value: the name of its node, and which of its results it is."""
Pair = tuple[Layout, Layout]
"""A layout in numbers, and in symbols."""


def in_symbols(planned: PlannedGraph, joint: JointGraph, mesh: MeshSpec) -> tuple[NodeRecord, ...]:
    """The records of a plan at sizes that the symbols of `joint` count as: every layout follows again from how its op
    is split, and from what is read of its results. SizesLost where it does not."""
    records, joint = planned.nodes, compute_again(joint, planned.again)
    known = {record.name: record for record in records}
    read: defaultdict[Place, list[Pair]] = defaultdict(list)
    found: dict[str, NodeLayouts] = {}
    for node in reversed(joint.graph.nodes):
        if (record := known.get(node.name)) is None:
            continue
        layouts = found[node.name] = _layouts(node, record, read, mesh)
        for place, pair in zip(
            _sources(record), _pairs(record.layouts.operands, layouts.operands), strict=True
        ):
            read[place].append(pair)
    for record in records:
        for i, pair in enumerate(_pairs(record.layouts.results, found[record.name].results)):
            read[record.name, i].append(pair)
    return tuple(_record(record, found, read) for record in records)


def _sources(record: NodeRecord) -> list[Place]:
    return [(operand.source, operand.result) for operand in record.operands]


def _pairs(numbers: Sequence[Layout], symbols: Sequence[Layout]) -> list[Pair]:
    return list(zip(numbers, symbols, strict=True))


def _record(record: NodeRecord, found: dict[str, NodeLayouts], read: dict[Place, list[Pair]]) -> NodeRecord:
    layouts = found[record.name]
    operands = [
        _operand(
            operand,
            layout,
            found[operand.source].results[operand.result],
            read[operand.source, operand.result],
        )
        for operand, layout in zip(record.operands, layouts.operands, strict=True)
    ]
    results = [
        structs.replace(one, layout=layout)
        for one, layout in zip(record.results, layouts.results, strict=True)
    ]
    return structs.replace(record, operands=tuple(operands), results=tuple(results), splits=layouts.splits)


def _operand(operand: OperandRecord, layout: Layout, held: Layout, known: Sequence[Pair]) -> OperandRecord:
    if not operand.transfers and held != layout:  # which notes that they are equal
        raise SizesLost(f"what is read of {operand.source} is held so at these sizes alone")

    def led(transfer: Reshard) -> Reshard:
        after = next((symbols for numbers, symbols in known if numbers == transfer.after), None)
        if after is None:
            if not transfer.after.counts_rows:
                return transfer
            raise SizesLost(f"a transfer of {operand.source} has a layout on its way that nothing reads")
        return structs.replace(transfer, after=after)

    return structs.replace(operand, layout=layout, transfers=tuple(map(led, operand.transfers)))


def _layouts(node: fx.Node, record: NodeRecord, read: dict[Place, list[Pair]], mesh: MeshSpec) -> NodeLayouts:
    layouts = record.layouts
    operands = [node_value(operand).shape for operand in tensor_operands(node)]
    results = result_shapes(node) if record.results else []
    shapes = [*operands, *results]
    if not any(map(_counts_sizes, (*layouts.operands, *layouts.results), shapes)):
        return layouts
    if node.op != "call_function":
        raise SizesLost(f"{record.name} is given in parts of its own")
    rule = rule_for(node)
    # Nothing is asked of other sizes.
    rule = replace(rule, whole=rule.whole | (rule.sizes.keys() - {split.factor for split in layouts.splits}))
    wider = {
        (split.factor, split.axes): tuple(_spans(rule, record.name, split.factor, read))
        for split in layouts.splits
        if split.spans is not None
    }
    for way in enumerate_strategies(rule, operands, results, mesh, wider=wider, any_order=True):
        if _in_numbers(way) == layouts:
            return way
    raise SizesLost(f"the parts of {record.name} follow from no size")


def _counts_sizes(layout: Layout, shape: Sequence[Any]) -> bool:
    """Whether a dim that is a size is in parts that are counted."""
    pairs = zip(shape, layout.sizes, layout.halos, strict=True)
    return any(isinstance(n, SYMBOLIC) and (sizes or halo) is not None for n, sizes, halo in pairs)


def _spans(rule: OpRule, name: str, factor: str, read: dict[Place, list[Pair]]) -> list[tuple[Span, ...]]:
    """Of a factor that is computed in wider parts: those in which a result with it is read."""
    found: list[tuple[Span, ...]] = []
    for i, result in enumerate(rule.results):
        for d, factors in enumerate(result):
            if factor in factors:
                for _, layout in read[name, i]:
                    sizes, halo = layout.sizes[d], layout.halos[d]
                    found += [halo.spans] if halo is not None else [] if sizes is None else [spans_of(sizes)]
    return found


def _in_numbers(way: NodeLayouts) -> NodeLayouts:
    splits = tuple(structs.replace(one, spans=_counted(one.spans)) for one in way.splits)
    return NodeLayouts(tuple(map(_numbered, way.operands)), tuple(map(_numbered, way.results)), splits)


def _numbered(layout: Layout) -> Layout:
    halos = [one if one is None else Halo(_counted(one.spans), one.summed) for one in layout.halos]
    return structs.replace(layout, sizes=_counted(layout.sizes), halos=tuple(halos))


def _counted(numbers: Any) -> Any:
    """Tuples in which sizes are what they count as."""
    return tuple(map(_counted, numbers)) if isinstance(numbers, tuple) else counts_as(numbers)
