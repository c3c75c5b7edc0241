"""Chains of windows: the overlapping spans that ranks may compute, so that a later window finds all it reads at home.

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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import node_value, node_values, result_index, tensor_operands
from passes.ir.op_traits import is_use
from passes.layout.layout import JoinedAxes, Span, Unit, chained, in_units, nested_spans
from passes.layout.windows import Window
from passes.rules.core.rule import OpRule
from passes.strategies.cuts import Cuts, Wider

Spans = tuple[Span, ...]
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
