"""Layer norms that were taken apart, in torch's own kernels again."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.compile.join_linears import OpWriter, called, drop_unread, others, shape_of, sole_user, summed
from passes.ir.graph_pass import RankPass
from passes.ir.rank_properties import COLLECTIVES

aten = torch.ops.aten
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class JoinNorms(RankPass):
    """Sums and pointwise ops that are a layer norm of whole rows become `native_layer_norm`; its gradients likewise.

        %m: f32[8, 1]  = div(sum(%x, [1], True), 16)      %n: (...)    = native_layer_norm(%x, [16], %w, %b, 1e-05)
        %c: f32[8, 16] = sub(%x, %m)                      %y: f32[8, 16] = getitem(%n, 0)
        %v: f32[8, 1]  = div(sum(mul(%c, %c), [1], True), 16)
        %r: f32[8, 1]  = rsqrt(add(%v, 1e-05))        ->
        %h: f32[8, 16] = mul(%c, %r)
        %y: f32[8, 16] = add(mul(%h, %w), %b)

    For a rank's joint graph: what the backward reads is saved then. Where a rank holds a part of each row, a collective
    stands between sum and division, and all stays as it is. Half precision is cast before and after: torch's own kernel
    for it would round mean and deviation on CPUs. Groups of a group norm are rows as well.
    """

    keeps = (COLLECTIVES,)

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = module.graph
        places = {node: i for i, node in enumerate(graph.nodes)}
        emit = OpWriter(graph)
        for node in list(graph.nodes):
            norm = _norm_of(node, places)
            if norm is not None:
                _join(norm, graph, emit)
        drop_unread(graph)
        return module


@dataclass(frozen=True)
class _Gradients:
    """of_x: where the gradient of x is made, from `tangent`. The others: where they are, if they are."""

    tangent: fx.Node
    weight: fx.Node | None
    of_x: fx.Node
    of_weight: fx.Node | None
    of_bias: fx.Node | None


@dataclass(frozen=True)
class _Norm:
    """rows: shape of what is normalised together. center: x less its mean. hat: x normalised, before weight and
    bias."""

    x: fx.Node
    rows: list[int]
    eps: float
    center: fx.Node
    deviation: fx.Node
    hat: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    result: fx.Node
    gradients: _Gradients | None

    @property
    def moments(self) -> tuple[fx.Node, fx.Node]:
        """The mean, and what it is divided by: the kernel makes them as well."""
        return called(self.center, aten.sub.Tensor)[1], self.deviation

    def others(self, moment: fx.Node) -> set[fx.Node]:
        """Who reads it but for the norm: its gradient, and copies of what is computed again."""
        return set(moment.users) - {self.center, self.hat}


def _norm_of(deviation: fx.Node, places: dict[fx.Node, int]) -> _Norm | None:
    """The norm that divides by 1 / `deviation`; None if there is none, or another reads what it has on the way."""
    x, center, eps, dims = _moments_of(deviation)
    shape = shape_of(x)
    if x is None or shape is None or x.meta["val"].dtype not in _DTYPES or 0 in shape:
        return None
    rows = shape[len(shape) - len(dims) :]
    if dims != list(range(len(shape) - len(dims), len(shape))) or len(dims) == len(shape):
        return None
    hat = next((user for user, other in others(center, aten.mul.Tensor) if other is deviation), None)
    if hat is None or len(center.users) != 2:
        return None
    weight, bias, result, inner = _affine(hat, rows)
    gradients, read = _gradients_of(hat, deviation, rows, places)
    if set(hat.users) - inner - read:
        return None
    norm = _Norm(x, rows, eps, center, deviation, hat, weight, bias, result, gradients)
    late = [*read, *(user for moment in norm.moments for user in norm.others(moment))]
    return None if any(places.get(user, -1) < places.get(result, -1) for user in late) else norm


def _moments_of(deviation: fx.Node) -> tuple[Any, Any, Any, list[int]]:
    """(x, x less its mean, eps, dims) of rsqrt(mean((x - mean(x))**2) + eps)."""
    nothing = None, None, None, []
    (inside,) = called(deviation, aten.rsqrt.default, 1)
    variance, eps = called(inside, aten.add.Tensor)
    square, dims = _mean(variance)
    center, again = called(square, aten.mul.Tensor)
    x, mean = called(center, aten.sub.Tensor)
    of, of_dims = _mean(mean)
    found = x is not None and center is again and of is x and of_dims == dims and isinstance(eps, float)
    return (x, center, eps, dims) if found else nothing


def _mean(node: object) -> tuple[Any, list[int]]:
    """(operand, dims) of a sum that is divided by how many are summed, where nothing else reads it."""
    total, count = called(node, aten.div.Tensor)
    operand, dims = summed(total)
    if operand is None or isinstance(count, fx.Node) or sole_user(total, aten.div.Tensor) is None:
        return None, []
    shape = shape_of(operand) or []
    return (operand, dims) if math.prod(shape[dim] for dim in dims) == count else (None, [])


def _is_row(node: object, rows: list[int], like: fx.Node) -> bool:
    return shape_of(node) == rows and node.meta["val"].dtype == like.meta["val"].dtype  # type: ignore[attr-defined]


def _affine(hat: fx.Node, rows: list[int]) -> tuple[Any, Any, fx.Node, set[fx.Node]]:
    """(weight, bias, the result, who of the readers of `hat` leads to it)."""
    scaled = [(user, other) for user, other in others(hat, aten.mul.Tensor) if _is_row(other, rows, hat)]
    if len(scaled) != 1:
        return None, None, hat, set(hat.users) if not scaled else set()
    product, weight = scaled[0]
    shifted = sole_user(product, aten.add.Tensor)
    bias = next((other for _, other in others(product, aten.add.Tensor)), None)
    if shifted is not None and _is_row(bias, rows, hat):
        return weight, bias, shifted, {product}
    return weight, None, product, {product}


def _gradients_of(
    hat: fx.Node, deviation: fx.Node, rows: list[int], places: dict[fx.Node, int]
) -> tuple[_Gradients | None, set[fx.Node]]:
    """What torch's backward kernel makes of a tangent, and who of the readers of `hat` that takes.

    With g = tangent * weight, of n numbers a row: of x, (deviation / n) * (g * n - sum(g) - hat * sum(g * hat)).
    """
    for product, scaled in others(hat, aten.mul.Tensor):
        found = _gradient_of_x(product, scaled, hat, deviation, rows)
        if found is None:
            continue
        of_x, reader = found
        tangent, weight = _tangent_of(scaled, rows)
        lead = list(range(len(shape_of(hat) or []) - len(rows)))
        before = lambda node: node is not None and places.get(node, -1) > places.get(of_x, -1)  # noqa: B023
        weighed = [
            user for user, other in others(hat, aten.mul.Tensor) if other is tangent and user is not product
        ]
        sums = [(user, _sum_of(user, lead)) for user in weighed]
        of_weight, read = next(((total, {user}) for user, total in sums if before(total)), (None, set()))
        of_bias = _sum_of(tangent, lead)
        gradients = _Gradients(tangent, weight, of_x, of_weight, of_bias if before(of_bias) else None)
        return gradients, {product, reader, *read}
    return None, set()


def _gradient_of_x(
    product: fx.Node, scaled: fx.Node, hat: fx.Node, deviation: fx.Node, rows: list[int]
) -> tuple[fx.Node, fx.Node] | None:
    """(the gradient of x, mul(hat, sum(product))) where `product` is scaled * hat."""
    last = list(range(len(shape_of(hat) or []) - len(rows), len(shape_of(hat) or [])))
    total = sole_user(product, aten.sum.dim_IntList)
    if total is None or summed(total) != (product, last):
        return None
    reader = next((user for user, other in others(hat, aten.mul.Tensor) if other is total), None)
    difference = None if reader is None else sole_user(reader, aten.sub.Tensor)
    partly, subtracted = called(difference, aten.sub.Tensor)
    scaled_up, plain_total = called(partly, aten.sub.Tensor)
    count = math.prod(rows)
    right = called(scaled_up, aten.mul.Tensor) == (scaled, count) and summed(plain_total) == (scaled, last)
    if difference is None or subtracted is not reader or not right:
        return None
    for user, other in others(difference, aten.mul.Tensor):
        if called(other, aten.div.Tensor) == (deviation, count) and len(difference.users) == 1:
            return user, reader  # type: ignore[return-value]
    return None


def _tangent_of(scaled: fx.Node, rows: list[int]) -> tuple[fx.Node, fx.Node | None]:
    first, second = called(scaled, aten.mul.Tensor)
    for tangent, weight in ((first, second), (second, first)):
        if (
            isinstance(tangent, fx.Node)
            and _is_row(weight, rows, scaled)
            and shape_of(tangent) == shape_of(scaled)
        ):
            return tangent, weight
    return scaled, None


def _sum_of(node: fx.Node, dims: list[int]) -> fx.Node | None:
    return next((user for user in node.users if summed(user, kept=False) == (node, dims)), None)


def _join(norm: _Norm, graph: fx.Graph, emit: OpWriter) -> None:
    later = [norm.others(moment) for moment in norm.moments]
    with graph.inserting_before(norm.result):
        kernel = aten.native_layer_norm.default
        made = emit(norm.x, kernel, norm.x, norm.rows, norm.weight, norm.bias, norm.eps)
        result, mean, deviation = (emit(norm.x, operator.getitem, made, i) for i in range(3))
    gradients = norm.gradients
    if gradients is not None:
        ends = [gradients.of_x, gradients.of_weight, gradients.of_bias]
        weight, like = gradients.weight, gradients.of_x
        wanted = [
            True,
            weight is not None and ends[1] is not None,
            weight is not None and ends[2] is not None,
        ]
        with graph.inserting_before(like):
            # Of the bias the kernel reads the shape alone, which is the weight's.
            kernel = aten.native_layer_norm_backward.default
            operands = gradients.tangent, norm.x, norm.rows, mean, deviation, weight, weight
            made = emit(like, kernel, *operands, wanted)
            found = [emit(like, operator.getitem, made, i) for i in range(3) if wanted[i]]
        for before, after in zip(
            [node for node, want in zip(ends, wanted, strict=True) if want], found, strict=True
        ):
            before.replace_all_uses_with(after)  # type: ignore[union-attr]
    norm.result.replace_all_uses_with(result)
    for old, new, readers in zip(norm.moments, (mean, deviation), later, strict=True):
        old.replace_all_uses_with(new, readers.__contains__)
