"""Ops that cut, join, pad or create; one row of a dim."""

from __future__ import annotations

import pytest
import torch

from tests.rules.registered import Draw, aten, check

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_slice(seed: int) -> None:
    draw = Draw(seed)
    x = draw.floats(draw.size(), 5, draw.size())
    assert "d1" in check(aten.slice.Tensor, x, 1, 0, 9223372036854775807).splittable
    assert "d1" in check(aten.slice.Tensor, x, -2).splittable
    for start, end, step in ((1, 4, 1), (0, -1, 1), (0, 5, 2), (-3, 9, 2)):
        assert "d1" in check(aten.slice.Tensor, x, 1, start, end, step).moved
    assert check(aten.slice.Tensor, x, 1).moved == frozenset()
    check(aten.slice_backward.default, x[:, 1:4:2], list(x.shape), 1, 1, 4, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_select(seed: int) -> None:
    draw = Draw(seed)
    x = draw.floats(draw.size(), 5, draw.size())
    for index in (0, 3, -1):
        check(aten.select.int, x, 1, index)
    check(aten.select.int, draw.floats(4), 0, 1)
    check(aten.select.int, draw.ints(9, 4, 2), 0, 1)
    assert check(aten.select.int, draw.bools(4, 2), 0, 1).splittable == ("d1",)


@pytest.mark.parametrize("seed", SEEDS)
def test_join_and_cut(seed: int) -> None:
    draw = Draw(seed)
    a, b, d = draw.size(), draw.size(), draw.pick(2, 3)
    x, y = draw.floats(a, d, b), draw.floats(a, 4, b)
    check(aten.cat.default, [x, y], 1)
    check(aten.cat.default, [x, y, x], -2)
    check(aten.split_with_sizes.default, y, [1, 3], 1)
    check(aten.roll.default, y, [2], [1])
    check(aten.roll.default, y[0], [2])


def test_joining_an_empty_vector() -> None:
    check(aten.cat.default, [torch.empty(0), torch.ones(3, 2)], 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_pad(seed: int) -> None:
    draw = Draw(seed)
    x = draw.floats(draw.size(), 4, 3)
    assert check(aten.constant_pad_nd.default, x, [1, 2], 0).linear
    assert not check(aten.constant_pad_nd.default, x, [1, 2], 3.0).linear
    shifted = check(aten.constant_pad_nd.default, x, [0, 0, -1, 1])
    assert {"d1", "d2"} <= set(shifted.splittable) and shifted.moved == {"d1"}


def test_creation() -> None:
    check(aten.full.default, [4, 3], 2.0, dtype=torch.float64)
    check(aten.full.default, [], 2.0)
    check(aten.full.default, [5], 1, dtype=torch.int64)


def test_ranges() -> None:
    check(aten.arange.start_step, 0, 5, 1)
    check(aten.arange.start_step, 2, 7)
    check(aten.arange.start_step, 7, 0, -2)
    check(aten.arange.start_step, 1, 11, 3)
    check(aten.arange.start_step, 0, 5, 1, dtype=torch.float32)
    check(aten.arange.start_step, 2.0, 7, 1)
    check(aten.arange.start_step, 0, 4.5, 1)
    assert check(aten.arange.start_step, 0, 1, 0.25).splittable == ()
    check(
        torch.ops.prims.iota.default, 5, start=3, step=2, dtype=torch.int64, device="cpu", requires_grad=False
    )
