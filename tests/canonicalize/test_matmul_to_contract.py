from __future__ import annotations

import pytest
import torch

from passes.canonicalize.permutes import MatmulToContract
from tests.canonicalize.graphs import Function, applied, ramp, text


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (torch.mm, [(2, 3), (3, 4)], "contract(x0, x1, m k, k n -> m n) -> [2, 4]"),
        (torch.bmm, [(5, 2, 3), (5, 3, 4)], "contract(x0, x1, b m k, b k n -> b m n) -> [5, 2, 4]"),
        (torch.mv, [(2, 3), (3,)], "contract(x0, x1, m k, k -> m) -> [2]"),
        (torch.dot, [(3,), (3,)], "contract(x0, x1, k, k -> ) -> []"),
    ],
)
def test_matmul_to_contract(function: Function, shapes: list[tuple[int, ...]], expected: str) -> None:
    assert text(applied(MatmulToContract(), function, *(ramp(*shape) for shape in shapes))) == [expected]
