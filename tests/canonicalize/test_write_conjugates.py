from __future__ import annotations

import torch

from passes.canonicalize.canonicalize import canonicalize
from tests.canonicalize.graphs import assert_same, assert_valid, joint_of, ops, ramp


def filtered(x: torch.Tensor) -> torch.Tensor:
    """The copy that makes a conjugate a tensor like others is one the pipeline drops."""
    z = torch.view_as_complex(x)
    return torch.view_as_real(z.conj().t().resolve_conj()) + (z.conj().imag * z.real).sum()


def test_conjugates_are_computed() -> None:
    """Values and gradients stay; no value is a note on another's memory."""
    before = joint_of(filtered, ramp(3, 3, 2))
    assert {"_conj", "_neg_view"} <= set(ops(before))
    after = canonicalize(before)
    assert not {"_conj", "_neg_view"} & set(ops(after))
    assert_valid(after)
    assert_same(before, after, [ramp(3, 3, 2)])
    for node in after.graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, torch.Tensor) or not (value.is_conj() or value.is_neg()), node
