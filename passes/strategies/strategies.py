"""From an op's rule to the strategies it allows on a mesh: one choice of factor for every axis; and chains of windows.

Chains: the overlapping spans that ranks may compute, so that a later window finds all it reads at home.

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
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import node_value, node_values, result_index, tensor_operands
from passes.layout.assignment import FactorSplit, NodeLayouts
from passes.layout.joined_axes import JoinedAxes, Unit, chained, in_units
from passes.layout.layout import Halo, Layout, Span, nested_sizes, nested_spans, normal_split
from passes.layout.windows import Window
from passes.rules.core.rule import OpRule
from passes.strategies.cuts import NO_CUTS, Cuts, Wider

Shape = Sequence[int]


@dataclass(frozen=True)
class _Choice:
    """What one mesh axis, or several joined ones, do at one op: split a factor, carry a linear set's partial sums, or
    nothing."""

    axes: Unit
    factor: str | None = None
    linear: int | None = None


def enumerate_strategies(
    rule: OpRule,
    operand_shapes: Sequence[Shape],
    result_shapes: Sequence[Shape],
    mesh: MeshSpec,
    *,
    cuts: Cuts = NO_CUTS,
    wider: Wider | None = None,
    any_order: bool = False,
    joined: JoinedAxes = (),
) -> tuple[NodeLayouts, ...]:
    """Every strategy the rule allows: the product over the mesh's axes of size > 1, of those `joined` as of one.

    Several axes may split one factor: in mesh order, and with `any_order` in every order (a
    parameter split over "tp" and each part over "dp" is f32[4096@tp@dp, 512]). A factor is split in torch.chunk's
    sizes, in those of `cuts`, or into the overlapping spans of `wider`.
    Deterministic; the first strategy is the replicated one.
    """
    found: dict[Hashable, NodeLayouts] = {}
    shared: dict[Hashable, Any] = {}
    for way in rule.ways:
        legal = contiguous_factors(way)
        offered = _Offered(way, mesh, cuts, wider or {}, any_order, shared)
        maker = _Maker(way, [*operand_shapes, *result_shapes], mesh, shared)
        per_unit = [_unit_choices(unit, legal, way) for unit in in_units(mesh.real_axes(), joined)]
        for choices in itertools.product(*per_unit):
            for splits in offered.splits(choices):
                layouts = maker.layouts(choices, splits)
                found.setdefault((*map(id, layouts), *map(id, splits)), maker.strategy(layouts, splits))
    return tuple(found.values())


def contiguous_factors(rule: OpRule) -> tuple[str, ...]:
    """Factors whose shards are contiguous in every dim they appear in: first of size > 1 there."""
    hidden: set[str] = set()
    for tensor in (*rule.operands, *rule.results):
        for dim in tensor:
            large = [f for f in dim if rule.sizes[f] > 1]
            hidden.update(large[1:])
    return tuple(f for f in rule.splittable if f not in hidden)


def _unit_choices(axes: Unit, factors: Sequence[str], rule: OpRule) -> list[_Choice]:
    splits = [_Choice(axes, factor=f) for f in factors]
    partials = [_Choice(axes, linear=i) for i in range(len(rule.linear))]
    return [_Choice(axes), *splits, *partials]


@dataclass(frozen=True)
class _Tensor:
    """heads: per dim its first factor of size > 1. summed: factors that it lacks, with their reductions. like: the
    first tensor whose layouts are the same."""

    heads: tuple[str | None, ...]
    summed: tuple[tuple[str, str], ...]
    like: int


@dataclass(frozen=True)
class _Offered:
    """How choices of factors may be carried out. shared: value -> the one object that has it, so that what is equal is
    the same."""

    rule: OpRule
    mesh: MeshSpec
    cuts: Cuts
    wider: Wider
    any_order: bool
    shared: dict[Hashable, Any]
    made: dict[Hashable, list[FactorSplit]] = field(default_factory=dict)

    def splits(self, choices: Sequence[_Choice]) -> Iterator[tuple[FactorSplit, ...]]:
        units_of: dict[str, tuple[Unit, ...]] = {}
        for choice in choices:
            if choice.factor is not None:
                units_of[choice.factor] = (*units_of.get(choice.factor, ()), choice.axes)
        return itertools.product(*itertools.starmap(self._of_factor, units_of.items()))

    def _of_factor(self, factor: str, units: tuple[Unit, ...]) -> list[FactorSplit]:
        if (factor, units) not in self.made:
            orders = map(chained, itertools.permutations(units) if self.any_order else [units])
            ways = (
                FactorSplit(factor, order, spans)
                for order in orders
                for spans in (
                    *self.cuts.options(self.rule.sizes[factor], order, self.mesh),
                    *self.wider.get((factor, order), ()),
                )
            )
            self.made[factor, units] = [self.shared.setdefault(way, way) for way in ways]
        return self.made[factor, units]


@dataclass(frozen=True)
class _Maker:
    """Layouts of one op's tensors, of these shapes, operands first. Many strategies agree on one: they share it."""

    rule: OpRule
    shapes: Sequence[Shape]
    mesh: MeshSpec
    shared: dict[Hashable, Any]
    made: dict[Hashable, Layout] = field(default_factory=dict)
    halves: dict[Hashable, tuple[tuple[int, ...] | None, Halo | None]] = field(default_factory=dict)

    def strategy(self, layouts: Sequence[Layout], splits: tuple[FactorSplit, ...]) -> NodeLayouts:
        count = len(self.rule.operands)
        return NodeLayouts(tuple(layouts[:count]), tuple(layouts[count:]), splits)

    def layouts(self, choices: Sequence[_Choice], splits: tuple[FactorSplit, ...]) -> list[Layout]:
        rule, count = self.rule, len(self.rule.operands)
        by_factor = {split.factor: split for split in splits}
        carried = [(a, rule.linear[c.linear]) for c in choices if c.linear is not None for a in c.axes]
        found: list[Layout] = []
        for t, tensor in enumerate(self.tensors):
            partial = [(a, "sum") for a, members in carried if t >= count or t in members]
            for factor, op in tensor.summed:
                if factor in by_factor:
                    partial += [(axis, op) for axis in by_factor[factor].axes]
            held = [None if head is None else by_factor.get(head) for head in tensor.heads]
            key = (tensor.like, *map(id, held), *partial)
            if key not in self.made:
                self.made[key] = self._layout(t, held, partial)
            found.append(self.made[key])
        return found

    @cached_property
    def tensors(self) -> list[_Tensor]:
        rule, found = self.rule, []
        first: dict[Hashable, int] = {}
        for t, dims in enumerate(rule.operands_and_results):
            heads = tuple(next((f for f in dim if rule.sizes[f] > 1), None) for dim in dims)
            kept = {factor for dim in dims for factor in dim}
            summed = () if t < len(rule.operands) else rule.reductions.items()
            windowed = t if any(place[0] == t for place in rule.windows) else None
            like = first.setdefault((tuple(dims), tuple(self.shapes[t]), windowed), t)
            found.append(_Tensor(heads, tuple((f, op) for f, op in summed if f not in kept), like))
        return found

    def _layout(
        self, t: int, held: Sequence[FactorSplit | None], partial: Sequence[tuple[str, str]]
    ) -> Layout:
        split_dims = [self._split_dim(t, d, split) for d, split in enumerate(held)]
        sizes, halos = zip(*split_dims, strict=True) if split_dims else ((), ())
        axes = tuple(() if split is None else split.axes for split in held)
        layout = Layout(axes, tuple(sorted(partial)), sizes, halos)
        return self.shared.setdefault(layout, layout)

    def _split_dim(
        self, tensor: int, d: int, split: FactorSplit | None
    ) -> tuple[tuple[int, ...] | None, Halo | None]:
        """Explicit sizes and halo of a dim whose first factor is split so."""
        if split is None:
            return None, None
        key = tensor, d, id(split)
        if key not in self.halves:
            sizes, window = self.rule.sizes, self.rule.windows.get((tensor, d))
            counts, length = tuple(map(self.mesh.size, split.axes)), self.shapes[tensor][d]
            inner = (
                math.prod(sizes[f] for f in self.rule.operands_and_results[tensor][d]) // sizes[split.factor]
            )
            explicit, halo = None, None
            if window is not None:
                parts = split.parts(sizes[split.factor], self.mesh)
                spans = tuple(window.reads(lo, hi) for lo, hi in parts)
                halo = Halo(spans, summed=tensor >= len(self.rule.operands))
            elif split.spans is not None:
                wide = (
                    split.spans if inner == 1 else tuple((lo * inner, hi * inner) for lo, hi in split.spans)
                )
                halo = Halo(wide, summed=False)
            elif inner > 1:
                explicit = nested_sizes(length, counts, inner)
            self.halves[key] = normal_split(length, counts, explicit, halo)
        return self.halves[key]


Spans = tuple[Span, ...]
Asked = dict[tuple[str, ...], dict[Spans, int]]
"""Axes -> spans that readers have a use for -> how many windows away the reader is."""

_LONGEST = 2
"""Exchanges that one may replace, beside its own: each makes one more strategy of every split of an op in a chain."""


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
    """Walks from readers to what they read."""

    mesh: MeshSpec
    cuts: Cuts
    joined: JoinedAxes
    asked: dict[tuple[fx.Node, int, int], Asked] = field(default_factory=dict)
    wider: dict[str, Wider] = field(default_factory=dict)
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
        for t, operand in enumerate(tensor_operands(node)):
            producer, index = result_index(operand)
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
            parts += [(spans, away + 1) for spans, away in wanted.get(axes, {}).items() if away < _LONGEST]
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
