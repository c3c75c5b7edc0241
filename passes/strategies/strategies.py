"""From an op's rule to the strategies it allows on a mesh: one choice of factor for every axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_model.mesh import MeshSpec
from passes.layout.assignment import FactorSplit, NodeLayouts
from passes.layout.joined_axes import JoinedAxes, Unit, chained, in_units
from passes.layout.layout import Halo, Layout
from passes.rules.core.rule import Dim, OpRule
from passes.strategies.cuts import NO_CUTS, Cuts, Wider

__all__ = ["contiguous_factors", "enumerate_strategies"]

Shape = Sequence[int]

Made = dict[Hashable, Layout]
"""Layouts of one op's tensors made so far."""


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
        made: Made = {}
        per_unit = [_unit_choices(unit, legal, way) for unit in in_units(mesh.real_axes(), joined)]
        for choices in itertools.product(*per_unit):
            for splits in _splits(choices, way, mesh, cuts, wider or {}, any_order):
                found.setdefault(_layouts(way, operand_shapes, result_shapes, mesh, choices, splits, made))
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


def _layouts(
    rule: OpRule,
    operand_shapes: Sequence[Shape],
    result_shapes: Sequence[Shape],
    mesh: MeshSpec,
    choices: Sequence[_Choice],
    splits: tuple[FactorSplit, ...],
    made: Made,
) -> NodeLayouts:
    by_factor = {split.factor: split for split in splits}
    carried = [(axis, rule.linear[c.linear]) for c in choices if c.linear is not None for axis in c.axes]
    operands = tuple(
        _layout(
            rule,
            i,
            dims,
            shape,
            mesh,
            by_factor,
            [(a, "sum") for a, members in carried if i in members],
            made,
        )
        for i, (dims, shape) in enumerate(zip(rule.operands, operand_shapes, strict=True))
    )
    results = tuple(
        _layout(
            rule,
            len(rule.operands) + i,
            dims,
            shape,
            mesh,
            by_factor,
            [(a, "sum") for a, _ in carried] + _pending(rule, dims, splits),
            made,
        )
        for i, (dims, shape) in enumerate(zip(rule.results, result_shapes, strict=True))
    )
    return NodeLayouts(operands, results, splits)


def _pending(rule: OpRule, dims: Sequence[Dim], splits: Sequence[FactorSplit]) -> list[tuple[str, str]]:
    """Partial entries of a result: the axes whose split factor this result has summed away."""
    kept = {factor for dim in dims for factor in dim}
    return [
        (axis, rule.reductions[split.factor])
        for split in splits
        if split.factor not in kept and split.factor in rule.reductions
        for axis in split.axes
    ]


def _layout(
    rule: OpRule,
    tensor: int,
    dims: Sequence[Dim],
    shape: Shape,
    mesh: MeshSpec,
    by_factor: Mapping[str, FactorSplit],
    partial: Sequence[tuple[str, str]],
    made: Made,
) -> Layout:
    """The layout of one tensor, counted through operands and results. Many strategies of an op agree on one tensor:
    they
    share its layout."""
    heads = [next((f for f in dim if rule.sizes[f] > 1), None) for dim in dims]
    found = tuple(None if head is None else by_factor.get(head) for head in heads)
    windowed = tensor if any(place[0] == tensor for place in rule.windows) else None
    key = (tuple(dims), tuple(shape), found, tuple(partial), windowed)
    if key not in made:
        made[key] = _new_layout(rule, tensor, dims, shape, mesh, found, partial)
    return made[key]


def _new_layout(
    rule: OpRule,
    tensor: int,
    dims: Sequence[Dim],
    shape: Shape,
    mesh: MeshSpec,
    found: Sequence[FactorSplit | None],
    partial: Sequence[tuple[str, str]],
) -> Layout:
    """found: per dim, the split of its first factor, if it is split."""
    axes: list[tuple[str, ...]] = []
    halos: list[Halo | None] = []
    for d, (dim, split) in enumerate(zip(dims, found, strict=True)):
        halos.append(None)
        if split is None:
            axes.append(())
            continue
        axes.append(split.axes)
        inner = math.prod(rule.sizes[f] for f in dim) // rule.sizes[split.factor]
        window = rule.windows.get((tensor, d))
        if window is None and inner == 1 and split.spans is None:
            continue
        parts = split.parts(rule.sizes[split.factor], mesh)
        if window is None:
            spans = tuple((lo * inner, hi * inner) for lo, hi in parts)
        else:
            spans = tuple(window.reads(lo, hi) for lo, hi in parts)
        halos[d] = Halo(spans, summed=window is not None and tensor >= len(rule.operands))
    return Layout.of(shape, mesh, axes, partial, None, halos)
