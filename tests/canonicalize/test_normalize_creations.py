from __future__ import annotations

import pytest
import torch

from passes.canonicalize.random_to_uniform import NormalizeCreations
from tests.canonicalize.graphs import Function, applied, ramp, text


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.zeros_like(x), "full([2, 3], 0) -> [2, 3]"),
        (lambda x: torch.full_like(x, 2.5), "full([2, 3], 2.5) -> [2, 3]"),
        (lambda x: x.new_ones(4), "full([4], 1) -> [4]"),
        (lambda x: x.new_full((4,), 7), "full([4], 7) -> [4]"),
        (lambda x: torch.arange(5), "arange(0, 5, 1) -> [5]"),
        (lambda x: torch.arange(2, 5), "arange(2, 5, 1) -> [3]"),
        (lambda x: torch.arange(5, 1, -2, dtype=torch.float32), "arange(5, 1, -2) -> [2]"),
    ],
)
def test_normalize_creations(function: Function, expected: str) -> None:
    assert text(applied(NormalizeCreations(), function, ramp(2, 3))) == [expected]


def test_a_filled_constant_keeps_its_dtype() -> None:
    after = applied(NormalizeCreations(), lambda x: torch.zeros_like(x, dtype=torch.int32), ramp(2))
    (node,) = [n for n in after.graph.nodes if n.op == "call_function"]
    assert node.kwargs["dtype"] == torch.int32
