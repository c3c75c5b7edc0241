"""Which kernel computes one attention: a function of its operands and the chip, of nothing else.

Forward and backward see the same q, k, v and mask, and all ranks the same kind of chip, so all agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cost_model.errors import UnsupportedOpError
from passes.ops.attention_table import TABLE, Chip, Contract, Kernel, MaskKind


@dataclass(frozen=True)
class AttentionCall:
    """Operands of one attention. q [b,h,s,d], k [b,g,t,d], v [b,g,t,e], mask 4-d or None.

    window: how many keys a causal query sees; 0: all before it. Of the call in blocks (`attention_window`).
    documents, of_keys: [b or 1, 1, s, 1] and [b or 1, 1, t, 1]: keys that are not of a query's document are not seen.
    chip: of the device that it will run on; None: the chip of q's device is asked for where it matters.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    window: int = 0
    documents: Tensor | None = None
    of_keys: Tensor | None = None
    chip: Chip | None = None

    @property
    def repeats(self) -> int:
        """Heads of queries for each of keys."""
        heads, groups = self.q.shape[1], self.k.shape[1]
        return heads // groups if groups else 1

    @property
    def case(self) -> Case:
        b, h, s, d = self.q.shape
        mask: MaskKind = "none" if self.mask is None else "bool" if self.mask.dtype == torch.bool else "float"
        sizes = (b, h, s, self.k.shape[2], d, self.v.shape[3])
        return Case(self.q.device.type, self.q.dtype, *sizes, mask, self.is_causal)

    @property
    def kernel(self) -> Kernel:
        chip = self.chip
        if chip is None and self.q.device.type == "cuda":
            chip = chip_of(self.q.device)
        return choose(self.case, chip)


@dataclass(frozen=True)
class Case:
    """What of a call decides. Sizes: batch, heads, queries, keys, head size of q and k, head size of v."""

    device: str
    dtype: torch.dtype
    b: int
    h: int
    s: int
    t: int
    d: int
    e: int
    mask: MaskKind = "none"
    is_causal: bool = False


def chip_of(device: torch.device) -> Chip:
    """Of a CUDA device of this machine. UnsupportedOpError where there is none to ask."""
    if not torch.cuda.is_available():
        raise UnsupportedOpError(
            f"attention on {device}: its compute capability, which decides the kernel, is not known on a machine "
            "without CUDA\n  try: chip=Chip((9, 0)), the device that the graph is for"
        )
    hip = torch.version.hip is not None
    # cuDNN has no deterministic backward, and torch's own choice passes it over just so.
    refused = hip or torch.are_deterministic_algorithms_enabled()
    cudnn = 0 if refused else torch.backends.cudnn.version() or 0
    return Chip(torch.cuda.get_device_capability(device), hip, cudnn)


def choose(case: Case, chip: Chip | None) -> Kernel:
    """The first kernel of the table whose contract the call meets. chip: None for devices other than CUDA's."""
    if 0 in (case.b, case.h, case.s, case.t, case.d, case.e):
        return "empty"
    for row in TABLE:
        if may_compute(row, case, chip):
            return row.kernel
    return "math"


def may_compute(row: Contract, case: Case, chip: Chip | None) -> bool:
    """Whether the kernel of `row` may compute `case`."""
    if row.device not in ("any", case.device) or case.dtype not in row.dtypes or case.mask not in row.masks:
        return False
    if row.device == "cuda" and (chip is None or not _runs_on(row, case, chip)):
        return False
    if case.is_causal and case.mask != "none" and not row.causal_masked:
        return False
    if case.is_causal and case.s != case.t and not row.causal_unequal:
        return False
    if min(case.s, case.t) < row.least_length or (row.equal_heads and case.d != case.e):
        return False
    if row.largest_head is not None and _head(row, case) > row.largest_head:
        return False
    return row.largest_grid is None or max(case.b, case.h) <= row.largest_grid


def _runs_on(row: Contract, case: Case, chip: Chip) -> bool:
    assert row.capabilities is not None
    least = row.dtypes[case.dtype]
    if chip.hip or not row.capabilities[0] <= chip.capability <= row.capabilities[1]:
        return False
    if row.cudnn is not None and not row.cudnn[0] <= chip.cudnn <= row.cudnn[1]:
        return False
    if least is not None and chip.capability < least:
        return False
    head = _head(row, case)
    return not any(
        first <= chip.capability <= last and low <= head <= high
        for first, last, low, high in row.refused_heads
    )


def _head(row: Contract, case: Case) -> int:
    return padded_head(row, max(case.d, case.e))


def padded_head(row: Contract, size: int) -> int:
    return -(-size // row.head_multiple) * row.head_multiple


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive bias of `dtype`: False becomes -inf."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    seen, hidden = (torch.full((), value, dtype=dtype, device=mask.device) for value in (0.0, -math.inf))
    return torch.where(mask, seen, hidden)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[..., g, t, d] -> [..., heads, t, d]: each head `heads // g` times, next to each other."""
    groups = x.shape[-3]
    if groups == heads:
        return x
    wide = x.unsqueeze(-3).expand(*x.shape[:-2], heads // groups, *x.shape[-2:])
    return wide.reshape(*x.shape[:-3], heads, *x.shape[-2:])


def sum_heads(grad: Tensor, groups: int) -> Tensor:
    """The gradient of what was expanded, [b, g, t, d], of that of what it was expanded to."""
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2)


def empty(p: AttentionCall) -> tuple[Tensor, Tensor]:
    """A shard without queries or keys: nothing to attend to gives zeros, and log(0) as lse."""
    b, h, s, _ = p.q.shape
    lse = p.q.new_full((b, h, s), -math.inf, dtype=lse_dtype(p.q.dtype))
    return p.q.new_zeros((b, h, s, p.v.shape[-1])), lse


def _scores(p: AttentionCall) -> Tensor:
    """[b,h,s,t] scale * q k^T + mask, accumulated in at least float32."""
    work = lse_dtype(p.q.dtype)
    scores = (p.q.to(work) * p.scale) @ p.k.to(work).transpose(-1, -2)
    if p.mask is not None:
        scores = scores + additive_mask(p.mask, work)
    if p.is_causal:
        s, t = scores.shape[-2:]
        future = torch.ones(s, t, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); rows that see no key (lse = -inf) are zero rather than NaN."""
    blind = torch.isneginf(lse).unsqueeze(-1)
    return torch.exp(scores - lse.unsqueeze(-1)).masked_fill(blind, 0.0)


def math_forward(p: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out [b,h,s,e], lse [b,h,s])."""
    scores = _scores(p)
    lse = torch.logsumexp(scores, -1)
    out = _probabilities(scores, lse) @ p.v.to(scores.dtype)
    return out.to(p.q.dtype), lse


def math_backward(
    p: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dP = dO V^T, dS = P * (dP - rowsum(dO * O)); the softmax's Jacobian. [FlashAttention, app. B]"""
    weights = _probabilities(_scores(p), lse)
    work = weights.dtype
    grad, q, k, v = (x.to(work) for x in (grad_out, p.q, p.k, p.v))
    delta = (grad * out.to(work)).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ v.transpose(-1, -2) - delta)
    gq = grad_scores @ k * p.scale
    gk = grad_scores.transpose(-1, -2) @ q * p.scale
    gv = weights.transpose(-1, -2) @ grad
    return gq.to(p.q.dtype), gk.to(p.k.dtype), gv.to(p.v.dtype)
