"""The oracle finds a wrong rule: every kind of claim, made falsely, is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from passes.rules.check.trial import call_node
from passes.rules.core.assemble import whole_rule
from passes.rules.core.notation import parse
from passes.rules.core.rule import LocalContext, OpRule, describe
from tests.rules.registered import Draw, aten, first_error


def error(op: object, notation: str, *args: object, **kwargs: object) -> str | None:
    node = call_node(op, args, kwargs)  # type: ignore[arg-type]
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    value = node.meta["val"]
    results = value if isinstance(value, tuple) else (value,)
    rule = parse(notation).bind([t.shape for t in tensors], [r.shape for r in results])
    return first_error(node, rule)


X, Y, SQUARE = Draw(0).floats(4, 5), Draw(1).floats(5, 3), Draw(2).floats(4, 4)


@pytest.mark.parametrize(
    ("op", "right", "wrong", "args"),
    [
        # a summed factor said to be kept, kept factors exchanged, the wrong reduction
        (aten.mm.default, "m k, k n -> m n", "m k, k n -> m n; k: max", (X, Y)),
        (aten.mm.default, "m k, k n -> m n", "a b, b c -> c a", (SQUARE, SQUARE)),
        (aten.amax.default, "a k -> a; k: max", "a k -> a; k: sum", (X, [1])),
        (aten.amax.default, "a k -> a; k: max", "a k -> a; k: min", (X, [1])),
        (aten.sum.dim_IntList, "k a -> a; k: sum", "a k -> a; k: sum", (SQUARE, [0])),
        # a dim that must be whole
        (aten.cumsum.default, "a w -> a w; w: whole", "a w -> a w", (X, 1)),
        (aten.sort.default, "a w -> a w, a w; w: whole", "a w -> a w, a w", (X, 1)),
        # an operand that should follow and does not
        (aten.add.Tensor, "a b, a b -> a b", "a b, c d -> a b; c: whole; d: whole", (X, X)),
        # linearity
        (aten.add.Tensor, "a b, a b -> a b; linear: 0 1", "a b, a b -> a b; linear: 0", (X, X)),
        (aten.mul.Tensor, "a b, a b -> a b; linear: 0", "a b, a b -> a b; linear: 0 1", (X, X)),
        (aten.abs.default, "a b -> a b", "a b -> a b; linear: 0", (X,)),
        (aten.add.Tensor, "a b -> a b", "a b -> a b; linear: 0", (X, 1.0)),
        # the local op needs another shape argument than the global one
        (aten.view.default, "(a b) c -> a b c; a: whole; c: whole", "(a b) c -> a b c", (X, [2, 2, 5])),
    ],
)
def test_wrong_rules_are_refused(op: object, right: str, wrong: str, args: tuple[object, ...]) -> None:
    assert error(op, right, *args) is None
    assert error(op, wrong, *args) is not None


def test_a_bias_added_twice_is_refused() -> None:
    bias = Draw(3).floats(3)
    assert error(aten.addmm.default, "n, m k, k n -> m n", bias, X, Y) is not None
    assert error(aten.addmm.default, "n, m k, k n -> m n; k: whole", bias, X, Y) is None


def test_a_sum_of_bools_is_refused() -> None:
    assert error(aten.any.dim, "a k -> a; k: sum", X > 0, 1) is not None
    assert error(aten.any.dim, "a k -> a; k: max", X > 0, 1) is None


def test_a_wrong_local_op_is_refused() -> None:
    node = call_node(aten.clone.default, (X,))
    good = parse("a b -> a b").bind([X.shape], [X.shape])

    def halved(ctx: LocalContext) -> torch.fx.Node:
        scale = 0.5 if ctx.is_split("a") and ctx.interval("a")[0] > 0 else 1.0
        return ctx.call(aten.mul.Tensor, ctx.args[0], scale)

    assert first_error(node, good) is None
    assert first_error(node, replace(good, localize=halved)) is not None


def test_a_result_of_the_wrong_shape_or_type_is_refused() -> None:
    node = call_node(aten.clone.default, (X,))
    rule = parse("a b -> a b").bind([X.shape], [X.shape])
    shape = replace(rule, localize=lambda ctx: ctx.call(aten.sum.dim_IntList, ctx.args[0], [0], True))
    dtype = replace(
        rule, localize=lambda ctx: ctx.call(aten._to_copy.default, ctx.args[0], dtype=torch.float32)
    )
    assert "should be" in (first_error(node, shape) or "")
    assert "float32" in (first_error(node, dtype) or "")


def test_a_hidden_factor_is_not_tried() -> None:
    """Only the first factor above 1 of a product can be split; the others claim nothing."""
    rule = OpRule(((("a", "b"),),), ((("a", "b"),),), {"a": 2, "b": 2})
    assert first_error(call_node(aten.clone.default, (X[:, 0],)), rule) is None


def test_the_replicated_rule_is_always_right() -> None:
    node = call_node(aten.cumsum.default, (X, 0))
    assert first_error(node, whole_rule(describe(node))) is None
