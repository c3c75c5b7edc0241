"""`autoshard::attention` and its gradient: scaled dot-product attention, the same op on every device; where a query
sees the keys of its own document, in blocks.

A plan names ops; torch's own attention kernels have other names on CPU and CUDA, so a plan made
on a laptop would not be valid on a GPU. This op picks the kernel when it runs.

    attention(q [b,h,s,d], k [b,g,t,d], v [b,g,t,e], mask?, is_causal, scale, window, documents?, of_keys?)
    -> (out [b,h,s,e], lse [b,h,s])

g divides h: grouped heads, of which each of keys and values is seen by h / g next to each other of queries.
mask: 4-d, broadcastable to [b,h,s,t]; bool (True attends) or additive float; it gets no gradient.
is_causal: query i sees keys 0..i (aligned at the top left, also when s != t).
window: 0, or of how many keys a causal query sees the last ones: key i + t - s, and those before it. The last query
sees the last key, so a part of the queries is the same op of the keys that these see.
documents, of_keys: [b,1,s,1] and [b,1,t,1], numbers of any kind: a query sees the keys with the same one, in place of
a mask that says so. Either may have one row for all samples.
lse: float32 (float64 for float64 operands). `out` and the gradients lie in memory as [b,s,h,d]:
that is how the fused kernels write them, and what the projection after them reads.

    12 queries and keys of documents 0 0 0 0 0 1 1 1 1 2 2 2, causal, blocks of 4
    queries 0 to 3, keys 0 to 3        queries 4 to 7, keys 0 to 7        queries 8 to 11, keys 0 to 11

Numbers of documents are values, so what other documents' keys would be is computed, and hidden by the block's mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cost_model.errors import UnsupportedOpError
from passes.ops.attention_choice import (
    AttentionCall,
    additive_mask,
    empty,
    expand_heads,
    lse_dtype,
    math_backward,
    math_forward,
    sum_heads,
)
from passes.ops.attention_table import Chip, Contract, Kernel, contiguous, contract_of, heads_inside, prepared
from passes.ops.attention_window import Attend, joined, placed, windowed_backward, windowed_forward
from passes.ops.registration import differentiable_operator

_LEAST_BLOCK, _MOST_BLOCKS = 1024, 32
"""Queries of a block, and blocks: each is a call."""


def documents_forward(p: AttentionCall, attend: Attend) -> tuple[Tensor, Tensor]:
    """(out, lse). attend: the same of a call with a mask. lse of a query that sees no key: the least number."""
    found: list[tuple[Tensor, Tensor]] = []
    for block, _ in _blocks(p):
        out, lse = attend(block)
        assert block.mask is not None
        found.append((out, lse.where(block.mask.any(-1), torch.finfo(lse.dtype).min)))
    out, lse = (joined(*parts) for parts in zip(*found, strict=True))
    return out, lse


def documents_backward(
    p: AttentionCall, attend: Attend, *of_queries: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (q, k, v). of_queries: what else the backward reads, `attend` after the call with a mask."""
    queries: list[Tensor] = []
    total: list[Tensor] = []
    for block, begin in _blocks(p):
        gq, *of_keys = attend(block, *(x.narrow(2, begin, block.q.shape[2]) for x in of_queries))
        queries.append(gq)
        wide = [placed(x, 0, p.k.shape[2]).to(of_queries[-1].dtype) for x in of_keys]
        total = [a + b for a, b in zip(total, wide, strict=True)] if total else wide
    gk, gv = (x.to(p.k.dtype) for x in total)
    return joined(*queries), gk, gv


def _blocks(p: AttentionCall) -> Iterator[tuple[AttentionCall, int]]:
    """With masks, and the first query of each."""
    documents, of_keys = p.documents, p.of_keys
    assert documents is not None and of_keys is not None
    size = max(_LEAST_BLOCK, -(-p.q.shape[2] // _MOST_BLOCKS))
    for begin in range(0, p.q.shape[2], size):
        count = min(size, p.q.shape[2] - begin)
        keys = min(begin + count, p.k.shape[2]) if p.is_causal else p.k.shape[2]
        seen = documents.narrow(2, begin, count) == of_keys.narrow(2, 0, keys).transpose(2, 3)
        if p.is_causal:
            seen = seen.tril(begin)
        parts = {"q": p.q.narrow(2, begin, count), "k": p.k.narrow(2, 0, keys), "v": p.v.narrow(2, 0, keys)}
        yield replace(p, **parts, mask=seen, is_causal=False, documents=None, of_keys=None), begin


aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]


def forward(p: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out [b,h,s,e], lse [b,h,s]). Raises UnsupportedOpError for operands that no kernel takes."""
    _check_problem(p)
    kernel = p.kernel
    if p.window and kernel != "empty":
        return windowed_forward(p, forward)
    if p.documents is not None and kernel != "empty":
        return documents_forward(p, forward)
    p = _head_by_head(p, kernel)
    if kernel in _PLAIN:
        return _PLAIN[kernel][0](p)
    row = contract_of(kernel)
    out, lse = _FUSED[kernel][0](p, row, *_taken(row, q=p.q, k=p.k, v=p.v))
    return _columns(out, p.v.shape[-1]), lse


def backward(p: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Gradients of (q, k, v). Raises UnsupportedOpError for operands that no kernel takes."""
    _check_problem(p, grad_out=grad_out, out=out, lse=lse)
    kernel, groups = p.kernel, p.k.shape[1]
    if p.window and kernel != "empty":
        return windowed_backward(p, backward, grad_out, out, lse)
    if p.documents is not None and kernel != "empty":
        return documents_backward(p, backward, grad_out, out, lse)
    p = _head_by_head(p, kernel)
    if kernel in _PLAIN:
        gq, gk, gv = _PLAIN[kernel][1](p, grad_out, out, lse)
    else:
        row = contract_of(kernel)
        operands = _taken(row, grad_out=grad_out, q=p.q, k=p.k, v=p.v, out=out)
        gq, gk, gv = _FUSED[kernel][1](p, row, *operands, lse)
    d, e = p.q.shape[-1], p.v.shape[-1]
    return _columns(gq, d), sum_heads(_columns(gk, d), groups), sum_heads(_columns(gv, e), groups)


def _head_by_head(p: AttentionCall, kernel: Kernel) -> AttentionCall:
    """With as many heads of keys as of queries, for a kernel that asks for that."""
    if p.repeats == 1 or kernel == "empty" or contract_of(kernel).grouped_heads:
        return p
    heads = p.q.shape[1]
    return replace(p, k=expand_heads(p.k, heads), v=expand_heads(p.v, heads))


def _nothing_backward(p: AttentionCall, *_: Tensor) -> Gradients:
    return torch.zeros_like(p.q), torch.zeros_like(p.k), torch.zeros_like(p.v)


def _taken(row: Contract, **operands: Tensor) -> tuple[Tensor, ...]:
    """Operands with a head dim, padded and laid out for the kernel of `row`."""
    return tuple(prepared(row, name, _head_padded(row, x)) for name, x in operands.items())


def _columns(x: Tensor, count: int) -> Tensor:
    # `narrow`: an index would ask for the device, which fakes on CUDA have not in a build without it.
    return x if x.shape[-1] == count else x.narrow(-1, 0, count)


def _cpu_bias(p: AttentionCall, row: Contract) -> Tensor | None:
    return None if p.mask is None else prepared(row, "bias", additive_mask(p.mask, p.q.dtype))


def _cpu_flash(p: AttentionCall, row: Contract, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, p.is_causal, attn_mask=_cpu_bias(p, row), scale=p.scale
    )


def _cpu_flash_backward(p: AttentionCall, row: Contract, *operands: Tensor) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *operands, 0.0, p.is_causal, attn_mask=_cpu_bias(p, row), scale=p.scale
    )


def _cudnn(p: AttentionCall, row: Contract, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, p.is_causal, scale=p.scale
    )
    return out, lse.squeeze(-1)


def _cudnn_backward(
    p: AttentionCall, row: Contract, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    stats = prepared(row, "lse", lse).unsqueeze(-1)
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, stats, *_unread_seeds(q, torch.int64), None, None, None, q.shape[2], k.shape[2], 0.0,
        p.is_causal, scale=p.scale,
    )  # fmt: skip


def _unread_seeds(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What kernels read with dropout only. Of one dim: for a scalar Inductor launches a kernel that writes it."""
    return like.new_empty((2,), dtype=dtype), like.new_empty((1,), dtype=dtype)


def _flash(p: AttentionCall, row: Contract, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, p.is_causal, False, scale=p.scale)[:2]


def _flash_backward(
    p: AttentionCall, row: Contract, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, _padded_lse(row, lse), None, None, q.shape[2], k.shape[2], 0.0, p.is_causal,
        *_unread_seeds(q, torch.uint64), scale=p.scale,
    )  # fmt: skip


def _bias(p: AttentionCall, row: Contract) -> Tensor | None:
    """At full shape [b,h,s,t], as the backward demands; what is broadcast has stride 0."""
    if p.mask is None:
        return None
    b, h, s, t = p.q.shape[0], p.q.shape[1], p.q.shape[2], p.k.shape[2]
    return _padded_bias(row, additive_mask(p.mask, p.q.dtype), t).expand(b, h, s, t)


def _efficient(p: AttentionCall, row: Contract, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _bias(p, row), True, 0.0, p.is_causal, scale=p.scale
    )
    return out, _columns(lse, q.shape[2])


def _efficient_backward(
    p: AttentionCall, row: Contract, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    return aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _bias(p, row), out, _padded_lse(row, lse), *_unread_seeds(q, torch.int64), 0.0,
        [True, True, True, False], p.is_causal, scale=p.scale,
    )[:3]  # fmt: skip


Kernels = Mapping[Kernel, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Gradients]]]
"""Forward and backward."""
_PLAIN: Kernels = {"empty": (empty, _nothing_backward), "math": (math_forward, math_backward)}
_FUSED: Kernels = {
    "cpu_flash": (_cpu_flash, _cpu_flash_backward),
    "cudnn": (_cudnn, _cudnn_backward),
    "flash": (_flash, _flash_backward),
    "efficient": (_efficient, _efficient_backward),
}
"""These get the contract's row, and operands padded and laid out as it says."""


def _empty_heads_inside(x: Tensor, width: int) -> Tensor:
    b, h, s, _ = x.shape
    return x.new_empty((b, s, h, width)).transpose(1, 2)


def attention_reference(*operands: Any, chip: Chip | None = None) -> tuple[Tensor, Tensor]:
    """What `autoshard::attention` computes, in ATen ops: one of torch's kernels, or plain math.

    chip: of the CUDA device that it will run on; None: q's device is asked.
    Raises UnsupportedOpError for operands that break the kernel's contract.
    """
    out, lse = forward(AttentionCall(*operands, chip=chip))
    return heads_inside(out), contiguous(lse)


def attention_backward_reference(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, *flags: Any,
    chip: Chip | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What `autoshard::attention_backward` computes, in ATen ops; as `attention_reference`."""
    gq, gk, gv = backward(AttentionCall(q, k, v, mask, *flags, chip=chip), grad_out, out, lse)
    return heads_inside(gq), heads_inside(gk), heads_inside(gv)


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? mask"
_FLAGS = "bool is_causal, float scale, int window=0, Tensor? documents=None, Tensor? of_keys=None"
attention = differentiable_operator(
    f"attention({_OPERANDS}, {_FLAGS}) -> (Tensor, Tensor)",
    attention_reference,
    lambda q, k, v, *rest: (
        _empty_heads_inside(q, v.shape[-1]),
        q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype)),
    ),
)
"""softmax(scale * q k^T + mask) v and the softmax's log-sum-exp; see the module."""
attention_backward = differentiable_operator(
    f"attention_backward(Tensor grad_out, {_OPERANDS}, Tensor out, Tensor lse, {_FLAGS}) -> (Tensor, Tensor, Tensor)",
    attention_backward_reference,
    lambda grad_out, q, k, v, *rest: tuple(_empty_heads_inside(x, x.shape[-1]) for x in (q, k, v)),
)
"""Gradients of `attention`'s `out` with respect to (q, k, v)."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, *flags = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, out, lse)
    ctx.flags, ctx.count = flags, len(inputs)


def _gradient(ctx: Any, grad_out: Tensor | None, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * ctx.count
    q, k, v, mask, out, lse = ctx.saved_tensors
    gq, gk, gv = attention_backward(grad_out, q, k, v, mask, out, lse, *ctx.flags)
    return gq, gk, gv, *(None,) * (ctx.count - 3)


attention.register_autograd(_gradient, setup_context=_setup_context)


def _head_padded(row: Contract, x: Tensor) -> Tensor:
    """Zero columns change neither q k^T nor the columns of out that are kept. The copy has heads inside."""
    missing = -x.shape[-1] % row.head_multiple
    return F.pad(x.transpose(1, 2), (0, missing)).transpose(1, 2) if missing else x


def _padded_bias(row: Contract, bias: Tensor, keys: int) -> Tensor:
    """An additive bias [b or 1, h or 1, s or 1, t or 1] with rows of all `keys`, at aligned addresses.

    Dims of size 1 stay so: the caller expands them with stride 0, which is aligned, and nothing is written out.
    """
    bias = bias.expand(*bias.shape[:-1], keys)
    missing = -keys % row.align
    if missing:
        bias = F.pad(bias, (0, missing)).narrow(-1, 0, keys)
    return prepared(row, "bias", bias)


def _padded_lse(row: Contract, lse: Tensor) -> Tensor:
    """Rows of whole blocks. exp(score - inf) = 0 in the padding, as the forward kernel leaves it."""
    missing = -lse.shape[-1] % row.lse_multiple
    return prepared(row, "lse", F.pad(lse, (0, missing), value=math.inf) if missing else lse)


def _check_problem(p: AttentionCall, **rest: Tensor) -> None:
    """Raise UnsupportedOpError, naming kernel, operand and a remedy, for operands that no kernel could take together.

    rest: out, grad_out, lse of a backward.
    """
    b, h, s, d = p.q.shape
    g, t, e = p.k.shape[1], p.k.shape[2], p.v.shape[3]
    if h != g * p.repeats:
        _refuse(p, "k", f"has {g} heads, and q {h}", "as many heads of q for each of k")
    wide = torch.float64 if p.q.dtype == torch.float64 else torch.float32
    expected: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype]] = {
        "k": (p.k, (b, g, t, d), p.q.dtype),
        "v": (p.v, (b, g, t, e), p.q.dtype),
    }
    for name, value in rest.items():
        shape = (b, h, s) if name == "lse" else (b, h, s, e)
        expected[name] = (value, shape, wide if name == "lse" else p.q.dtype)
    for name, (value, shape, dtype) in expected.items():
        if value.device != p.q.device:
            _refuse(p, name, f"is on {value.device}, q on {p.q.device}", f"{name} on the device of q")
        if value.dtype != dtype:
            _refuse(p, name, f"is {value.dtype}, and q {p.q.dtype}", f"{name}.to({dtype})")
        if tuple(value.shape) != shape:
            _refuse(p, name, f"is {list(value.shape)}, not {list(shape)}", "operands [b, h, s, d] that agree")
    if p.mask is not None:
        _check_mask(p, p.mask, (b, h, s, t))
    for name, value, length in (("documents", p.documents, s), ("of_keys", p.of_keys, t)):
        alone = p.documents is None or p.of_keys is None or p.mask is not None or p.window
        if value is not None and (alone or tuple(value.shape) not in ((1, 1, length, 1), (b, 1, length, 1))):
            what = f"is {list(value.shape)}, for {length}, and goes with the other's, no mask and no window"
            _refuse(p, name, what, "documents written into the mask")
    if p.window and (p.mask is not None or not p.is_causal or t < s):
        what = f"of {p.window} is for {s} causal queries, of as many keys or more, without a mask"
        _refuse(p, "window", what, "the window written into the mask")


def _check_mask(p: AttentionCall, mask: Tensor, scores: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        _refuse(p, "mask", f"is {mask.dtype}", "a bool mask (True attends), or a float one that is added")
    if mask.device != p.q.device:
        _refuse(p, "mask", f"is on {mask.device}, q on {p.q.device}", "the mask on the device of q")
    fits = mask.ndim == 4 and all(n in (1, m) for n, m in zip(mask.shape, scores, strict=True))
    if not fits:
        _refuse(p, "mask", f"is {list(mask.shape)}", f"a shape that broadcasts to {list(scores)}")


def _refuse(p: AttentionCall, name: str, what: str, remedy: str) -> None:
    raise UnsupportedOpError(f"attention by {p.kernel}: {name} {what}\n  try: {remedy}")
