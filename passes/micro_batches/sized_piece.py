"""One graph for every piece of a batch, in symbols: how many samples are before it, and how many it has, are sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs
from torch import fx

from passes.ir.joint import JointGraph, node_value, result_shapes, tensor_operands
from passes.ir.torch_sizes import (
    SYMBOLIC,
    Evaluation,
    SizesLost,
    SizeSymbols,
    counts_as,
    evaluation,
    expression_of,
    same_number,
)
from passes.layout.layout import FactorSplit, Layout, NodeLayouts, Span
from passes.micro_batches.cut_batch import plain_graph
from passes.micro_batches.in_pieces import in_pieces
from passes.micro_batches.run_times import RunTimes
from passes.micro_batches.time_axis import TIME, even_sizes, time_mesh
from passes.rules.core.rule_registry import rule_for

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
        if not same_number(each * self.batch, length) or (counts_as(lo), counts_as(hi)) != known:
            raise SizesLost(f"a part of {length} is no number of samples")
        return (0, lo), (lo, hi), (hi, length)
