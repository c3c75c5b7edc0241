"""The table of rules: every row is an op, of canonical graphs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from passes.canonicalize import canonicalize
from passes.rules.core.rule_registry import is_fallback
from passes.rules.core.rule_table import TABLE
from tests.canonicalize.gone import is_gone
from tests.canonicalize.graphs import Function, assert_same, joint_of, ramp

aten = torch.ops.aten


def overload(key: str) -> Any:
    namespace, _, rest = key.partition("::")
    name, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), variant)


def test_every_name_in_the_table_is_an_op() -> None:
    """Ops that exist only in other versions of torch would raise."""
    assert all(isinstance(overload(key), torch._ops.OpOverload) for key in TABLE)


def test_no_row_is_dead() -> None:
    """No rule for an op that capture takes apart, or a pass writes otherwise: nothing would ask for it."""
    assert [key for key in TABLE if is_gone(overload(key))] == []


@pytest.mark.parametrize(
    "op", [aten.addmm.default, aten.mean.dim, aten.mm.default, aten.view.default, aten.transpose.int,
           aten.zeros_like.default, aten.arange.default, aten.detach.default, aten._conj.default,
           aten.where.ScalarOther, aten.upsample_nearest2d.vec, aten.native_dropout_backward.default]
)  # fmt: skip
def test_what_is_gone(op: Any) -> None:
    assert is_gone(op)


@pytest.mark.parametrize(
    "op", [aten.reshape.default, aten.full.default, aten.arange.start_step, aten.clone.default, aten.roll.default,
           aten.slice_backward.default, aten.conj_physical.default, aten.silu_backward.default, aten.add.Tensor]
)  # fmt: skip
def test_what_is_not(op: Any) -> None:
    """Of a roll and of a slice's gradient capture takes some calls apart."""
    assert not is_gone(op)


CALLS: dict[str, Function] = {
    "addmm": lambda x: aten.addmm.default(x[0], x, x),
    "softmax": lambda x: aten._softmax.default(x, 1, False),
    "mean and variance": lambda x: aten.mean.dim(x, [0]) + aten.var.correction(x, [1]),
    "stack and unbind": lambda x: sum(aten.unbind.int(aten.stack.default([x, x.sin()], 1), 1)),
    "where": lambda x: aten.where.ScalarOther(x > 1, x, 0.0),
    "masked fill": lambda x: aten.masked_fill.Scalar(x, x > 1, 2.0),
    "triangle": lambda x: aten.tril.default(x) + aten.repeat.default(x[:2], [2, 1]),
    "transpose": lambda x: aten.t.default(x) + aten.transpose.int(x, 0, 1).unsqueeze(0).squeeze(0),
    "creation": lambda x: (
        x + aten.zeros_like.default(x) + aten.arange.start(2, 6) + aten.new_ones.default(x, [4, 4])
    ),
    "flat roll": lambda x: aten.roll.default(x, [3]),
    "resize": lambda x: aten.upsample_nearest2d.vec(x[None, None], [8, 6], None),
    "derivative": lambda x: aten.leaky_relu_backward.default(x, x, 0.1, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_op_without_a_row_is_split_by_what_it_is_made_of(name: str) -> None:
    x = ramp(4, 4)
    joint = joint_of(CALLS[name], x)
    canonical = canonicalize(joint)
    assert_same(joint, canonical, [x], rtol=1e-5, atol=1e-5)
    assert not [n for n in canonical.graph.nodes if n.target is not operator.getitem and is_fallback(n)]
