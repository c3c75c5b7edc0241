from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from passes.canonicalize import insert_uses
from passes.canonicalize.insert_uses import MarkCausalMasks
from passes.ir.op_traits import named_arguments
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


def marks(mask: Mask, queries: int = 6) -> list[int | None]:
    """Of the attention and its gradient: the window, 0 for all keys before a query, None where the mask is left."""
    q, k = ramp(2, 2, queries, 4) / 100, ramp(2, 2, 6, 4) / 90
    given = q, k, torch.zeros(2, 1, queries, 6).double()
    after = applied(MarkCausalMasks(), lambda q, k, x: both(q, k, mask(x)), *given, grads=False)
    nodes = [node for node in after.graph.nodes if "autoshard.attention" in str(node.target)]
    given = [named_arguments(node.target, node.args, node.kwargs) for node in nodes]
    assert all(each["is_causal"] == (each["mask"] is None) for each in given)
    return [each["window"] if each["is_causal"] else None for each in given]


def added(mask: Tensor, hidden: float, shown: float = 0.0) -> Tensor:
    return torch.where(mask, *(torch.full((), value, dtype=torch.float64) for value in (shown, hidden)))


def near(window: int, samples: int = 1) -> Tensor:
    i, j = queries_and_keys(samples)
    return (j <= i) & (i - j < window)


def in_documents(first: int) -> Tensor:
    """Of two samples, in which a document begins at key `first`, as transformers finds it by positions."""
    positions = torch.cat([torch.arange(first), torch.arange(6 - first)]).expand(2, 6)
    steps = torch.cat([positions[:, :1] - 1, positions], 1)
    documents = (steps[:, 1:] - steps[:, :-1] != 1).cumsum(1)
    return seen(2) & (documents[:, None, :, None] == documents[:, None, None, :])


CAUSAL: dict[str, Mask] = {
    "bool": lambda x: seen(),
    "of every sample": lambda x: seen(2),
    "both ways": lambda x: seen() & (queries_and_keys()[0] >= queries_and_keys()[1]),
    "additive": lambda x: added(seen(), -torch.inf),
    "additive, of the least number": lambda x: added(seen(), MIN),
    "a window of all": lambda x: near(6),
    "of one document": lambda x: in_documents(6),
}
WINDOWS: dict[str, tuple[Mask, int]] = {
    "a window": (lambda x: seen() & (queries_and_keys()[1] > queries_and_keys()[0] - 3), 3),
    "of one key": (lambda x: near(1), 1),
    "of all but one, of every sample": (lambda x: near(5, 2), 5),
    "added": (lambda x: added(near(2), -torch.inf), 2),
}
OTHER: dict[str, Mask] = {
    "one later": lambda x: queries_and_keys()[1] <= queries_and_keys()[0] + 1,
    "a window and one later": lambda x: (queries_and_keys()[0] - queries_and_keys()[1]).abs() < 3,
    "two windows": lambda x: torch.where(queries_and_keys()[0] < 4, near(3), near(2)),
    "two windows, the second longer": lambda x: torch.where(queries_and_keys()[0] < 4, near(2), near(3)),
    "a window of one sample": lambda x: near(3, 2) & (torch.arange(2)[:, None, None, None] > 0),
    "a window of an input": lambda x: near(3) & (x < 1),
    "all": lambda x: seen() | True,
    "of one sample": lambda x: (
        seen(2) & (torch.arange(2)[:, None, None, None] > 0) | (queries_and_keys()[1] == 0)
    ),
    "of an input": lambda x: seen() & (x < 1),
    "a bias besides": lambda x: added(seen(), -torch.inf, 0.5),
    "little": lambda x: added(seen(), -1e30),
    "of keys": lambda x: queries_and_keys()[1] < 3,
    "of two documents": lambda x: in_documents(2),
}


@pytest.mark.parametrize("large", [2**22, 12], ids=["at once", "in blocks"])
@pytest.mark.parametrize("name", [*CAUSAL, *WINDOWS, *OTHER])
def test_only_causal_masks_and_windows_are_marked(
    name: str, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insert_uses, "_LARGEST", large)
    plain: dict[str, tuple[Mask, int | None]] = {
        **{name: (mask, 0) for name, mask in CAUSAL.items()},
        **{name: (mask, None) for name, mask in OTHER.items()},
    }
    mask, window = {**plain, **WINDOWS}[name]
    assert marks(mask) == [window] * 2


def test_what_is_not_pointwise_is_computed_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions and the one before them have 14 elements."""
    monkeypatch.setattr(insert_uses, "_LARGEST", 12)
    for most, found in ((13, None), (14, 0)):
        monkeypatch.setattr(insert_uses, "_LARGEST_WHOLE", most)
        assert marks(lambda x: in_documents(6)) == [found] * 2


def test_fewer_queries_are_aligned_at_the_top_left() -> None:
    assert marks(lambda x: seen(queries=4), 4) == [0, 0]
    at = lambda: queries_and_keys(queries=4)
    assert marks(lambda x: at()[1] <= at()[0] + 2, 4) == [None, None]
    assert marks(lambda x: seen(queries=4) & (at()[0] - at()[1] < 2), 4) == [None, None]


def test_a_triangle_is_recognised_where_it_is_small() -> None:
    assert marks(lambda x: torch.ones(6, 6).tril().bool()[None, None]) == [0, 0]


def test_nothing_is_left_of_the_mask_and_values_stay() -> None:
    given = torch.randn(2, 2, 6, 4).double(), torch.randn(2, 2, 6, 4).double()
    function = lambda q, k: attention(q, k, k, seen(), False, 0.5)[0]
    after = applied(MarkCausalMasks(), function, *given, grads=False)
    assert [node.name for node in after.graph.nodes if node.op == "call_function"] == ["attention", "getitem"]
    torch.testing.assert_close(after.module(*given)[0], function(*given), rtol=1e-12, atol=1e-12)
