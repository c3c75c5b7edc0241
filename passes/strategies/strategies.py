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

from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import node_value, node_values, result_index, tensor_operands
from passes.layout.assignment import FactorSplit, NodeLayouts
from passes.layout.joined_axes import JoinedAxes, Unit, chained, in_units
from passes.layout.layout import Halo, Layout, Span, nested_spans
from passes.rules.core.rule import Dim, OpRule
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
    found: dict[NodeLayouts, None] = {}
    for way in rule.ways:
        legal = contiguous_factors(way)
        maker = _Maker(way, [*operand_shapes, *result_shapes], mesh)
        per_unit = [_unit_choices(unit, legal, way) for unit in in_units(mesh.real_axes(), joined)]
        for choices in itertools.product(*per_unit):
            for splits in _splits(choices, way, mesh, cuts, wider or {}, any_order):
                found.setdefault(maker.layouts(choices, splits))
    return tuple(found)


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


def _splits(
    choices: Sequence[_Choice], rule: OpRule, mesh: MeshSpec, cuts: Cuts, wider: Wider, any_order: bool
) -> Iterator[tuple[FactorSplit, ...]]:
    units_of: dict[str, list[Unit]] = {}
    for choice in choices:
        if choice.factor is not None:
            units_of.setdefault(choice.factor, []).append(choice.axes)
    options = [
        [
            FactorSplit(factor, order, spans)
            for order in map(chained, itertools.permutations(units) if any_order else [units])
            for spans in (
                *cuts.options(rule.sizes[factor], order, mesh),
                *wider.get((factor, order), ()),
            )
        ]
        for factor, units in units_of.items()
    ]
    return (tuple(combination) for combination in itertools.product(*options))


def _pending(rule: OpRule, dims: Sequence[Dim], splits: Sequence[FactorSplit]) -> list[tuple[str, str]]:
    """Partial entries of a result: the axes whose split factor this result has summed away."""
    kept = {factor for dim in dims for factor in dim}
    return [
        (axis, rule.reductions[split.factor])
        for split in splits
        if split.factor not in kept and split.factor in rule.reductions
        for axis in split.axes
    ]


@dataclass(frozen=True)
class _Maker:
    """Layouts of one op's tensors, of these shapes, operands first. Many strategies agree on one: they share it."""

    rule: OpRule
    shapes: Sequence[Shape]
    mesh: MeshSpec
    made: dict[Hashable, Layout] = field(default_factory=dict)

    def layouts(self, choices: Sequence[_Choice], splits: tuple[FactorSplit, ...]) -> NodeLayouts:
        rule, count = self.rule, len(self.rule.operands)
        by_factor = {split.factor: split for split in splits}
        carried = [(a, rule.linear[c.linear]) for c in choices if c.linear is not None for a in c.axes]
        found: list[Layout] = []
        for t, dims in enumerate(rule.operands_and_results):
            partial = [(a, "sum") for a, members in carried if t >= count or t in members]
            if t >= count:
                partial += _pending(rule, dims, splits)
            found.append(self._layout(t, dims, by_factor, partial))
        return NodeLayouts(tuple(found[:count]), tuple(found[count:]), splits)

    def _layout(
        self,
        tensor: int,
        dims: Sequence[Dim],
        by_factor: Mapping[str, FactorSplit],
        partial: Sequence[tuple[str, str]],
    ) -> Layout:
        heads = [next((f for f in dim if self.rule.sizes[f] > 1), None) for dim in dims]
        found = tuple(None if head is None else by_factor.get(head) for head in heads)
        windowed = tensor if any(place[0] == tensor for place in self.rule.windows) else None
        key = (tuple(dims), tuple(self.shapes[tensor]), found, tuple(partial), windowed)
        if key not in self.made:
            axes = [() if split is None else split.axes for split in found]
            halos = [self._halo(tensor, d, dims[d], split) for d, split in enumerate(found)]
            self.made[key] = Layout.of(self.shapes[tensor], self.mesh, axes, partial, None, halos)
        return self.made[key]

    def _halo(self, tensor: int, d: int, dim: Dim, split: FactorSplit | None) -> Halo | None:
        """Of a dim whose first factor is split so, where that is not in torch.chunk's parts of the dim."""
        if split is None:
            return None
        sizes, window = self.rule.sizes, self.rule.windows.get((tensor, d))
        inner = math.prod(sizes[f] for f in dim) // sizes[split.factor]
        if window is None and inner == 1 and split.spans is None:
            return None
        parts = split.parts(sizes[split.factor], self.mesh)
        if window is None:
            return Halo(tuple((lo * inner, hi * inner) for lo, hi in parts), summed=False)
        summed = tensor >= len(self.rule.operands)
        return Halo(tuple(window.reads(lo, hi) for lo, hi in parts), summed=summed)


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
            found: dict[Spans, int] = {}
            counts = tuple(self.mesh.size(axis) for axis in axes)
            for option in self.cuts.options(rule.sizes[factor], axes, self.mesh):
                parts = option or nested_spans(rule.sizes[factor], counts)
                found[tuple(window.reads(lo, hi) for lo, hi in parts)] = 1
            for parts, away in wanted.get(axes, {}).items():
                if away < _LONGEST:
                    found.setdefault(tuple(window.reads(lo, hi) for lo, hi in parts), away + 1)
            _merge(place.setdefault(axes, {}), {s: n for s, n in found.items() if _overlap(s, length)})


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
