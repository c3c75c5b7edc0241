from __future__ import annotations

from math import exp

import pytest
import torch
import torch.nn.functional as F

from cost_model.errors import CaptureError
from passes.canonicalize.random_to_uniform import RandomToUniform
from passes.ir.graph_pass import copy_joint
from passes.ir.joint import JointGraph
from tests.canonicalize.graphs import Function, assert_valid, ops, prepared, run

N = 20_000


def drawn(function: Function, x: torch.Tensor, grads: bool = False) -> JointGraph:
    joint = copy_joint(RandomToUniform()(prepared(function, x, grads=grads)))
    assert joint.inputs[-1].kind == "seed"
    assert joint.placeholders[-1].meta["val"].dtype == torch.int64
    assert_valid(joint)
    return joint


def value(joint: JointGraph, *inputs: torch.Tensor, seed: int = 0) -> torch.Tensor:
    result = run(joint, inputs, seed)[0]
    assert result is not None
    return result


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_right_share_and_the_mean(p: float) -> None:
    x = torch.ones(N)
    y = value(drawn(lambda x: F.dropout(x, p), x), x)
    assert abs((y != 0).double().mean() - (1 - p)) < 0.02
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_native_dropout_and_its_backward_use_one_mask() -> None:
    x = torch.ones(N)
    joint = drawn(lambda x: torch.native_dropout(x, 0.25, True)[0], x, grads=True)
    y, grad = run(joint, [x, torch.ones(N)])
    assert y is not None and grad is not None
    assert abs((y != 0).double().mean() - 0.75) < 0.02
    torch.testing.assert_close(grad, y, msg="the gradient is scaled by the same mask")
    assert ops(joint)["uniform"] == 1


def test_dropout_of_everything_and_of_nothing() -> None:
    x = torch.ones(8)
    assert value(drawn(lambda x: torch.native_dropout(x, 1.0, True)[0], x), x).eq(0).all()
    joint = RandomToUniform()(prepared(lambda x: torch.native_dropout(x, 0.5, False)[0] * 2, x))
    assert value(joint, x).eq(2).all()


@pytest.mark.parametrize(
    ("function", "mean", "deviation"),
    [
        (torch.rand_like, 0.5, 1 / 12**0.5),
        (lambda x: torch.rand(N), 0.5, 1 / 12**0.5),
        (torch.randn_like, 0.0, 1.0),
        (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.21**0.5),
        (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21**0.5),
        (lambda x: torch.empty_like(x).uniform_(2, 4), 3.0, 2 / 12**0.5),
        (lambda x: torch.empty_like(x).normal_(1, 3), 1.0, 3.0),
        (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
        (lambda x: torch.randint(2, 12, (N,)), 6.5, (99 / 12) ** 0.5),
        (lambda x: torch.normal(1.0, 3.0, (N,)), 1.0, 3.0),
        (lambda x: torch.normal(x, 3.0), 1.0, 3.0),
        (lambda x: torch.normal(2.0, x), 2.0, 1.0),
        (lambda x: torch.normal(x[:, None], 3 * x[None, :1]), 1.0, 3.0),
        (
            lambda x: torch.empty_like(x).log_normal_(0.0, 0.25),
            exp(1 / 32),
            (exp(1 / 8) - exp(1 / 16)) ** 0.5,
        ),
        (lambda x: torch.empty_like(x).geometric_(0.4), 2.5, 0.6**0.5 / 0.4),
        (lambda x: torch.empty_like(x).cauchy_(3.0, 0.5).gt(3.5).float(), 0.25, 3**0.5 / 4),
        (lambda x: torch.empty_like(x).random_(2, 12), 6.5, (99 / 12) ** 0.5),
        (lambda x: torch.empty_like(x).random_(10), 4.5, (99 / 12) ** 0.5),
        (lambda x: torch.empty_like(x).random_() * 2.0**-24, 0.5, 1 / 12**0.5),
    ],
)
def test_a_draw_has_the_right_moments(function: Function, mean: float, deviation: float) -> None:
    x = torch.ones(N)
    y = value(drawn(function, x), x).double()
    assert abs(y.mean() - mean) < 5 * deviation / N**0.5 + 1e-3
    assert abs(y.std() - deviation) < 0.03 * deviation


def test_a_draw_keeps_the_dtype() -> None:
    x = torch.ones(64, dtype=torch.bfloat16)
    assert value(drawn(torch.randn_like, x), x).dtype == torch.bfloat16
    assert value(drawn(lambda x: torch.randint(0, 9, (4,)), x), x).dtype == torch.int64


def test_draws_differ_and_a_seed_repeats_them() -> None:
    x = torch.ones(64)
    joint = drawn(lambda x: torch.stack([torch.rand_like(x), torch.rand_like(x)]), x)
    first = value(joint, x, seed=3)
    assert not torch.equal(first[0], first[1]), "two ops draw from two streams"
    assert torch.equal(first, value(joint, x, seed=3))
    assert not torch.equal(first, value(joint, x, seed=4))


def test_a_graph_without_draws_gets_no_seed() -> None:
    x = torch.ones(4)
    assert [i.kind for i in RandomToUniform()(prepared(lambda x: x * 2, x)).inputs] == ["input"]


def test_a_random_permutation_holds_every_number_once_and_differs_by_seed() -> None:
    joint = drawn(lambda x: torch.randperm(40) + 0 * x.long(), torch.ones(40))
    first, again, other = (value(joint, torch.ones(40), seed=seed) for seed in (1, 1, 2))
    assert sorted(first.tolist()) == list(range(40)) and first.dtype == torch.int64
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("replacement", [True, False])
def test_a_multinomial_draw_follows_its_weights(replacement: bool) -> None:
    """Rows of two draws from weights 1, 2, 3 and 0; without replacement the second is of those that are left."""
    weights = torch.tensor([1.0, 2.0, 3.0, 0.0]).expand(N, 4)
    draws = value(drawn(lambda x: torch.multinomial(x, 2, replacement), weights), weights)
    assert draws.shape == (N, 2) and draws.dtype == torch.int64
    first, second = (torch.bincount(draws[:, i], minlength=4).double() / N for i in (0, 1))
    shares = torch.tensor([1, 2, 3, 0]).double() / 6
    torch.testing.assert_close(first, shares, atol=0.015, rtol=0)
    left = shares if replacement else torch.tensor([1 / 4, 2 / 5, 7 / 20, 0]).double()
    torch.testing.assert_close(second, left, atol=0.015, rtol=0)
    assert replacement or draws[:, 0].ne(draws[:, 1]).all()


@pytest.mark.parametrize("training", [True, False])
def test_rrelu_and_its_backward_use_one_slope(training: bool) -> None:
    x = torch.linspace(-1, 1, N)
    joint = drawn(lambda x: F.rrelu(x, training=training) + 0 * torch.rand_like(x), x, grads=True)
    y, grad = run(joint, [x, torch.ones(N)])
    assert y is not None and grad is not None
    torch.testing.assert_close(grad[x > 0], torch.ones(N // 2))
    torch.testing.assert_close(grad[x < 0], y[x < 0] / x[x < 0])
    slopes = grad[x < 0].double()
    assert abs(slopes.mean() - 11 / 48) < 5e-3
    assert abs(slopes.std() - (5 / 24 / 12**0.5 if training else 0)) < 3e-3
    if not training:
        torch.testing.assert_close(y, F.rrelu(x, training=False))


def test_what_would_draw_from_a_generator_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"draws from a generator(.|\n)*try: draw them outside the model"):
        RandomToUniform()(prepared(torch.poisson, torch.ones(8)))
