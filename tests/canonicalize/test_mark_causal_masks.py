from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from passes.canonicalize import insert_uses
from passes.canonicalize.insert_uses import MarkCausalMasks
from passes.ops import attention
from tests.canonicalize.graphs import applied, ramp

ops = torch.ops.autoshard
MIN = torch.finfo(torch.float64).min
Mask = Callable[[Tensor], Tensor]


def queries_and_keys(samples: int = 1, queries: int = 6, keys: int = 6) -> tuple[Tensor, Tensor]:
    return torch.arange(queries).expand(samples, 1, queries)[..., None], torch.arange(keys)[None, None, None]


def seen(samples: int = 1, queries: int = 6, keys: int = 6) -> Tensor:
    i, j = queries_and_keys(samples, queries, keys)
    return j <= i


def both(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Attention and the gradient of q."""
    out, lse = ops.attention.default(q, k, k, mask, False, 0.5)
    return ops.attention_backward.default(out, q, k, k, mask, out, lse, False, 0.5)[0]


def marks(mask: Mask, queries: int = 6) -> list[bool]:
    """Of the attention and its gradient."""
    q, k = ramp(2, 2, queries, 4) / 100, ramp(2, 2, 6, 4) / 90
    given = q, k, torch.zeros(2, 1, queries, 6).double()
    after = applied(MarkCausalMasks(), lambda q, k, x: both(q, k, mask(x)), *given, grads=False)
    nodes = [node for node in after.graph.nodes if "autoshard.attention" in str(node.target)]
    return [node.args[-2] is True for node in nodes]


def added(mask: Tensor, hidden: float, shown: float = 0.0) -> Tensor:
    return torch.where(mask, *(torch.full((), value, dtype=torch.float64) for value in (shown, hidden)))


CAUSAL: dict[str, Mask] = {
    "bool": lambda x: seen(),
    "of every sample": lambda x: seen(2),
    "both ways": lambda x: seen() & (queries_and_keys()[0] >= queries_and_keys()[1]),
    "additive": lambda x: added(seen(), -torch.inf),
    "additive, of the least number": lambda x: added(seen(), MIN),
}
OTHER: dict[str, Mask] = {
    "one later": lambda x: queries_and_keys()[1] <= queries_and_keys()[0] + 1,
    "a window": lambda x: seen() & (queries_and_keys()[1] > queries_and_keys()[0] - 3),
    "all": lambda x: seen() | True,
    "of one sample": lambda x: (
        seen(2) & (torch.arange(2)[:, None, None, None] > 0) | (queries_and_keys()[1] == 0)
    ),
    "of an input": lambda x: seen() & (x < 1),
    "a bias besides": lambda x: added(seen(), -torch.inf, 0.5),
    "little": lambda x: added(seen(), -1e30),
    "of keys": lambda x: queries_and_keys()[1] < 3,
}


@pytest.mark.parametrize("large", [2**22, 12], ids=["at once", "in blocks"])
@pytest.mark.parametrize("name", [*CAUSAL, *OTHER])
def test_only_the_causal_mask_is_marked(name: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert_uses, "_LARGEST", large)
    assert marks({**CAUSAL, **OTHER}[name]) == [name in CAUSAL] * 2


def test_fewer_queries_are_aligned_at_the_top_left() -> None:
    assert marks(lambda x: seen(queries=4), 4) == [True, True]
    assert marks(lambda x: queries_and_keys(queries=4)[1] <= queries_and_keys(queries=4)[0] + 2, 4) == [
        False,
        False,
    ]


def test_a_triangle_is_recognised_where_it_is_small() -> None:
    assert marks(lambda x: torch.ones(6, 6).tril().bool()[None, None]) == [True, True]


def test_nothing_is_left_of_the_mask_and_values_stay() -> None:
    given = torch.randn(2, 2, 6, 4).double(), torch.randn(2, 2, 6, 4).double()
    function = lambda q, k: attention(q, k, k, seen(), False, 0.5)[0]
    after = applied(MarkCausalMasks(), function, *given, grads=False)
    assert [node.name for node in after.graph.nodes if node.op == "call_function"] == ["attention", "getitem"]
    torch.testing.assert_close(after.module(*given)[0], function(*given), rtol=1e-12, atol=1e-12)
