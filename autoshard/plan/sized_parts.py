"""A plan of a call that is captured with symbols for sizes, in those: the graph of the call or of a piece of it, and of
each stage, with layouts for all sizes of which the same holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.plan.plan import PipelinePlan, Plan
from passes.ir.joint import JointGraph
from passes.ir.sized_graph import SizedJoint
from passes.ir.torch_sizes import SizeSymbols, symbolic_sizes
from passes.layout.layout import Assignment
from passes.micro_batches.cut_batch import cut_for_stages, piece_places, when_cut
from passes.micro_batches.sized_piece import PieceSizes, SizedCut
from passes.plan.sized_plan import in_symbols
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs


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
    mine, theirs = _layouts(one), _layouts(other)
    return all(each in theirs for each in mine) or all(each in mine for each in theirs)


def _at(joint: SizedJoint, values: Sequence[int], symbols: SizeSymbols) -> JointGraph:
    graph = joint.at(values, symbols)
    assert graph is not None
    return graph


def _at_place(plan: Plan, place: int, graph: JointGraph) -> Plan:
    """The plan of pieces of one size, in symbols."""
    return replace(plan, records=in_symbols(plan.sizes[place], graph, plan.mesh), other_sizes=())


def _layouts(plan: Plan) -> list[list[Assignment]]:
    """Of each size of pieces, of all stages."""
    places = range(len(plan.stages[0].sizes))
    return [[stage.sizes[place].layouts for stage in plan.stages] for place in places]
