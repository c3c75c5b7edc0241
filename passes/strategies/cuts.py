"""Where dims are worth cutting, beside torch.chunk's places: found from what the graph's ends and ops ask for.

Chains of windows: the overlapping spans that ranks may compute, so that a later window finds all it reads at home.

    %a: f32[97@sp]            = convolution(%x)      exchanges a row
    %b: f32[97@sp]            = convolution(%a)      exchanges a row
    ->
    %a: f32[97@sp{0:34,...}]  = convolution(%x)      exchanges two rows, and computes one that its neighbour has too
    %b: f32[97@sp]            = convolution(%a)      exchanges nothing

One wider exchange for two, at the price of rows computed twice: strategies like any other, which the search prices.
What a span holds beyond the tensor's ends was never there: every window clips, and pads with its own padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value, node_values, result_index, tensor_operands, tensor_shapes
from passes.ir.op_traits import is_use
from passes.layout.layout import (
    JoinedAxes,
    Layout,
    Span,
    Unit,
    chained,
    in_units,
    nested_sizes,
    nested_spans,
    spans_of,
)
from passes.layout.windows import Window
from passes.rules.check.first_use import tried_rule
from passes.rules.core.rule import Dim, OpRule

Spans = tuple[Span, ...]
Place = tuple[int, tuple[str, ...]]
"""Length of a dim, and the axes that split it, major to minor."""
Wider = Mapping[tuple[str, tuple[str, ...]], tuple[Spans, ...]]
"""One op's (factor, axes) -> overlapping spans to compute."""


@dataclass(frozen=True)
class Cuts:
    """units: length of a dim -> the granularities in which some op of the graph needs it split. A dim of 64 that a
           view turns into 4 heads of 16 has {64: {16}}: over 3 ranks the heads are split (2, 2, 0), so the dim
           must be offered as (32, 32, 0) and not only as torch.chunk's (22, 22, 20).
    sizes: split sizes that an input has, or that ops make of those.
    """

    units: Mapping[int, frozenset[int]] = field(default_factory=dict)
    sizes: Mapping[Place, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    known: dict[Hashable, list[Spans | None]] = field(default_factory=dict, repr=False, compare=False)

    def options(self, length: int, axes: tuple[str, ...], mesh: MeshSpec) -> list[Spans | None]:
        """Ways to split a factor; the first, None, is torch.chunk's."""
        counts = tuple(mesh.size(axis) for axis in axes)
        if (length, axes, counts) not in self.known:
            units = (unit for unit in sorted(self.units.get(length, frozenset())) if length % unit == 0)
            ways = itertools.chain(
                (nested_sizes(length, counts, unit) for unit in units), self._refined(length, axes, mesh)
            )
            found = dict.fromkeys((nested_sizes(length, counts), *ways))
            self.known[length, axes, counts] = [None, *map(spans_of, list(found)[1:])]
        return self.known[length, axes, counts]

    def _refined(self, length: int, axes: tuple[str, ...], mesh: MeshSpec) -> Iterator[tuple[int, ...]]:
        """Known sizes over the first of `axes`, chunked over the others."""
        for count in range(1, len(axes) + 1):
            rest = tuple(mesh.size(axis) for axis in axes[count:])
            for sizes in self.sizes.get((length, axes[:count]), ()):
                yield tuple(part for size in sizes for part in nested_sizes(size, rest))


NO_CUTS = Cuts()


def find_cuts(
    joint: JointGraph,
    mesh: MeshSpec,
    ends: Mapping[int, Sequence[Layout]],
    ops: Iterable[tuple[fx.Node, OpRule]],
) -> Cuts:
    """The sizes that are followed through the graph.

    ends: placeholder position -> the layouts it may have. ops: of the graph, in order, with their rules (`ops_of`).
    """
    finder = _Finder(mesh)
    for position, layouts in ends.items():
        if joint.inputs[position].kind in ("input", "tangent"):
            shape = node_value(joint.placeholders[position]).shape
            for layout in layouts:
                finder.start(layout, shape)
    for node, rule in ops:
        finder.follow(node, rule)
    return finder.cuts()


def ops_of(joint: JointGraph) -> Iterator[tuple[fx.Node, OpRule]]:
    """The ops of the graph, in order, with their rules. Raises ShardingError for a user's rule that is wrong."""
    for node in joint.graph.nodes:
        if node.op == "call_function" and result_index(node)[0] is node:
            yield node, tried_rule(node)


@dataclass
class _Finder:
    mesh: MeshSpec
    units: dict[int, set[int]] = field(default_factory=dict)
    sizes: dict[Place, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def cuts(self) -> Cuts:
        sizes = {place: tuple(found) for place, found in self.sizes.items() if found}
        return Cuts({length: frozenset(found) for length, found in self.units.items()}, sizes)

    def start(self, layout: Layout, shape: Sequence[int]) -> None:
        for d, length in enumerate(shape):
            if layout.dims[d]:
                self._know((length, layout.dims[d]), layout.split_sizes(shape, self.mesh, d))

    def follow(self, node: fx.Node, rule: OpRule) -> None:
        """What the op makes of the sizes known for its operands' dims, and the units of its products."""
        tensors = zip(rule.operands_and_results, tensor_shapes(node), strict=True)
        dims = [
            (t, d, dim, length)
            for t, (tensor, shape) in enumerate(tensors)
            for d, (dim, length) in enumerate(zip(tensor, shape, strict=True))
        ]
        for _, _, dim, length in dims:
            if len(dim) > 1 and (inner := rule.large(dim)[1:]):
                self.units.setdefault(length, set()).add(math.prod(rule.sizes[factor] for factor in inner))
        if not self.sizes:
            return
        for t, d, dim, length in dims:
            if t < len(rule.operands):
                self._enter(rule, (t, d), dim, length)
        for t, d, dim, length in dims:
            if t >= len(rule.operands) and (t, d) not in rule.windows:
                self._leave(rule, dim, length)

    def _enter(self, rule: OpRule, at: tuple[int, int], dim: Dim, length: int) -> None:
        """Sizes of an operand's dim, as sizes of its first factor."""
        head = rule.head(dim)
        if head is None:
            return
        window, size = rule.windows.get(at), rule.sizes[head]
        for axes, sizes in self._known(length):
            if window is not None:
                self._know((size, axes), _followed(window, sizes, length, size))
            elif length == size:
                continue  # known as it is
            elif all(part % (length // size) == 0 for part in sizes):
                self._know((size, axes), [part // (length // size) for part in sizes])

    def _leave(self, rule: OpRule, dim: Dim, length: int) -> None:
        """Sizes of a factor, as sizes of a result's dim that it is the first of."""
        head = rule.head(dim)
        if head is None or rule.sizes[head] == length:
            return
        inner = length // rule.sizes[head]
        for axes, sizes in self._known(rule.sizes[head]):
            self._know((length, axes), [part * inner for part in sizes])

    def _known(self, length: int) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        return [(axes, sizes) for (n, axes), found in self.sizes.items() if n == length for sizes in found]

    def _know(self, place: Place, sizes: Iterable[int]) -> None:
        """Chunk's own sizes are kept as well: what ops make of them may be others."""
        found = self.sizes.setdefault(place, {})
        if len(found) < 3:  # every one multiplies the strategies of all ops of that length
            found.setdefault(tuple(sizes))


def _followed(window: Window, sizes: Sequence[int], length: int, results: int) -> list[int]:
    """Sizes of the results whose windows lie, by their middles, in the parts of `sizes` of what they read.

    Of a convolution with stride s, the results from ceil(a / s) on lie in a part that begins at a: with any other cut
    more rows would move.
    """
    ends = [_results_before(window, hi, length, results) for _, hi in spans_of(sizes)]
    cut, last = [], 0
    for end in ends:
        cut.append(max(0, end - last))
        last = max(last, end)
    return cut


def _results_before(window: Window, boundary: int, length: int, results: int) -> int:
    if boundary <= 0 or boundary >= length:
        return 0 if boundary <= 0 else results
    low, high = 0, results
    while low < high:
        middle = (low + high + 1) // 2
        ends, begins = _reads_around(window, middle, length, results)
        low, high = (
            (middle, high) if middle < results and ends + begins <= 2 * boundary else (low, middle - 1)
        )

    def foreign(cut: int) -> int:
        ends, begins = _reads_around(window, cut, length, results)
        return max(0, ends - boundary) + max(0, boundary - begins)

    return min((low, low + 1), key=foreign) if low + 1 < results else low


def _reads_around(window: Window, cut: int, length: int, results: int) -> tuple[int, int]:
    """Where what the results before `cut` read ends, and where what the others read begins."""
    lo, hi = window.reads(cut, results)
    # What reads nothing, as padding does, lies behind the end.
    return window.reads(0, cut)[1], lo if lo < hi else length


Asked = dict[tuple[str, ...], dict[Spans, int]]
"""Axes -> spans that readers have a use for -> how many windows away the reader is."""


def find_chains(
    ops: Sequence[tuple[fx.Node, OpRule]], mesh: MeshSpec, cuts: Cuts, joined: JoinedAxes = ()
) -> Mapping[str, Wider]:
    """Node name -> overlapping spans worth computing. ops: in the graph's order, with their rules (`ops_of`)."""
    finder = _ChainFinder(mesh, cuts, joined)
    for node, rule in reversed(ops):
        for way in rule.ways:
            finder.follow(node, way)
    return finder.wider


@dataclass
class _ChainFinder:
    """Walks from readers to what they read. ends: uses that have a halo for their readers, but ask for none."""

    mesh: MeshSpec
    cuts: Cuts
    joined: JoinedAxes
    asked: dict[tuple[fx.Node, int, int], Asked] = field(default_factory=dict)
    wider: dict[str, Wider] = field(default_factory=dict)
    ends: set[fx.Node] = field(default_factory=set)
    reads: dict[Hashable, tuple[Spans, Spans, bool]] = field(default_factory=dict)

    def follow(self, node: fx.Node, rule: OpRule) -> None:
        wanted = {factor: self._wanted(node, rule, factor) for factor in rule.splittable}
        found = {
            (factor, axes): tuple(spans)
            for factor, asked in wanted.items()
            for axes, spans in asked.items()
            if spans
        }
        if found:
            self.wider[node.name] = {**self.wider.get(node.name, {}), **found}
        if node in self.ends:
            return
        for t, operand in enumerate(tensor_operands(node)):
            producer, index = result_index(operand)
            if not rule.chains:
                if not is_use(producer):
                    continue
                self.ends.add(producer)  # a halo that several read is brought once
            for d, dim in enumerate(rule.operands[t]):
                if len(dim) == 1 and dim[0] in wanted:
                    place = self.asked.setdefault((producer, index, d), {})
                    self._ask(place, rule, (t, d), dim[0], wanted[dim[0]], node_value(operand).shape[d])

    def _wanted(self, node: fx.Node, rule: OpRule, factor: str) -> Asked:
        """Spans of a factor that readers of the results have a use for, if ranks may compute the same of it."""
        together: Asked = {}
        computed = [index for index, value in enumerate(node_values(node)) if value is not None]
        if not rule.may_overlap(factor, computed):
            return together
        for index in computed:
            for d, dim in enumerate(rule.results[index]):
                if dim == (factor,):
                    for axes, spans in self.asked.get((node, index, d), {}).items():
                        _merge(together.setdefault(axes, {}), spans)
        return together

    def _ask(
        self, place: Asked, rule: OpRule, at: tuple[int, int], factor: str, wanted: Asked, length: int
    ) -> None:
        """What the op has a use for of the operand's dim `at`, of that length, split by that factor."""
        window = rule.windows.get(at)
        if window is None:
            for axes, spans in wanted.items():
                _merge(place.setdefault(axes, {}), spans)
            return
        for axes in _runs(in_units(self.mesh.real_axes(), self.joined)):
            counts = tuple(self.mesh.size(axis) for axis in axes)
            options = self.cuts.options(rule.sizes[factor], axes, self.mesh)
            parts = [(option or nested_spans(rule.sizes[factor], counts), 1) for option in options]
            # Exchanges that one may replace, beside its own: each makes one more strategy of every
            # split of an op in a chain.
            parts += [(spans, away + 1) for spans, away in wanted.get(axes, {}).items() if away < 2]
            found: dict[Spans, int] = {}
            for each, away in parts:
                spans, overlap = self._read(window, each, length)
                if overlap:
                    found.setdefault(spans, away)
            _merge(place.setdefault(axes, {}), found)

    def _read(self, window: Window, parts: Spans, length: int) -> tuple[Spans, bool]:
        """What the parts read of an operand's dim, and whether that overlaps."""
        key = window, id(parts), length
        if key not in self.reads:
            spans = tuple(window.reads(lo, hi) for lo, hi in parts)
            self.reads[key] = (
                parts,
                spans,
                _overlap(spans, length),
            )  # with the parts: their id stays their own
        return self.reads[key][1:]


def _merge(into: dict[Spans, int], spans: Mapping[Spans, int]) -> None:
    for found, away in spans.items():
        into[found] = min(away, into.get(found, away))


def _overlap(spans: Spans, length: int) -> bool:
    """Whether some rank computes what another does, and none reaches around an end: what is periodic cannot be
    computed beyond it, as all other windows pad there."""
    some = sorted(span for span in spans if span[0] < span[1])
    inside = all(lo >= 0 and hi <= length for lo, hi in some)
    return inside and any(two[0] < one[1] for one, two in itertools.pairwise(some))


def _runs(units: Sequence[Unit]) -> list[tuple[str, ...]]:
    counts = range(1, len(units) + 1)
    return [chained(run) for count in counts for run in itertools.combinations(units, count)]
