"""Pointwise rules: splits of every dim under broadcasting, and exactly the linearity that holds."""

from __future__ import annotations

import pytest
import torch

from passes.rules.check.trial import call_node
from passes.rules.core.rule_registry import has_rule, rule_for
from tests.rules.registered import Draw, aten, check

SEEDS = range(3)


def linear(op: object, *args: object, **kwargs: object) -> set[tuple[int, ...]]:
    rule = rule_for(call_node(op, args, kwargs))  # type: ignore[arg-type]
    return {tuple(sorted(members)) for members in rule.linear}


X = torch.ones(2, 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "op", [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.atan2.default]
)
def test_binary_broadcast(op: object, seed: int) -> None:
    draw = Draw(seed)
    shape = draw.sizes(3)
    other = [draw.pick(n, 1) for n in shape][draw.pick(0, 1, 2, 3) :]
    check(op, draw.floats(*shape), draw.floats(*other))  # type: ignore[arg-type]
    check(op, draw.floats(*other), draw.floats(*shape))  # type: ignore[arg-type]


def test_integers() -> None:
    draw = Draw(0)
    check(aten.add.Tensor, draw.ints(9, 3, 2), draw.ints(9, 2), alpha=3)
    check(aten.mul.Tensor, draw.ints(9, 3, 2), draw.floats(2))
    check(aten.div.Tensor, draw.ints(9, 3, 2), draw.floats(2))
    check(aten.sub.Tensor, draw.ints(9, 3, 2), draw.ints(9, 3, 2))


@pytest.mark.parametrize(
    "op",
    [aten.exp.default, aten.gelu.default, aten.rsqrt.default, aten.relu.default, aten.abs.default,
     aten.sign.default,
     aten.neg.default, aten.clone.default, aten.deg2rad.default, aten.round.default, aten.hardswish.default,
     torch.ops.autoshard.use.default],
)  # fmt: skip
def test_unary(op: object) -> None:
    draw = Draw(1)
    check(op, draw.floats(*draw.sizes(2)).abs() + 1)  # type: ignore[arg-type]
    check(op, draw.floats())  # type: ignore[arg-type]


def test_choice() -> None:
    draw = Draw(2)
    mask, a, b = draw.bools(3, 1), draw.floats(3, 4), draw.floats(4)
    assert check(aten.where.self, mask, a, b).linear == (frozenset({1, 2}),)


def test_several_operands() -> None:
    draw = Draw(3)
    a, b, c = draw.floats(3, 4), draw.floats(4), draw.floats(3, 1)
    check(aten.addcmul.default, a, b, c, value=2)
    check(aten.addcdiv.default, a, b, c, value=2)
    check(aten.lerp.Scalar, a, b, 0.25)
    check(aten.lerp.Tensor, a, b, c)
    check(aten.clamp.Tensor, a, b, c)
    check(aten.fill.Tensor, a, draw.floats())


@pytest.mark.parametrize(
    ("op", "rest"),
    [(aten.gelu_backward.default, {}), (aten.silu_backward.default, {}), (aten.sigmoid_backward.default, {}),
     (aten.tanh_backward.default, {}), (aten.threshold_backward.default, {"threshold": 0}),
     (aten.logit_backward.default, {"eps": 1e-3})],
)  # fmt: skip
def test_derivatives(op: object, rest: dict[str, object]) -> None:
    draw = Draw(4)
    rule = check(op, draw.floats(3, 4), draw.floats(3, 4), **rest)  # type: ignore[arg-type]
    assert rule.linear == (frozenset({0}),)


def test_casts() -> None:
    draw = Draw(6)
    x = draw.floats(3, 4)
    assert check(aten._to_copy.default, x, dtype=torch.float32, rtol=1e-5).linear
    assert not check(aten._to_copy.default, x, dtype=torch.int64).linear, "every part would be rounded"
    assert not linear(aten._to_copy.default, x, dtype=torch.float8_e4m3fn), (
        "or be more than the largest number"
    )
    assert not check(aten._to_copy.default, x > 0, dtype=torch.float64).linear, "no sums of bools"
    assert check(aten._to_copy.default, draw.ints(9, 3), dtype=torch.float64).linear
    assert not check(aten._to_copy.default, x, dtype=torch.bool).linear


def test_what_is_linear_is_exactly_this() -> None:
    both, each, first = {(0, 1)}, {(0,), (1,)}, {(0,)}
    assert linear(aten.add.Tensor, X, X) == both
    assert linear(aten.add.Tensor, X, X, alpha=2) == both
    assert linear(aten.add.Tensor, X, 1) == set(), "every rank would add the 1"
    assert linear(aten.add.Tensor, X, 0) == first
    assert linear(aten.add.Scalar, X, 2) == set()
    assert linear(aten.mul.Tensor, X, X) == each
    assert linear(aten.mul.Tensor, X, 2.0) == first
    assert linear(aten.mul.Tensor, X, X > 0) == first
    assert linear(aten.div.Tensor, X, X) == first
    assert linear(aten.div.Tensor_mode, X, X, rounding_mode="floor") == set()
    assert linear(aten.add.Tensor, X > 0, X > 0) == set()
    for op in (aten.abs.default, aten.relu.default, aten.round.default, aten.floor.default, aten.sgn.default,
               aten.square.default, aten.reciprocal.default, aten.nan_to_num.default):  # fmt: skip
        assert linear(op, X) == set(), op
    assert linear(aten.clamp.default, X, 0, 1) == set()
    assert linear(aten.maximum.default, X, X) == set()
    assert linear(aten.pow.Tensor_Scalar, X, 1) == set()
    assert linear(aten.fmod.Scalar, X, 2) == set()


def test_every_pointwise_op_has_a_rule() -> None:
    tagged = [
        overload
        for name in dir(aten)
        if isinstance(packet := getattr(aten, name), type(aten.add))
        for overload in (getattr(packet, o) for o in packet.overloads())
        if torch.Tag.pointwise in overload.tags
    ]
    assert len(tagged) > 200
    assert all(has_rule(op) for op in tagged)


def test_two_results() -> None:
    check(aten.frexp.Tensor, Draw(0).floats(4, 3))
