"""Matrix products, convolution, pooling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rules.registered import Draw, aten, check

SEEDS = range(3)
contract = torch.ops.autoshard.contract.default


@pytest.mark.parametrize("seed", SEEDS)
def test_matrix_products(seed: int) -> None:
    draw = Draw(seed)
    b, m, k, n = draw.sizes(4)
    x, y = draw.floats(m, k), draw.floats(k, n)
    assert set(check(contract, x, y, "m k, k n -> m n").linear) == {frozenset({0}), frozenset({1})}
    check(contract, draw.floats(b, m, k), draw.floats(b, k, n), "b m k, b k n -> b m n")
    check(contract, x, y[:, 0], "m k, k -> m")
    check(contract, x[0], y[:, 0], "k, k -> ")


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [("b s k, n k -> b s n", (2, 3, 4), (5, 4)), ("b s n, b s k -> n k", (2, 3, 4), (2, 3, 2)),
     ("b h s d, b h t d -> b h s t", (2, 2, 3, 1), (2, 2, 2, 1)), ("b k, n -> b n", (2, 3), (4,)),
     ("k, k -> ", (5,), (5,))],
)  # fmt: skip
def test_contract(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    draw = Draw(0)
    rule = check(contract, draw.floats(*a), draw.floats(*b), equation)
    assert set(rule.linear) == {frozenset({0}), frozenset({1})}


def convolve(
    draw: Draw, groups: int, inner: int, outer: int, bias: bool, transposed: bool, space: int
) -> list[Any]:
    x = draw.floats(draw.size(2, 3), groups * inner, *([5, 4][:space]))
    channels = (groups * inner, outer) if transposed else (groups * outer, inner)
    weight = draw.floats(*channels, *([3, 2][:space]))
    b = draw.floats(groups * outer) if bias else None
    ones, zeros = [1] * space, [0] * space
    return [x, weight, b, [2] * space, ones, ones, transposed, zeros, groups]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("groups", "inner", "outer"), [(1, 3, 2), (1, 2, 5), (3, 1, 1), (2, 2, 3), (5, 1, 2)]
)
def test_convolution(groups: int, inner: int, outer: int, transposed: bool, bias: bool) -> None:
    draw = Draw(groups + inner)
    args = convolve(draw, groups, inner, outer, bias, transposed, 1 + (inner > 1))
    rule = check(aten.convolution.default, *args)
    assert ("g" in rule.splittable) == (groups > 1)
    y = aten.convolution.default(*args)
    x, weight, b, *rest = args
    sizes = None if b is None else [groups * outer]
    for mask in ([True, True, bias], [False, True, False], [True, False, False]):
        check(aten.convolution_backward.default, torch.randn_like(y), x, weight, sizes, *rest, mask)


def test_convolution_on_one_dim_and_three() -> None:
    draw = Draw(0)
    for space in (1, 3):
        args = [draw.floats(2, 2, *[3] * space), draw.floats(3, 2, *[2] * space), None]
        rest = [[1] * space, [0] * space, [1] * space, False, [0] * space, 1]
        check(aten.convolution.default, *args, *rest)


@pytest.mark.parametrize("seed", range(2))
def test_pooling(seed: int) -> None:
    draw = Draw(seed)
    x = draw.floats(draw.size(), draw.size(), 4, 5)
    window: list[Any] = [[2, 2], [2, 2], [0, 0]]
    out, indices = aten.max_pool2d_with_indices.default(x, *window)
    check(aten.max_pool2d_with_indices.default, x, *window)
    check(aten.max_pool2d_with_indices.default, x[0], *window)
    grad = torch.randn_like(out)
    check(aten.max_pool2d_with_indices_backward.default, grad, x, *window, [1, 1], False, indices)
    check(aten.avg_pool2d.default, x, *window)
    check(aten.avg_pool2d_backward.default, grad, x, *window, False, True, None)
    check(aten._adaptive_avg_pool2d.default, x, [2, 2])
    check(aten._adaptive_avg_pool2d_backward.default, draw.floats(*x.shape[:2], 2, 2), x)
    check(aten.adaptive_max_pool2d.default, x, [2, 2])
    _, where = aten.adaptive_max_pool2d.default(x, [2, 2])
    check(aten.adaptive_max_pool2d_backward.default, draw.floats(*x.shape[:2], 2, 2), x, where)


@pytest.mark.parametrize("kind", ["nearest", "bilinear", "bicubic"])
def test_resizing(kind: str) -> None:
    draw = Draw(0)
    x, corners = draw.floats(2, 3, 3, 4), [] if kind == "nearest" else [False]
    packet, backward = getattr(aten, f"upsample_{kind}2d"), getattr(aten, f"upsample_{kind}2d_backward")
    check(packet.default, x, [6, 5], *corners)
    check(backward.default, draw.floats(2, 3, 6, 5), [6, 5], [2, 3, 3, 4], *corners)


def test_reflection() -> None:
    draw = Draw(0)
    x = draw.floats(2, 3, 3, 4)
    check(aten.reflection_pad2d.default, x, [1, 1, 2, 1])
    check(aten.reflection_pad2d_backward.default, draw.floats(2, 3, 6, 6), x, [1, 1, 2, 1])
