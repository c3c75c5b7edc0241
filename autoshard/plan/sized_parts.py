"""A plan of a call that is captured with symbols for sizes, in those: the graph of the call or of a piece of it, and of
each stage, with layouts for all sizes of which the same holds. What a planned graph counts of rows is in symbols: parts
with halos, and explicit parts of dims that are sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs
from torch import fx

from autoshard.plan.plan import PipelinePlan, Plan
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value, result_shapes, tensor_operands
from passes.ir.sized_graph import SizedJoint, mapped
from passes.ir.torch_sizes import SYMBOLIC, SizesLost, SizeSymbols, counts_as, symbolic_sizes
from passes.layout.layout import Assignment, Layout, NodeLayouts, Span, spans_of
from passes.micro_batches.cut_batch import PieceSizes, SizedCut, cut_for_stages, piece_places, when_cut
from passes.plan.planned_graph import NodeRecord, OperandRecord, PlannedGraph, Reshard
from passes.rules.core.rule import OpRule
from passes.rules.core.rule_registry import rule_for
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs
from passes.states.compute_again import compute_again
from passes.strategies.strategies import enumerate_strategies


def is_for_sizes(plan: Plan) -> bool:
    """Whether a plan may have a program for all sizes: not where it says how many rows a piece of a head has, or a
    rank's part of what goes in or comes out."""
    if plan.head_pieces > 1:
        return False
    ends = (*plan.inputs.values(), *plan.outputs.values())
    return not any(one is not None and one.counts_rows for one in ends)


@dataclass(frozen=True)
class InSymbols:
    """symbols: that count as the sizes of a call, and of a piece of it. graph: of the call, or with that piece. plan:
    of that graph. stages: of each its graph and its plan; of a plan without stages one, which is that."""

    symbols: SizeSymbols
    graph: JointGraph
    plan: Plan
    stages: Sequence[tuple[StageGraph, Plan]]


@dataclass(frozen=True)
class SizedPlan:
    """joint: of a whole call in symbols. values: sizes of a call, whose plan this is. base: its graph in numbers, cut
    as the plan says. cut: how calls of all sizes are."""

    joint: SizedJoint
    values: tuple[int, ...]
    plan: Plan
    base: JointGraph
    cut: SizedCut | None

    @staticmethod
    def of(
        joint: SizedJoint, values: Sequence[int], plan: Plan, whole: JointGraph, base: JointGraph
    ) -> SizedPlan:
        """whole: the graph of the call in numbers. Raises SizesLost."""
        cut = None
        if base.pieces > 1:
            _, times = when_cut(whole, base.pieces)
            with symbolic_sizes():
                symbols = SizeSymbols(values)
                cut = SizedCut.of(_at(joint, values, symbols), times, symbols)
        return SizedPlan(joint, tuple(values), plan, base, cut)

    @property
    def pieces(self) -> list[PieceSizes]:
        """Of the call; of one that is whole, one."""
        cut, values = self.cut, self.values
        return [PieceSizes.of_whole(values)] if cut is None else cut.pieces(values) or []

    def of_piece(self, index: int, piece: PieceSizes) -> InSymbols:
        """In symbols that count as a piece's values. Raises SizesLost, and whatever a pass says to a symbol."""
        plan, place = self.plan, piece_places(self.base)[index]
        symbols = SizeSymbols(piece.values)
        graph = _at(self.joint, self.values, symbols)
        if self.cut is not None:
            graph = self.cut.graph(graph, index, piece, symbols)
        if not isinstance(plan, PipelinePlan):
            of_all = _at_place(plan, place, graph)
            return InSymbols(symbols, graph, of_all, [(StageGraph.only(graph), of_all)])
        if self.cut is None:
            graph = cut_for_stages(graph, 1)
        # Cut as the graph in numbers is.
        cut = stage_graphs(replace(self.base, others=(graph,)), plan.cut)
        graphs = [replace(one, joint=one.joint.others[0]) for one in cut]
        pairs = zip(graphs, plan.stages, strict=True)
        return InSymbols(
            symbols, graph, plan, [(one, _at_place(stage, place, one.joint)) for one, stage in pairs]
        )


def may_mix(one: Plan, other: Plan) -> bool:
    """Whether a call may have pieces of both, as all layouts are the same."""
    way = lambda plan: (plan.micro_batches, plan.axis, plan.schedule, plan.cut)
    if way(one) != way(other):
        return False
    mine, theirs = _by_part(one), _by_part(other)
    return all(each in theirs for each in mine) or all(each in mine for each in theirs)


def _at(joint: SizedJoint, values: Sequence[int], symbols: SizeSymbols) -> JointGraph:
    graph = joint.at(values, symbols)
    assert graph is not None
    return graph


def _at_place(plan: Plan, place: int, graph: JointGraph) -> Plan:
    """The plan of pieces of one size, in symbols."""
    return replace(plan, records=in_symbols(plan.sizes[place], graph, plan.mesh), other_sizes=())


def _by_part(plan: Plan) -> list[list[Assignment]]:
    """Of each size of pieces, of all stages."""
    places = range(len(plan.stages[0].sizes))
    return [[stage.sizes[place].layouts for stage in plan.stages] for place in places]


Place = tuple[str, int]
"""A value: the name of its node, and which of its results it is."""
Pair = tuple[Layout, Layout]
"""A layout in numbers, and in symbols."""


def in_symbols(planned: PlannedGraph, joint: JointGraph, mesh: MeshSpec) -> tuple[NodeRecord, ...]:
    """The records of a plan at sizes that the symbols of `joint` count as: every layout follows again from how its op
    is split, and from what is read of its results. SizesLost where it does not."""
    records, joint = planned.nodes, compute_again(joint, planned.again)
    read: defaultdict[Place, list[Pair]] = defaultdict(list)
    found: dict[str, NodeLayouts] = {}
    for node in reversed(joint.graph.nodes):
        if (record := planned.by_name.get(node.name)) is None:
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
    if not any(map(_counts_sizes, layouts.tensors, shapes)):
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
        if mapped(way, counts_as) == layouts:
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
