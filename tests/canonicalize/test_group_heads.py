from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from passes.canonicalize import canonicalize
from passes.capture import capture
from passes.ops import attention
from tests.canonicalize.graphs import joint_of, run

Expand = Callable[[Tensor, int], Tensor]


def transformers(x: Tensor, n: int) -> Tensor:
    b, g, t, d = x.shape
    return x[:, :, None].expand(b, g, n, t, d).reshape(b, g * n, t, d)


def attend(expand: Expand, heads: int = 6) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = [expand(x, heads // x.shape[1]) for x in (k, v)]
        return attention(q, *wide, None, True, 0.5)[0]

    return function


def operands(groups: int, of_values: int | None = None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(groups)
    shapes = (2, 6, 5, 4), (2, groups, 5, 4), (2, of_values or groups, 5, 3)
    return [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]


class Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(*given)


def key_heads(function: Callable[..., Tensor], *given: Tensor) -> list[int]:
    """Of the attention and its gradient, which compute what the function does."""
    before = capture(Called(function), tuple(x.requires_grad_() for x in given), {}).joint
    after, tangent = canonicalize(before), torch.randn_like(function(*given))
    values = [x.detach() for x in (*given, tangent)]
    found, wanted = (fx.Interpreter(joint.module).run(*values) for joint in (after, before))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    nodes = [node for node in after.graph.nodes if "autoshard.attention" in str(node.target)]
    return [node.args[i + 1].meta["val"].shape[1] for i, node in enumerate(nodes)]


EXPANDED: dict[str, Expand] = {
    "as transformers": transformers,
    "repeat_interleave": lambda x, n: x.repeat_interleave(n, 1),
    "through a scale": lambda x, n: transformers(2 * x, n),
}
OTHER: dict[str, Expand] = {
    "scaled behind": lambda x, n: 2 * transformers(x, n),
    "in another order": lambda x, n: x.repeat(1, n, 1, 1),
}


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("name", [*EXPANDED, *OTHER])
def test_expanded_keys_are_read_as_they_are(name: str, groups: int) -> None:
    if name == "in another order" and groups == 1:
        pytest.skip("one group has one order")
    found = key_heads(attend({**EXPANDED, **OTHER}[name]), *operands(groups))
    assert found == [groups if name in EXPANDED else 6] * 2


def test_values_of_other_groups_stay_expanded() -> None:
    assert key_heads(attend(transformers), *operands(3, 2)) == [6, 6]


def test_keys_that_something_else_reads_expanded() -> None:
    """Its gradient has another summand, before the sum over a group."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide, values = transformers(k, 3), transformers(v, 3)
        return attention(q, wide, values, None, True, 0.5)[0] + (wide * q).sum()

    assert key_heads(function, *operands(2)) == [2, 6]


def test_without_gradients() -> None:
    given = operands(2)
    after = canonicalize(joint_of(attend(transformers), *given, grads=False))
    names = [node.name for node in after.graph.nodes if node.op == "call_function"]
    assert names == ["attention", "getitem"]
    q, k, v = given
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(run(after, given)[0], wanted, rtol=1e-12, atol=1e-12)
