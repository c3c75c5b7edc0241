"""From an op's rule to the strategies it allows on a mesh: one choice of factor for every axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_model.mesh import MeshSpec
from passes.layout.assignment import FactorSplit, NodeLayouts
from passes.layout.layout import Halo, Layout
from passes.rules.core.rule import Dim, OpRule
from passes.strategies.cuts import NO_CUTS, Cuts, Wider

__all__ = ["enumerate_strategies"]

Shape = Sequence[int]

Made = dict[Hashable, Layout]
"""Layouts of one op's tensors made so far."""


@dataclass(frozen=True)
class _Choice:
    """What one mesh axis does at one op: split a factor, carry a linear set's partial sums, or nothing."""

    axis: str
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
) -> tuple[NodeLayouts, ...]:
    """Every strategy the rule allows: the product over the mesh's axes of size > 1.

    Several axes may split one factor: in mesh order, and with `any_order` in every order (a
    parameter split over "tp" and each part over "dp" is f32[4096@tp@dp, 512]). A factor is split in torch.chunk's
    sizes, in those of `cuts`, or into the overlapping spans of `wider`.
    Deterministic; the first strategy is the replicated one.
    """
    found: dict[NodeLayouts, None] = {}
    for way in rule.ways:
        legal = _contiguous_factors(way)
        made: Made = {}
        per_axis = [_axis_choices(axis, legal, way) for axis in mesh.real_axes()]
        for choices in itertools.product(*per_axis):
            for splits in _splits(choices, way, mesh, cuts, wider or {}, any_order):
                found.setdefault(_layouts(way, operand_shapes, result_shapes, mesh, choices, splits, made))
    return tuple(found)


def _contiguous_factors(rule: OpRule) -> tuple[str, ...]:
    """Factors whose shards are contiguous in every dim they appear in: first of size > 1 there."""
    hidden: set[str] = set()
    for tensor in (*rule.operands, *rule.results):
        for dim in tensor:
            large = [f for f in dim if rule.sizes[f] > 1]
            hidden.update(large[1:])
    return tuple(f for f in rule.splittable if f not in hidden)


def _axis_choices(axis: str, factors: Sequence[str], rule: OpRule) -> list[_Choice]:
    splits = [_Choice(axis, factor=f) for f in factors]
    partials = [_Choice(axis, linear=i) for i in range(len(rule.linear))]
    return [_Choice(axis), *splits, *partials]


def _splits(
    choices: Sequence[_Choice], rule: OpRule, mesh: MeshSpec, cuts: Cuts, wider: Wider, any_order: bool
) -> Iterator[tuple[FactorSplit, ...]]:
    axes_of: dict[str, list[str]] = {}
    for choice in choices:
        if choice.factor is not None:
            axes_of.setdefault(choice.factor, []).append(choice.axis)
    options = [
        [
            FactorSplit(factor, order, spans)
            for order in (itertools.permutations(axes) if any_order else [tuple(axes)])
            for spans in (
                *cuts.options(rule.sizes[factor], order, mesh),
                *wider.get((factor, order), ()),
            )
        ]
        for factor, axes in axes_of.items()
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
    carried = [(c.axis, rule.linear[c.linear]) for c in choices if c.linear is not None]
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
