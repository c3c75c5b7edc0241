"""The table of rules: every row is an op, of canonical graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes.rules.core.rule_table import TABLE
from tests.canonicalize.gone import is_gone

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
