"""Every attention kernel on the GPU against float64, forward and gradients.

The bound is the error of the plain formula computed in the same dtype: a kernel may make a few times that and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.ops import attention_choice
from passes.ops.attention_choice import Case, chip_of, may_compute
from passes.ops.attention_table import contract_of
from tests.cuda.programs import relative_error

pytestmark = pytest.mark.cuda

SLACK, FLOOR = 5.0, 32.0
"""Times the plain formula's own error, and epsilons: in float64 the formula is what it is compared with."""
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

WINDOW = 40
"""Keys that a query sees, where it sees the last ones alone."""

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Of one attention: heads, queries, keys, head size of q and k, and of v. mask: which of `masks`.

    layout: "heads inside" as a projection leaves them, "packed" in one tensor with the others, "odd": starting
    at an odd address, last dim not whole.
    """

    h: int = 3
    s: int = 64
    t: int = 64
    d: int = 64
    e: int = 64
    mask: str = ""
    is_causal: bool = False
    layout: str = "heads inside"


SHAPES: dict[str, Shape] = {
    "plain": Shape(),
    "causal": Shape(is_causal=True),
    "packed": Shape(layout="packed", is_causal=True),
    "odd address": Shape(layout="odd"),
    "head 20": Shape(d=20, e=20),
    "head 72": Shape(d=72, e=72, is_causal=True),
    "head 128": Shape(d=128, e=128),
    "head 200": Shape(d=200, e=200),
    "head 256": Shape(d=256, e=256, is_causal=True),
    "head 264": Shape(d=264, e=264),
    "another head of v": Shape(d=32, e=48),
    "odd heads and lengths": Shape(h=5, s=77, t=77, d=40, e=40, is_causal=True),
    "more keys": Shape(s=33, t=130),
    "more queries": Shape(s=130, t=33),
    "causal, more keys": Shape(s=33, t=70, is_causal=True),
    "causal, more queries": Shape(s=70, t=33, is_causal=True),
    "one query": Shape(s=1, t=50),
    "bool mask": Shape(s=50, t=77, mask="bool"),
    "float mask": Shape(s=50, t=77, mask="float"),
    "mask of keys": Shape(mask="keys"),
    "mask per head": Shape(mask="per head", t=65),
    "mask with turned strides": Shape(s=48, t=56, mask="turned"),
    "rows that see nothing": Shape(mask="blind"),
    "causal beside a mask": Shape(mask="bool", is_causal=True),
}


def mask_of(shape: Shape, batch: int, dtype: torch.dtype) -> Tensor | None:
    """True attends. Every kind but "blind" leaves each query a key."""
    b, h, s, t = batch, shape.h, shape.s, shape.t
    seen = torch.rand(b, 1, s, t, device="cuda") > 0.3
    seen[..., 0] = True
    match shape.mask:
        case "":
            return None
        case "bool":
            return seen
        case "float":
            return torch.randn(1, h, s, t, device="cuda", dtype=dtype)
        case "keys":
            return seen[:, :, :1]
        case "per head":
            return seen.expand(b, h, s, t) & (torch.arange(h, device="cuda") < 9)[:, None, None]
        case "turned":
            return torch.randn(b, 1, t, s, device="cuda", dtype=dtype).transpose(2, 3)
        case "window":
            return torch.ones(1, 1, s, t, device="cuda").bool().tril(t - s).triu(t - s - WINDOW + 1)
        case _:
            return seen & (torch.arange(s, device="cuda") % 7 > 0)[:, None]


def laid_out(shape: Shape, batch: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """[batch, heads, length, width] with random values, in memory as `shape.layout` says."""
    if shape.layout == "packed":
        wide = torch.randn(batch, length, shape.h, 3 * width, device="cuda", dtype=dtype)
        return wide[..., width : 2 * width].transpose(1, 2)
    if shape.layout == "odd":
        flat = torch.randn(1 + batch * shape.h * length * width, device="cuda", dtype=dtype)
        return flat[1:].view(batch, shape.h, width, length).transpose(2, 3)
    return torch.randn(batch, length, shape.h, width, device="cuda", dtype=dtype).transpose(1, 2)


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """softmax(scale q k^T + mask) v in the operands' dtype; a query that sees nothing gets zeros."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    top = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(torch.isneginf(top), 0.0))
    total = weights.sum(-1, keepdim=True)
    return (weights / total.masked_fill(total == 0.0, 1.0)) @ v


def run(attend: Callable[..., Tensor], operands: tuple[Tensor, ...], grad: Tensor) -> Results:
    """`out` and the gradients of q, k, v, in float64."""
    q, k, v = (x.detach().requires_grad_() for x in operands)
    out = attend(q, k, v)
    found = torch.autograd.grad(out, (q, k, v), grad.to(out.dtype))
    return {n: x.detach().double() for n, x in zip(("out", "q", "k", "v"), (out, *found), strict=True)}


def compare(
    attend: Callable[..., Tensor], shape: Shape, dtype: torch.dtype, note: Callable[..., None]
) -> None:
    """Against float64, with the plain formula's error in `dtype` as the measure."""
    batch, scale = 2, 1 / math.sqrt(shape.d)
    sizes = ((shape.s, shape.d), (shape.t, shape.d), (shape.t, shape.e))
    operands = tuple(laid_out(shape, batch, n, width, dtype) for n, width in sizes)
    mask = mask_of(shape, batch, dtype)
    grad = torch.randn(batch, shape.h, shape.s, shape.e, device="cuda", dtype=dtype)
    plain = lambda q, k, v: formula(q, k, v, mask, shape.is_causal, scale)
    wanted = run(plain, tuple(x.double() for x in operands), grad.double())
    rough = run(plain, operands, grad)
    got = run(lambda q, k, v: attend(q, k, v, mask, shape.is_causal, scale), operands, grad)
    errors = {name: relative_error(got[name], wanted[name]) for name in wanted}
    floor = FLOOR * torch.finfo(dtype).eps
    allowed = {name: SLACK * relative_error(rough[name], wanted[name]) + floor for name in wanted}
    note("error", ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    for name, error in errors.items():
        assert torch.isfinite(got[name]).all(), f"{name} is not finite"
        assert error <= allowed[name], (
            f"{name}: error {error:.1e}, the plain formula's bound {allowed[name]:.1e}"
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "math"])
def test_kernel_is_as_exact_as_the_formula(
    kernel: Any, dtype: str, shape: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    """The op made to run `kernel`, where the table says that it may."""
    given = SHAPES[shape]
    kind = "none" if not given.mask else "float" if given.mask in ("float", "turned") else "bool"
    case = Case("cuda", DTYPES[dtype], 2, given.h, given.s, given.t, given.d, given.e, kind, given.is_causal)
    if not may_compute(contract_of(kernel), case, chip_of(torch.device("cuda", 0))):
        pytest.skip(f"the table: {kernel} may not compute {case}")
    monkeypatch.setattr(attention_choice, "choose", lambda *_: kernel)
    attend = lambda q, k, v, *rest: torch.ops.autoshard.attention(q, k, v, *rest)[0]
    compare(attend, given, DTYPES[dtype], record_property)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_the_table_chooses_is_as_exact(
    dtype: str, shape: str, record_property: Callable[..., None]
) -> None:
    attend = lambda q, k, v, *rest: torch.ops.autoshard.attention(q, k, v, *rest)[0]
    compare(attend, SHAPES[shape], DTYPES[dtype], record_property)


@pytest.mark.parametrize("more", [0, 39, 200], ids=lambda n: f"{n} keys before")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_of_a_window_are_as_exact(dtype: str, more: int, record_property: Callable[..., None]) -> None:
    """Against a mask of all queries and keys."""
    given = Shape(s=700, t=700 + more, mask="window")
    attend = lambda q, k, v, mask, causal, scale: torch.ops.autoshard.attention(
        q, k, v, None, True, scale, WINDOW
    )[0]
    compare(attend, given, DTYPES[dtype], record_property)
