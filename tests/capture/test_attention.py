"""autoshard::attention against torch's own, values and gradients; and how sdpa is captured."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import passes.ops
from passes.capture.operator_calls import scaled_dot_product
from passes.ops.attention_choice import AttentionCall, math_forward
from passes.ops.attention_op import forward
from tests.capture.running import check

attention = torch.ops.autoshard.attention.default
SIZES = [(5, 5), (4, 7), (7, 4)]


def _operands(s: int, t: int, d: int, e: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    q = torch.randn(2, s, 3, d).transpose(1, 2)
    return [x.to(dtype).requires_grad_() for x in (q, torch.randn(2, 3, t, d), torch.randn(2, 3, t, e))]


def _mask(kind: str, s: int, t: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "bool":
        mask = torch.rand(2, 1, s, t) > 0.3
        mask[0, 0, 1] = False  # a query that sees nothing
        return mask
    if kind == "float":
        return torch.randn(2, 3, s, t).to(dtype)
    return (torch.rand(1, 1, 1, t) > 0.3) if kind == "row" else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "row"])
@pytest.mark.parametrize("widths", [(8, 8), (8, 6)], ids=str)
def test_attention_is_torchs(kind: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    rtol, atol = (5e-2, 1e-1) if dtype == torch.bfloat16 else (1e-4, 1e-5)
    for s, t in SIZES:
        q, k, v = _operands(s, t, *widths, dtype)
        mask, causal = _mask(kind, s, t, dtype), kind == "causal"
        wanted = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        got, lse = attention(q, k, v, mask, causal, widths[0] ** -0.5)
        assert lse.shape == q.shape[:3] and not lse.requires_grad
        grad = torch.randn_like(wanted)
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)
        for ours, theirs in zip(
            torch.autograd.grad(got, (q, k, v), grad),
            torch.autograd.grad(wanted, (q, k, v), grad),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", ["none", "causal", "float", "row"])
@pytest.mark.parametrize(("groups", "widths"), [(1, (8, 8)), (2, (8, 8)), (2, (8, 6))], ids=str)
def test_grouped_heads_are_torchs(kind: str, groups: int, widths: tuple[int, int]) -> None:
    for s, t in SIZES:
        q = torch.randn(2, 4, s, widths[0], dtype=torch.float64, requires_grad=True)
        k, v = (torch.randn(2, groups, t, n, dtype=torch.float64, requires_grad=True) for n in widths)
        mask = torch.randn(2, 4, s, t).double() if kind == "float" else _mask(kind, s, t, torch.float64)
        causal, scale = kind == "causal", widths[0] ** -0.5
        wanted = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        args = q, k, v, mask, causal, scale
        got, _ = attention(*args)
        grad = torch.randn_like(wanted)
        ours, theirs = (torch.autograd.grad(out, (q, k, v), grad) for out in (got, wanted))
        torch.testing.assert_close([got, *ours], [wanted, *theirs], rtol=1e-12, atol=1e-12)
        torch.library.opcheck(attention, args)


def test_every_kernel_has_one_lse() -> None:
    """A fused kernel and the math agree on lse, so shards computed by either can be combined."""
    q, k, v = (x.detach() for x in _operands(5, 7, 8, 8))
    problem = AttentionCall(q, k, v, _mask("float", 5, 7, torch.float32), False, 0.3)
    assert problem.kernel == "cpu_flash"
    for got, wanted in zip(forward(problem), math_forward(problem), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)], ids=str)
def test_empty_shard(sizes: tuple[int, int, int, int]) -> None:
    b, h, s, t = sizes
    q, k = torch.randn(b, h, s, 8, requires_grad=True), torch.randn(b, h, t, 8, requires_grad=True)
    out, lse = attention(q, k, k, None, False, 0.3)
    assert out.shape == q.shape and lse.shape == (b, h, s) and not out.any()
    out.sum().backward()
    assert q.grad is not None and not q.grad.any()


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "window"])
def test_fake_kernels_and_gradient_formula_agree_with_the_kernels(kind: str) -> None:
    for widths in ((8, 8), (8, 6)):
        flags = kind in ("causal", "window"), 0.3, 3 * (kind == "window")
        q, k, v, mask = *_operands(5, 7, *widths), _mask(kind, 5, 7, torch.float32)
        torch.library.opcheck(attention, (q, k, v, mask, *flags))
        with torch.no_grad():
            out, lse = attention(q, k, v, mask, *flags)
            backward = (out, q.detach(), k.detach(), v.detach(), mask, out, lse, *flags)
        torch.library.opcheck(torch.ops.autoshard.attention_backward.default, backward)


def test_memory_order_is_heads_inside() -> None:
    for widths in ((8, 8), (8, 6)):
        out, _ = attention(*(x.contiguous() for x in _operands(5, 7, *widths)), None, False, 0.3)
        assert out.transpose(1, 2).is_contiguous()


CASES: list[dict[str, Any]] = [
    {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "enable_gqa": True},
    {"q": (2, 4, 5, 8), "k": (2, 1, 7, 8), "enable_gqa": True, "is_causal": True},
    {"q": (5, 8), "k": (7, 8)},
    {"q": (3, 5, 8), "k": (3, 7, 8), "mask": (3, 5, 7)},
    {"q": (3, 5, 8), "k": (3, 7, 8), "mask": (7,)},
    {"q": (2, 3, 4, 5, 8), "k": (2, 3, 4, 7, 8), "mask": (3, 1, 5, 7)},
    {"q": (2, 3, 4, 5, 8), "k": (2, 3, 4, 7, 8), "mask": (5, 7), "scale": 0.5},
    {"q": (2, 3, 4, 5, 8), "k": (2, 3, 4, 7, 8), "mask": (4, 5, 7)},
    {"q": (2, 4, 5, 8), "k": (1, 4, 7, 8), "fused": False},
    {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8), "mask": (4, 5, 7), "learned": True, "fused": False},
    {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8), "mask": (2, 1, 5, 7)},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("boolean", [True, False])
def test_captured_call(case: dict[str, Any], boolean: bool) -> None:
    rest = {k: v for k, v in case.items() if k in ("is_causal", "scale", "enable_gqa")}
    if boolean and ("mask" not in case or case.get("learned")):
        pytest.skip("no boolean mask here")

    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **rest)

    q, k, v = (torch.randn(shape, requires_grad=True) for shape in (case["q"], case["k"], case["k"]))
    mask = torch.randn(case["mask"]) if "mask" in case else None
    if mask is not None:
        mask = mask > -1 if boolean else mask.requires_grad_(case.get("learned", False))
    captured = check(Attend(), q, k, v, mask, rtol=1e-4, atol=1e-5)
    targets = [str(node.target) for node in captured.joint.graph.nodes]
    assert ("autoshard.attention.default" in targets) == case.get("fused", True)
    nodes = [n for n in captured.joint.graph.nodes if str(n.target) == "autoshard.attention.default"]
    assert all(len(x.meta["val"].shape) == 4 for n in nodes for x in n.all_input_nodes)


def test_dropout_uses_random_ops() -> None:
    q = torch.randn(2, 3, 512, 8)
    torch.manual_seed(1)
    kept = (scaled_dot_product(q, q, torch.ones_like(q), dropout_p=0.25)).mean()
    assert abs(float(kept) - 1.0) < 0.02


def test_uniform_does_not_depend_on_the_split() -> None:
    seed = torch.tensor(-7)
    whole = passes.ops.uniform([5, 6], [0, 0], [5, 6], seed, 3)
    for (a, b), (c, d) in itertools.product([(0, 2), (2, 5), (5, 5)], [(0, 1), (1, 6)]):
        part = passes.ops.uniform([b - a, d - c], [a, c], [5, 6], seed, 3)
        assert torch.equal(part, whole[a:b, c:d])


def test_uniform_is_uniform_and_streams_differ() -> None:
    size = [1 << 18]
    keys = [(0, 0), (0, 1), (1, 0), (1 << 40, 0)]
    streams = [passes.ops.uniform(size, [0], size, torch.tensor(seed), stream) for seed, stream in keys]
    for x in streams:
        assert float(x.min()) >= 0.0 and float(x.max()) < 1.0
        counts = torch.histc(x, 64, 0.0, 1.0)
        expected = size[0] / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < 120.0  # chi-squared, 63 degrees: p < 1e-5
    correlation = torch.corrcoef(torch.stack([*streams, streams[0].roll(1)])) - torch.eye(5)
    assert float(correlation.abs().max()) < 0.01


def test_uniform_beyond_32_bits() -> None:
    seed = torch.tensor(5)
    far = passes.ops.uniform([4], [1 << 33], [1 << 34], seed, 0)
    near = passes.ops.uniform([4], [0], [1 << 34], seed, 0)
    assert not torch.equal(far, near)


def test_uniform_fake_kernel() -> None:
    args = ([2, 3], [1, 0], [4, 3], torch.tensor(1), 2)
    torch.library.opcheck(torch.ops.autoshard.uniform.default, args)
    assert passes.ops.uniform([], [], [], torch.tensor(1), 0).shape == ()
