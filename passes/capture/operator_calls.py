"""Calls of torch's functions that our operators take: attention, products of groups, circular padding, CTC loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cost_model.errors import UnsupportedOpError
from passes.capture.device_view import cast_to
from passes.capture.row_dims import attended
from passes.capture.row_index import mask_key
from passes.capture.row_values import counted, settled
from passes.capture.rows import Rows, RowsUnknown, rows_in, unknown
from passes.ir.torch_tracing import grouped_mm_functions
from passes.ops.attention_choice import expand_heads
from passes.ops.attention_op import attention
from passes.ops.layer_ops import circular_pad
from passes.ops.layer_ops import ctc_loss as op
from passes.ops.routed_ops import routed_mm, routed_outer


def attention_for(device_type: str) -> Callable[..., Tensor]:
    """What is called in the place of `F.scaled_dot_product_attention`. Under autocast of `device_type` the operands are
    cast to its dtype, as torch's own function does."""

    def answer(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled(device_type):
            args, kwargs = cast_to(torch.get_autocast_dtype(device_type), args, kwargs)
        return scaled_dot_product(*args, **kwargs)

    return answer


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The same arguments and result as `torch.nn.functional.scaled_dot_product_attention`."""
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: attn_mask and is_causal=True exclude each other")
    if rows_in((query, key, value, attn_mask)):
        query, key, value, attn_mask = settled((query, key, value, attn_mask))
        attend = partial(scaled_dot_product, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
        try:
            return attended(attend, query, key, value, attn_mask, is_causal)
        except RowsUnknown as error:
            query, key, value, attn_mask = counted((query, key, value, attn_mask), error)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        key, value = (expand_heads(x, query.shape[-3]) for x in (key, value))
    mask_is_learned = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    same_batch = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if dropout_p > 0.0 or mask_is_learned or not same_batch:
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return _fused(query, key, value, attn_mask, is_causal, scale)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """By the op, with what precedes the last three dims made one batch dim."""
    lead = q.shape[:-2]

    def four(x: Tensor) -> Tensor:
        if x.dim() == 4:
            return x
        if x.dim() < 4:
            return x.reshape(*(1,) * (4 - x.dim()), *x.shape)
        return x.flatten(0, x.dim() - 4)

    if mask is not None and q.dim() > 4 and mask.dim() > 3:
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    mask = None if mask is None else four(mask)
    out, _ = attention(four(q), four(k), four(v), mask, is_causal, scale)
    return out if q.dim() == 4 else out.reshape(*lead, *out.shape[-2:])


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    """softmax(scale q k^T + mask), dropout, v: for dropout, learned masks and broadcast batches."""
    scores = torch.matmul(q * scale, k.transpose(-2, -1))
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p, training=True)
    return torch.matmul(weights, v)


def grouped_functions() -> list[Any]:
    """`F.grouped_mm` calls the first of them; Transformers calls its own op, which is opaque, for dtypes that torch's
    fakes do not take."""
    theirs = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return [*grouped_mm_functions(), *([] if theirs is None else [theirs, theirs.default])]


class GroupedAsCaptured(TorchFunctionMode):
    """Inside, grouped products for which torch has no kernel (of float64) are computed as they are captured."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in grouped_mm_functions():
            return func(*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            return grouped_product(*args, **(kwargs or {}))


def grouped_product(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same arguments as `torch.nn.functional.grouped_mm`; rows and columns in no group are 0.

    Raises UnsupportedOpError for a bias or another result dtype, which torch's own kernels refuse too.
    """
    if bias is not None:
        raise UnsupportedOpError("grouped_mm: a bias is not supported\n  try: add it to the result")
    if out_dtype is not None and out_dtype != mat_a.dtype:
        raise UnsupportedOpError(
            f"grouped_mm: out_dtype={out_dtype} of operands of {mat_a.dtype} is not supported\n"
            f"  try: grouped_mm(...).to({out_dtype})"
        )
    if mat_a.ndim == 3 and mat_b.ndim == 3:
        return torch.bmm(mat_a, mat_b)
    if offs is None:
        raise UnsupportedOpError(
            f"grouped_mm: operands of {mat_a.ndim} and {mat_b.ndim} dims without offs\n  try: offs, the ends of groups"
        )
    groups = (0, offs.shape[0])
    if mat_a.ndim == 3:
        return routed_mm(mat_b.t(), mat_a.transpose(1, 2), _ids_of(mat_b.t(), offs), *groups).t()
    if mat_b.ndim == 3:
        return routed_mm(mat_a, mat_b, _ids_of(mat_a, offs), *groups)
    return routed_outer(mat_a.t(), mat_b, _ids_of(mat_b, offs), *groups)


def _ids_of(rows: Tensor, offs: Tensor) -> Tensor:
    """The group that each row is in, which is none from the last end on."""
    return torch.bucketize(torch.arange(rows.shape[0], device=offs.device), offs, right=True)


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """The same arguments and result as `torch.nn.functional.pad`."""
    if mode != "circular":
        return F.pad(input, pad, mode, value)
    return _circular(input, [int(n) for n in pad], value)


def _circular(x: Tensor, pads: list[int], value: float | None) -> Tensor:
    """Torch's own checks. A negative amount cuts before anything is copied, and may not leave less than the other
    side of the dim needs."""
    if value is not None and value != 0:
        raise RuntimeError('Padding mode "circular" doesn\'t take in value argument')
    if len(pads) % 2 or len(pads) // 2 + 2 != x.ndim or not 1 <= len(pads) // 2 <= 3:
        raise RuntimeError(
            f"circular padding of {2 * (x.ndim - 2)} amounts, a batch and channels aside, is due for "
            f"{x.ndim} dims; got {len(pads)}"
        )
    cut = torch.ops.aten.constant_pad_nd.default(x, [min(0, n) for n in pads], 0) if min(pads) < 0 else x
    pads = [max(0, n) for n in pads]
    for i, amount in enumerate(pads):
        if amount > cut.shape[x.ndim - 1 - i // 2]:
            raise RuntimeError("Padding value causes wrapping around more than once.")
    return circular_pad(cut, pads) if any(pads) else cut.clone()


def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The same arguments and result as `torch.nn.functional.multilabel_margin_loss`; what torch itself traces counts
    labels behind the first -1 as label 0 (torch 2.13)."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if target.shape != input.shape or input.dim() not in (1, 2) or reduction not in _REDUCTIONS:
        shapes = f"{list(target.shape)} for input of {list(input.shape)}"
        raise ValueError(f"multilabel_margin_loss: target of shape {shapes}, reduction={reduction!r}")
    given = (target < 0).cumsum(-1) == 0
    labels = torch.where(given, target, 0)
    right = F.one_hot(labels, input.shape[-1]).mul(given.unsqueeze(-1)).sum(-2) > 0
    over = torch.relu(1 - input.gather(-1, labels).unsqueeze(-1) + input.unsqueeze(-2))
    counts = given.unsqueeze(-1) & ~right.unsqueeze(-2)
    each = torch.where(counts, over, 0.0).sum((-2, -1)) / input.shape[-1]
    return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()


_REDUCTIONS = ("none", "mean", "sum")


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The same arguments and result as `torch.nn.functional.ctc_loss`, and as `torch.ctc_loss`."""
    if isinstance(reduction, int):
        reduction = _REDUCTIONS[reduction]
    for rows in rows_in((log_probs, input_lengths, target_lengths)):
        raise unknown("ctc_loss", rows.choice)
    if reduction not in _REDUCTIONS or log_probs.dim() not in (2, 3) or not 0 <= blank < log_probs.shape[-1]:
        shape = list(log_probs.shape)
        raise ValueError(f"ctc_loss: log_probs of shape {shape}, reduction={reduction!r}, blank={blank}")
    probs = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    inputs, lengths = (_lengths(given, probs.shape[1]) for given in (input_lengths, target_lengths))
    padded, read = _padded(targets, lengths, probs)
    each = op(probs, padded, inputs, read, blank, zero_infinity)
    if zero_infinity:
        each = torch.where(each == float("inf"), 0.0, each)
    if reduction == "mean":
        return (each / lengths.clamp(min=1)).mean()
    if reduction == "sum":
        return each.sum()
    return each if log_probs.dim() == 3 else each.squeeze(0)


def _lengths(given: Any, count: int) -> Tensor:
    lengths = given if isinstance(given, Tensor) else torch.tensor(given)
    if lengths.is_floating_point() or lengths.numel() != count:
        raise ValueError(f"ctc_loss: lengths must be {count} integers, one for each sequence")
    return lengths if lengths.shape == (count,) else lengths.reshape(count)


def _padded(targets: Tensor, lengths: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Targets [n, s], and how many of each row are read."""
    steps, count = probs.shape[:2]
    if not isinstance(targets, Rows):
        if targets.dim() == 2 or count == 1:
            return targets.reshape(count, -1), lengths
        _check(lengths, targets.numel())
        return _cut(targets, lengths, steps)
    choice = targets.choice
    flat, valid = targets.padded, choice.valid
    if flat.dim() != 1:
        raise unknown("ctc_loss", choice)
    if len(choice.shape) == 2 and choice.shape[0] == count and _counts(lengths, choice.key):
        return _in_front(flat.reshape(choice.shape), valid.reshape(choice.shape)), lengths
    _check(lengths, valid.sum())
    return _cut(_in_front(flat, valid), lengths, steps)


def _counts(lengths: Tensor, chosen: Any) -> bool:
    """Whether they are known to be how many of each row the mask of [n, s] has chosen."""
    return mask_key(lengths) in (("sum", 0, chosen, "-1"), ("sum", 0, chosen, "1"))


def _in_front(x: Tensor, chosen: Tensor) -> Tensor:
    """Those that are chosen, in their order, before the others, along the last dim."""
    return x.gather(-1, chosen.logical_not().to(torch.uint8).argsort(dim=-1, stable=True))


def _check(lengths: Tensor, given: Any) -> None:
    if lengths.sum() != given:
        raise RuntimeError(
            "ctc_loss: target_lengths do not add up to the number of targets, which are in a row"
        )


def _cut(targets: Tensor, lengths: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """A row of targets as one for each sequence. With more of them than steps the loss is infinite, of however many."""
    most = min(targets.shape[0], steps + 1)
    places = (lengths.cumsum(0) - lengths).unsqueeze(1) + torch.arange(most)
    padded = F.pad(targets, (0, 1))[places.clamp(0, targets.shape[0])]
    return padded, lengths.clamp(max=most)
