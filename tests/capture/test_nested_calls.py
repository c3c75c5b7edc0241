"""Functions that torch takes as arguments are written out: values and gradients are those of plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autoshard import MeshSpec, find_plan, verify
from cost_model.errors import CaptureError
from passes.capture import capture
from tests.capture.running import check

Rest = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """A linear layer, and any function of (the module, what it gives, [4, 6, 8]); to compare with, a plain one."""

    def __init__(self, rest: Rest, plain: Rest) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(2))
        self.rest, self.plain, self.captured = rest, plain, False

    def forward(self, x: Tensor) -> Any:
        return (self.rest if torch.compiler.is_compiling() else self.plain)(self, self.first(x))


def cond(m: Any, h: Tensor) -> Tensor:
    """What is not taken has no finite gradient, of an operand and of a parameter that it closes over."""
    low, high = h.sum() < 1e9, h.sum() > 1e9
    y = torch.cond(low, lambda a: m.other(a), lambda a: (a - a.detach()).sqrt() * m.table[0], (h,))
    (z,) = torch.cond(high, lambda: ((m.table - m.table.detach()).log().sum(),), lambda: (y.sum(),), ())
    return y * z


def cond_plain(m: Any, h: Tensor) -> Tensor:
    y = m.other(h) + 0 * m.table[0]
    return y * y.sum()


def loops(m: Any, h: Tensor) -> Tensor:
    _, h = while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, torch.tanh(m.other(a))), (torch.tensor(0), h))

    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = torch.tanh(m.other(carry) + x)
        return carry, carry * 2

    last, h = scan(step, torch.zeros_like(h[:, 0]), h, dim=1, reverse=True)
    h = associative_scan(lambda a, b: a * b, h, 1, combine_mode="generic")
    return map_rows(lambda row, w: row @ w, h, m.other.weight) + last.unsqueeze(1)


def loops_plain(m: Any, h: Tensor) -> Tensor:
    for _ in range(3):
        h = torch.tanh(m.other(h))
    carry, rows = torch.zeros_like(h[:, 0]), []
    for x in reversed(h.unbind(1)):
        carry = torch.tanh(m.other(carry) + x)
        rows.insert(0, carry * 2)
    for i in range(1, 6):
        rows[i] = rows[i - 1] * rows[i]
    return torch.stack(rows, 1) @ m.other.weight + carry.unsqueeze(1)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def flex(m: Any, h: Tensor) -> Tensor:
    q, k, v = heads(h, 2), heads(m.other(h), 2), heads(h * 2, 2)
    block = create_block_mask(lambda b, i, q, k: (q >= k) & (q > 0), None, None, 6, 6, device=h.device)
    bias = lambda score, b, i, q, k: torch.where(q >= k, score + m.table[i] * (q - k), -float("inf"))
    few = flex_attention(q, heads(m.other(h)[..., :4], 1), heads(h[..., :4], 1), scale=0.5, enable_gqa=True)
    return flex_attention(q, k, v, block_mask=block) + flex_attention(q, k, v, score_mod=bias) + few


def flex_plain(m: Any, h: Tensor) -> Tensor:
    q, k, v = heads(h, 2), heads(m.other(h), 2), heads(h * 2, 2)
    places = torch.arange(6)
    back = places[:, None] - places[None]
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q @ k.mT / 2 + m.table[:, None, None] * back).masked_fill(back < 0, -float("inf"))
    few = F.scaled_dot_product_attention(
        q, heads(m.other(h)[..., :4], 1), heads(h[..., :4], 1), scale=0.5, enable_gqa=True
    )
    return causal * (places > 0)[:, None] + scores.softmax(-1) @ v + few


@pytest.mark.parametrize("rest, plain", [(cond, cond_plain), (loops, loops_plain), (flex, flex_plain)])
def test_values_of_plain_python(rest: Rest, plain: Rest) -> None:
    torch.manual_seed(0)
    check(Model(rest, plain).double(), torch.randn(4, 6, 8, dtype=torch.float64), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rest", [cond, loops, flex])
def test_split(rest: Rest) -> None:
    model, x = Model(rest, rest), torch.randn(4, 6, 8)
    plan = find_plan(model, MeshSpec({"dp": 2, "tp": 2}), x, profile="cpu")
    assert verify(model, plan, x).ok


def test_on_gpus_planned_on_a_cpu() -> None:
    """Whatever device the mesh has, the graph is the same."""

    def rest(m: Any, h: Tensor) -> Tensor:
        return flex_attention(heads(h, 2), heads(m.other(h), 2), heads(h, 2))

    model, x = Model(rest, rest), torch.randn(2, 6, 8)
    plan = find_plan(model, MeshSpec({"dp": 2}, device_type="cuda"), x, profile="h100")
    assert verify(model, plan, x).ok


def test_a_mask_of_all_heads_is_one() -> None:
    """Nothing of shape [batch, heads, queries, keys] is in a graph that needs none."""

    def rest(m: Any, h: Tensor) -> Tensor:
        block = create_block_mask(lambda b, i, q, k: q >= k, None, None, 6, 6, device=h.device)
        q = heads(h, 2)
        return flex_attention(q, q, q, block_mask=block)

    joint = capture(Model(rest, rest), (torch.randn(4, 6, 8),), {}).joint
    values = [node.meta["val"] for node in joint.graph.nodes if "val" in node.meta]
    assert not any(isinstance(v, Tensor) and v.shape == (4, 2, 6, 6) for v in values)


def test_compiled_modules_run_as_they_are_written() -> None:
    compiled: Any = torch.compile(nn.Linear(8, 8))
    model, x = nn.Sequential(nn.Linear(8, 8), compiled), torch.randn(4, 8)
    plan = find_plan(model, MeshSpec({"dp": 2}), x, profile="cpu")
    assert verify(model, plan, x).ok


def written(m: Any, h: Tensor) -> Tensor:
    m.seen = torch.zeros(8)
    return torch.cond(h.sum() > 0, lambda a: a + m.seen.add_(1), lambda a: a * 2, (h,))


def other_shapes(m: Any, h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, lambda a: a, lambda a: a[:1], (h,))


def without_end(m: Any, h: Tensor) -> Tensor:
    return while_loop(lambda a: a.sum() < 3, lambda a: (m.other(a) + 1,), (h,))[0]


def too_long(m: Any, h: Tensor) -> Tensor:
    return scan(lambda c, x: (c + x, c * x), torch.zeros(()), torch.ones(2000))[1]


def summed(m: Any, h: Tensor) -> Tensor:
    torch.distributed.all_to_all_single(h, h.clone())
    return h


def drawn(m: Any, h: Tensor) -> Tensor:
    return h + torch.randn(8, generator=torch.Generator())


def misused(m: Any, h: Tensor) -> Tensor:
    return m.other(h, 3)


@pytest.mark.parametrize("rest, said, remedy", [
    (written, r"changes a tensor of outside in place \(add_\)", "assign it after torch.cond"),
    (other_shapes, "other shapes or dtypes", "let both return the same"),
    (without_end, "the value of a tensor decides", "torch.where"),
    (too_long, "2,000 steps", "at most 1,024 steps"),
    (summed, r"its forward communicates \(all_to_all_single\)", "leave the collective out"),
    (drawn, "a generator of the user's own", "manual_seed"),
    (misused, "takes 2 positional arguments but 3", "write this line with other ops"),
])  # fmt: skip
def test_what_cannot_be_is_named_at_its_line(rest: Rest, said: str, remedy: str) -> None:
    with pytest.raises(CaptureError, match=said) as caught:
        capture(Model(rest, rest), (torch.randn(4, 6, 8),), {})
    text = str(caught.value)
    assert "test_nested_calls.py:" in text and remedy in text.partition("\n  try: ")[2]


def _gelu(bias: Tensor, x: Tensor) -> Tensor:
    return (bias + x) * torch.tanh(0.8 * (bias + x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_functions_are_captured_alike_whenever() -> None:
    """TorchScript runs a function another way once it has seen it run: then there were other ops in its graph."""

    gelu: Any = torch.jit.script(_gelu)

    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.bias = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return gelu(self.bias, self.net(x))

    model, x = Scripted().double(), torch.randn(3, 4, dtype=torch.float64)
    first = str(check(model, x).joint.graph)
    for _ in range(3):
        model(x).sum().backward()
    assert str(capture(model, (x,), {}).joint.graph) == first
