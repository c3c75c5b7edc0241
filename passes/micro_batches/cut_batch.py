"""A joint graph as the graphs of its pieces, what of a model cannot be in pieces, and pieces of other sizes; or as one
graph for every piece, of which the samples that it has, and those before it, are sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs
from torch import fx

from cost_model.errors import InfeasibleError
from passes.ir.graph_properties import BrokenGraphError
from passes.ir.joint import JointGraph, dependents, node_value, result_index, result_shapes, tensor_operands
from passes.ir.op_traits import is_collect, is_piece, is_product
from passes.ir.torch_sizes import (
    SYMBOLIC,
    Evaluation,
    SizesLost,
    SizeSymbols,
    counts_as,
    evaluation,
    expression_of,
)
from passes.layout.layout import Assignment, FactorSplit, Layout, NodeLayouts, Span
from passes.lower.rank_program import without_usually_missing
from passes.micro_batches.in_pieces import in_pieces, without_uses
from passes.micro_batches.run_times import RunTimes, find_run_times, piece_strategies
from passes.micro_batches.time_axis import TIME, batch_length, call_products, even_sizes, time_mesh
from passes.rules.core.rule_registry import rule_for
from passes.search.search_terms import Choose, Narrowing


def cut_batch(joint: JointGraph, count: int, *, sizes_only: bool = False) -> JointGraph:
    """The step of a canonical `joint`, its batch in `count` pieces: the graph of the first, with those of the others.

    sizes_only: of pieces of one size there is one graph, which is enough to plan them.

    All hold what runs before and after the pieces, alike; the loss alone gets a gradient, where there is one scalar.
    Raises Uncut, an InfeasibleError that says which op needs the whole batch at once.
    """
    if count == 1:
        return joint
    plain, times = when_cut(joint, count)
    first, *others = (
        in_pieces(plain, times, index)
        for index in (_first_of_each_size(plain, times) if sizes_only else range(count))
    )
    _check_alike(first, others)
    return replace(first, others=tuple(others))


def _check_alike(first: JointGraph, others: Sequence[JointGraph]) -> None:
    """BrokenGraphError where pieces run other ops: one would be taken for another of its size."""
    for place, other in enumerate(others):
        pairs = itertools.zip_longest(first.graph.nodes, other.graph.nodes)
        differ = (pair for pair in pairs if None in pair or pair[0].target != pair[1].target)
        unlike = next((node.name for pair in differ for node in pair if node is not None), None)
        if unlike is not None:
            raise BrokenGraphError(
                f"piece {place + 1} of a batch runs other ops than the first, from {unlike} on\n"
                "  try: report this with the model; micro_batches=1 runs without pieces"
            )


def when_cut(joint: JointGraph, count: int) -> tuple[JointGraph, RunTimes]:
    """A graph as it is cut, and what of it runs in `count` pieces. Raises Uncut."""
    check_long_enough(joint, count)
    plain = plain_graph(joint)
    times = find_run_times(plain, count)
    check_cut(plain, times)
    return plain, times


def plain_graph(joint: JointGraph) -> JointGraph:
    """The graph that is cut: the loss alone gets a gradient, and every reader reads the value itself."""
    return without_uses(without_usually_missing(joint))


def _first_of_each_size(joint: JointGraph, times: RunTimes) -> list[int]:
    """The pieces of which all before have other sizes: of what is cut, as it is cut."""
    firsts: dict[tuple[int, ...], int] = {}
    for place, sizes in enumerate(zip(*sorted(set(_cut_sizes(joint, times))), strict=True)):
        firsts.setdefault(sizes, place)
    return list(firsts.values()) or [0]


def _cut_sizes(joint: JointGraph, times: RunTimes) -> Iterator[tuple[int, ...]]:
    """Per dim that is cut the sizes that pieces have of it."""
    return (layout.split_sizes(shape, times.mesh, dim) for shape, layout, dim in times.cut(joint))


def cut_for_stages(joint: JointGraph, count: int, *, sizes_only: bool = False) -> JointGraph:
    """The graph of a call of which the stages of a pipeline are cut: if it trains, in `count` pieces, with a gradient
    for the loss alone where there is one scalar; else as it is. Raises Uncut.

    sizes_only: as in `cut_batch`."""
    if not joint.trains:
        return joint
    if count == 1:
        return without_usually_missing(joint)
    return cut_batch(joint, count, sizes_only=sizes_only)


class Uncut(InfeasibleError):
    """A batch cannot be run in so many pieces, whatever the layouts."""


def check_long_enough(joint: JointGraph, count: int) -> None:
    """Uncut if the call has fewer samples than pieces."""
    length = batch_length(joint)
    if length < count:
        raise Uncut(
            f"micro_batches={count}: the longest first dim of the call's tensors is {length}\n"
            f"  try: micro_batches={max(1, length)}, or a larger batch"
        )


def check_cut(joint: JointGraph, times: RunTimes) -> None:
    """Uncut if work on the call's tensors would have to be done on the whole batch at once."""
    whole = next((n for n in call_products(joint) if times.of[n.name] != "piece"), None)
    if whole is None:
        return
    node = _in_the_way(joint, times.count) or whole
    place = ", ".join(str(node.meta[key]) for key in ("module", "source") if node.meta.get(key))
    raise Uncut(
        f"micro_batches={times.count}: {_op_name(node)}{f' ({place})' if place else ''} needs the whole batch at once\n"
        "  try: micro_batches=1, or what is of each sample alone: GroupNorm or LayerNorm instead of the "
        "batch's statistics, a sum or mean over samples as the loss"
    )


def _op_name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def _in_the_way(joint: JointGraph, count: int) -> fx.Node | None:
    """The first op that cannot take its operands as earlier ops, all run in pieces of the first dim, leave them; or
    that needs a sum over all pieces, where pieces go on with what it makes of it, as gradients of a loss's root do."""
    # What needs no product is run before the pieces.
    worked = dependents(joint.graph.nodes, [n for n in joint.graph.nodes if is_product(n)])
    late: dict[fx.Node, fx.Node] = {}
    held: dict[fx.Node, Layout] = {}
    mesh = time_mesh(count)
    for node, spec in joint.given:
        shape = tuple(node_value(node).shape)
        if spec.kind == "input" and shape and shape[0] == batch_length(joint):
            dims = [(TIME,), *[()] * (len(shape) - 1)]
            sizes = [even_sizes(shape[0], count), *[None] * (len(shape) - 1)]
            held[node] = Layout.of(shape, mesh, dims, sizes=sizes)
    strategies = piece_strategies(joint, count)
    for node in joint.graph.nodes:
        if node.op != "call_function" or result_index(node)[0] is not node:
            continue
        operands = tensor_operands(node)
        given = [held.get(operand) for operand in operands]
        waited = next(
            (late[n] for n in (result_index(operand)[0] for operand in operands) if n in late), None
        )
        if waited is not None:
            if any(layout is not None and not layout.partial for layout in given):
                return waited
            late[node] = waited
            continue
        if not any(given):
            continue
        chosen = next((s for s in strategies(node) if _reads(s, given)), None)
        if chosen is not None:
            for value in (node, *node.users):
                producer, index = result_index(value)
                if producer is node:
                    held[value] = chosen.results[index]
        elif any(layout is not None and not layout.partial for layout in given):
            return node
        elif node in worked:
            late[node] = node
    return None


def _reads(strategy: NodeLayouts, given: list[Layout | None]) -> bool:
    pairs = list(zip(strategy.operands, given, strict=True))
    return all(wanted == layout if layout is not None else not wanted.partial for wanted, layout in pairs)


def first_of_each_size(graphs: Sequence[JointGraph]) -> list[int]:
    """Per graph the first whose values all have the same shapes."""
    seen: dict[tuple[object, ...], int] = {}
    return [seen.setdefault(_shapes(graph), place) for place, graph in enumerate(graphs)]


def piece_places(joint: JointGraph) -> list[int]:
    """Per piece the place of its size: 0 is the first piece's."""
    if not joint.others:  # of a whole batch nothing is to be compared
        return [0]
    firsts = first_of_each_size((joint, *joint.others))
    order = {place: number for number, place in enumerate(sorted(set(firsts)))}
    return [order[place] for place in firsts]


def layouts_like(assignment: Assignment, graph: JointGraph) -> Narrowing:
    """Of `graph`, a piece of another size than that of `assignment`: what runs before and after has the layouts
    that it has there, so that both can share it; what a piece does has them where they fit.
    """
    allowed: dict[str, Choose] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            kept = _ALL
        elif node.op != "call_function" or result_index(node)[0] is not node or node.name not in assignment:
            continue
        elif node.meta["runs"] != "piece":
            kept = _ALL
        else:
            kept = ("operands",) if is_piece(node) else ("results",) if is_collect(node) else ()
        if kept:
            allowed[node.name] = partial(_alike, node, assignment[node.name], kept)
    return Narrowing(held=assignment, allowed=allowed)


_ALL = ("operands", "results", "splits")


def _shapes(graph: JointGraph) -> tuple[object, ...]:
    return tuple(tuple(map(tuple, result_shapes(n))) for n in graph.graph.nodes if n.op != "output")


def _alike(
    node: fx.Node, held: NodeLayouts, kept: Sequence[str], strategies: Sequence[NodeLayouts]
) -> list[int]:
    content = lambda strategy: [getattr(strategy, name) for name in kept]
    if found := [i for i, strategy in enumerate(strategies) if content(strategy) == content(held)]:
        return found
    shapes = ", ".join(str(list(shape)) for n in tensor_operands(node) for shape in result_shapes(n))
    raise InfeasibleError(
        f"micro-batches of several sizes: the smaller cannot have the layouts of the larger at {node.name} ({shapes})"
        "\n  try: micro_batches that divides the batch"
    )


_PARTS, _OWN = time_mesh(3), 1
"""Of what is cut: what earlier pieces have, the piece's own, what later ones have."""


@dataclass(frozen=True)
class PieceSizes:
    """The sizes of a call in numbers, and those of one piece of its batch: length: samples of the piece, start: samples
    before it. values: what symbols count as, each at least 2; a piece of a single sample has none for that."""

    call: tuple[int, ...]
    length: int
    start: int
    values: tuple[int, ...]

    @staticmethod
    def of(call: Sequence[int], length: int, start: int) -> PieceSizes:
        values = (*call, start + 2, *([length] if length > 1 else []))
        return PieceSizes(tuple(call), length, start, values)

    @staticmethod
    def of_whole(call: Sequence[int]) -> PieceSizes:
        """Of a batch that is not cut."""
        return PieceSizes(tuple(call), 0, 0, tuple(call))

    def own(self, symbols: SizeSymbols) -> Span:
        """Where the piece begins and ends, in symbols that count as its values."""
        start, *length = symbols.sizes[len(self.call) :]
        return start - 2, start - 2 + (length[0] if length else self.length)


@dataclass(frozen=True)
class SizedCut:
    """How calls of all sizes are cut. times: of one of them, in numbers."""

    times: RunTimes
    batch: Evaluation

    @staticmethod
    def of(joint: JointGraph, times: RunTimes, symbols: SizeSymbols) -> SizedCut:
        """joint: in symbols, of a whole call."""
        batch = batch_of(plain_graph(joint), times)
        code = symbols.code(expression_of(batch)) if isinstance(batch, SYMBOLIC) else str(batch)
        return SizedCut(times, evaluation(len(symbols.sizes), [], [code]))

    def pieces(self, call: Sequence[int]) -> list[PieceSizes] | None:
        """None: there are more pieces than samples."""
        (batch,) = self.batch(call) or [0]
        if batch < self.times.count:
            return None
        sizes = even_sizes(batch, self.times.count)
        return [PieceSizes.of(call, n, sum(sizes[:place])) for place, n in enumerate(sizes)]

    def graph(self, joint: JointGraph, index: int, piece: PieceSizes, symbols: SizeSymbols) -> JointGraph:
        """Of a piece, in symbols that count as its values."""
        return piece_in_symbols(plain_graph(joint), self.times, index, piece.own(symbols))


def batch_of(joint: JointGraph, times: RunTimes) -> Any:
    """The number of samples that is cut into pieces; of all that is cut there are whole samples."""
    return min((shape[dim] for shape, _, dim in times.cut(joint)), key=counts_as)


def piece_in_symbols(joint: JointGraph, times: RunTimes, index: int, own: Span) -> JointGraph:
    """The graph of piece `index`, which is that of all pieces for which the same holds of their sizes. joint: in
    symbols, without `use`; times: of the same in numbers. own: the samples of the piece, in symbols.

    SizesLost where what it reads follows from no number of samples."""
    cut = _Cut(batch_of(joint, times), own, times.count, index)
    layouts = {
        n.name: cut.layouts(n, times.layouts[n.name]) for n in joint.graph.nodes if n.name in times.layouts
    }
    return in_pieces(joint, replace(times, layouts=layouts, mesh=_PARTS), _OWN)


@dataclass(frozen=True)
class _Cut:
    """batch: samples, in symbols. own: of the piece `index` of `count`."""

    batch: Any
    own: Span
    count: int
    index: int

    def layouts(self, node: fx.Node, layouts: NodeLayouts) -> NodeLayouts:
        operands = [tuple(node_value(n).shape) for n in tensor_operands(node)]
        rule = rule_for(node).splitting(split.factor for split in layouts.splits)
        return NodeLayouts(
            tuple(map(self._layout, layouts.operands, operands)),
            tuple(map(self._layout, layouts.results, result_shapes(node))),
            tuple(self._split(split, rule.sizes[split.factor]) for split in layouts.splits),
        )

    def _layout(self, layout: Layout, shape: Sequence[Any]) -> Layout:
        dim = layout.dim_of(TIME)
        if dim is None:
            return layout
        known = layout.interval(tuple(map(counts_as, shape)), time_mesh(self.count), dim, self.index)
        sizes = list(layout.sizes)
        sizes[dim] = tuple(hi - lo for lo, hi in self._spans(shape[dim], known))
        return structs.replace(layout, sizes=tuple(sizes))

    def _split(self, split: FactorSplit, length: Any) -> FactorSplit:
        known = split.parts(counts_as(length), time_mesh(self.count))[self.index]
        return structs.replace(split, spans=self._spans(length, known))

    def _spans(self, length: Any, known: Span) -> tuple[Span, ...]:
        """Of what has so many elements a sample. known: the piece's own, in numbers."""
        each = length // self.batch
        lo, hi = (each * end for end in self.own)
        if not _same_number(each * self.batch, length) or (counts_as(lo), counts_as(hi)) != known:
            raise SizesLost(f"a part of {length} is no number of samples")
        return (0, lo), (lo, hi), (hi, length)


def _same_number(one: Any, two: Any) -> bool:
    """Whether two numbers are the same for all sizes; nothing is asked of these. Since 2.0."""
    first, second = (n.node.expr if isinstance(n, SYMBOLIC) else n for n in (one, two))
    return bool(first - second == 0)
