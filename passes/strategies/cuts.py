"""Where dims are worth cutting, beside torch.chunk's places: found from what the graph's ends and ops ask for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value, result_index, result_shapes, tensor_operands
from passes.layout.layout import Layout, Span, nested_sizes, spans_of
from passes.layout.windows import Window
from passes.rules.check.first_use import tried_rule
from passes.rules.core.rule import OpRule

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
        shapes = [tuple(node_value(n).shape) for n in tensor_operands(node)] + result_shapes(node)
        tensors = (*rule.operands, *rule.results)
        dims = [
            (t, d, dim, length)
            for t, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True))
            for d, (dim, length) in enumerate(zip(tensor, shape, strict=True))
        ]
        for _, _, dim, length in dims:
            large = [rule.sizes[f] for f in dim if rule.sizes[f] > 1]
            if len(large) > 1:
                self.units.setdefault(length, set()).add(math.prod(large[1:]))
        if not self.sizes:
            return
        for t, d, dim, length in dims:
            if t < len(rule.operands):
                self._enter(rule, (t, d), dim, length)
        for t, d, dim, length in dims:
            if t >= len(rule.operands) and (t, d) not in rule.windows:
                self._leave(rule, dim, length)

    def _enter(self, rule: OpRule, at: tuple[int, int], dim: Sequence[str], length: int) -> None:
        """Sizes of an operand's dim, as sizes of its first factor."""
        head = next((f for f in dim if rule.sizes[f] > 1), None)
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

    def _leave(self, rule: OpRule, dim: Sequence[str], length: int) -> None:
        """Sizes of a factor, as sizes of a result's dim that it is the first of."""
        head = next((f for f in dim if rule.sizes[f] > 1), None)
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
