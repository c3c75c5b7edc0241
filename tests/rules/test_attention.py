"""autoshard::attention, its backward, and autoshard::uniform."""

from __future__ import annotations

import pytest
import torch

from tests.rules.registered import Draw, aten, check

ops = torch.ops.autoshard
SHAPES = [(2, 3, 4, 5), (1, 4, 5, 2), (3, 1, 2, 4), (2, 2, 1, 3)]


def masks(draw: Draw, b: int, h: int, s: int, t: int) -> list[torch.Tensor | None]:
    bools = draw.bools(b, 1, s, t)
    bools[..., 0] = True  # a query with no key at all has no defined result
    return [None, draw.floats(b, 1, s, t), draw.floats(1, h, 1, t), bools]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(shape: tuple[int, int, int, int], causal: bool) -> None:
    b, h, s, t = shape
    draw = Draw(b + h)
    q, k, v = draw.floats(b, h, s, 4), draw.floats(b, h, t, 4), draw.floats(b, h, t, 4)
    for mask in masks(draw, b, h, s, t) if not causal else [None]:
        args = (q, k, v, mask, causal, 0.5)
        rule = check(ops.attention.default, *args)
        assert set(rule.splittable) <= {"b", "h", "s"}
        assert ("s" in rule.splittable) == (s > 1)
        assert set(rule.work) == ({"s"} if causal else set())
        assert rule.linear == ()
        out, lse = ops.attention.default(*args)
        grad = draw.floats(*out.shape)
        rule = check(ops.attention_backward.default, grad, q, k, v, mask, out, lse, causal, 0.5)
        assert rule.linear == (frozenset({0}),)


def test_queries_stay_whole_beside_causality_and_another_mask() -> None:
    draw = Draw(5)
    q, k = draw.floats(2, 3, 5, 4), draw.floats(2, 3, 5, 4)
    rule = check(ops.attention.default, q, k, k, draw.floats(1, 1, 5, 5), True, 0.5)
    assert set(rule.splittable) == {"b", "h"}


def test_uniform_is_the_same_however_it_is_split() -> None:
    seed = torch.tensor(7)
    whole = ops.uniform.default([4, 5], [0, 0], [4, 5], seed, 3)
    assert check(ops.uniform.default, [4, 5], [0, 0], [4, 5], seed, 3).splittable == ("d0", "d1")
    assert check(ops.uniform.default, [3, 1, 2], [0, 0, 0], [3, 1, 2], seed, 3).splittable == ("d0", "d2")
    assert whole.unique().numel() == 20


def test_dropout_as_it_is_captured() -> None:
    """where(u < keep, x, 0) / keep: linear in x."""
    draw = Draw(0)
    keep = draw.floats(3, 4) > 0
    assert check(aten.where.self, keep, draw.floats(3, 4), torch.zeros((), dtype=torch.float64)).linear
