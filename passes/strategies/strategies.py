"""From an op's rule to the strategies it allows on a mesh: one choice of factor for every axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cost_model.mesh import MeshSpec
from passes.layout.assignment import FactorSplit, NodeLayouts
from passes.layout.joined_axes import JoinedAxes, Unit, chained, in_units
from passes.layout.layout import Halo, Layout
from passes.rules.core.rule import Dim, OpRule
from passes.strategies.cuts import NO_CUTS, Cuts, Wider

__all__ = ["contiguous_factors", "enumerate_strategies"]

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
