"""From an op's rule to the strategies it allows on a mesh: one choice of factor for every axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cost_model.mesh import MeshSpec
from passes.layout.layout import (
    FactorSplit,
    Halo,
    JoinedAxes,
    Layout,
    NodeLayouts,
    Unit,
    chained,
    in_units,
    nested_sizes,
    normal_split,
)
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
    ways: Sequence[OpRule] | None = None,
) -> tuple[NodeLayouts, ...]:
    """Every strategy the rule allows: the product over the mesh's axes of size > 1, of those `joined` as of one.

    Several axes may split one factor: in mesh order, and with `any_order` in every order (a
    parameter split over "tp" and each part over "dp" is f32[4096@tp@dp, 512]). A factor is split in torch.chunk's
    sizes, in those of `cuts`, or into the overlapping spans of `wider`. ways: of the rule;
    None: those that exchange nothing within the op.
    Deterministic; the first strategy is the replicated one.
    """
    found: dict[Hashable, NodeLayouts] = {}
    shared: dict[Hashable, Any] = {}
    for way in [way for way in rule.ways if way.exchange is None] if ways is None else ways:
        offered = _Offered(way, mesh, cuts, wider or {}, any_order, shared)
        maker = _Maker(way, [*operand_shapes, *result_shapes], mesh, shared)
        legal = way.contiguous
        per_unit = [_unit_choices(unit, legal, way) for unit in in_units(mesh.real_axes(), joined)]
        for choices in itertools.product(*per_unit):
            for splits in offered.splits(choices):
                layouts = maker.layouts(choices, splits)
                found.setdefault((*map(id, layouts), *map(id, splits)), maker.strategy(layouts, splits))
    return tuple(found.values())


def offered_ways(rule: OpRule, mesh: MeshSpec, in_parts: bool) -> list[OpRule]:
    """Those that exchange within the op only where a sequence is given in parts, those that refine a factor only where
    an axis does not divide it, and either where what may be split instead is too short: each makes every search
    longer."""
    axes = [mesh.size(axis) for axis in mesh.real_axes()]

    def is_offered(way: OpRule) -> bool:
        if math.prod(way.sizes.get(f, 1) for f in way.unless) < mesh.device_count:
            return True
        fine = way.refines is None or any(way.sizes[way.refines] % size for size in axes)
        return fine and (way.exchange is None or in_parts)

    return list(filter(is_offered, rule.ways))


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

    @cached_property
    def chunked(self) -> frozenset[str]:
        return self.rule.chunked

    def splits(self, choices: Sequence[_Choice]) -> Iterator[tuple[FactorSplit, ...]]:
        units_of: dict[str, tuple[Unit, ...]] = {}
        for choice in choices:
            if choice.factor is not None:
                units_of[choice.factor] = (*units_of.get(choice.factor, ()), choice.axes)
        return itertools.product(*itertools.starmap(self._of_factor, units_of.items()))

    def _of_factor(self, factor: str, units: tuple[Unit, ...]) -> list[FactorSplit]:
        if (factor, units) not in self.made:
            plain = factor in self.chunked
            orders = map(chained, itertools.permutations(units) if self.any_order and not plain else [units])
            ways = (
                FactorSplit(factor, order, spans)
                for order in orders
                for spans in (
                    *self.cuts.options(self.rule.sizes[factor], order, self.mesh)[: 1 if plain else None],
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
            head, op = rule.routed.get(t, ("", ""))
            if head in by_factor:
                partial += [(axis, op) for axis in by_factor[head].axes]
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
            heads = tuple(map(rule.head, dims))
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
