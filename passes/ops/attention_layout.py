"""Operands as a kernel's contract wants them: copied only where they lie otherwise, and checked before the call."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from cost_model.errors import UnsupportedOpError
from passes.ops.attention_table import Contract, Layout

__all__ = [
    "check_layout",
    "contiguous",
    "head_padded",
    "heads_inside",
    "meets",
    "padded_bias",
    "padded_lse",
    "prepared",
]


def heads_inside(x: Tensor) -> Tensor:
    """[b,h,s,d] with memory order b, s, h, d; a copy only where it lies otherwise."""
    return x if x.transpose(1, 2).is_contiguous() else contiguous(x.transpose(1, 2)).transpose(1, 2)


def contiguous(x: Tensor) -> Tensor:
    """`x.contiguous()`, which fakes on CUDA have not in a build of torch without it."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def meets(layout: Layout, x: Tensor, align: int) -> bool:
    """Whether `x` lies in memory as `layout` says; see `attention_table.Layout`."""
    if layout == "any" or x.numel() == 0:
        return True
    if x.storage_offset() % align:
        return False
    if layout == "packed":
        return x.is_contiguous()
    if layout == "dense":
        # The kernels check the last stride itself, also of a dim of size 1, where contiguity ignores it.
        return x.transpose(1, 2).is_contiguous() and x.stride(-1) == 1
    others = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.stride(-1) == 1 and all(stride % align == 0 for stride in others)


def prepared(row: Contract, name: str, x: Tensor) -> Tensor:
    """Operand `name` as the kernel of `row` takes it: `x` itself, or one copy. Head dims are padded already."""
    layout = row.layouts.get(name, "any")
    if not meets(layout, x, row.align):
        x = _copied(layout, x)
    check_layout(row, name, x)
    return x


def _copied(layout: Layout, x: Tensor) -> Tensor:
    """A fresh tensor: `contiguous` would return an `x` that is contiguous at an odd address."""
    if layout == "packed":
        return x.clone(memory_format=torch.contiguous_format)
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def check_layout(row: Contract, name: str, x: Tensor) -> None:
    """Raise UnsupportedOpError for an operand that the kernel of `row` would refuse, or read wrongly, on the device."""
    layout = row.layouts.get(name, "any")
    if meets(layout, x, row.align):
        return
    raise UnsupportedOpError(
        f"attention by {row.kernel}: {name} of shape {list(x.shape)} has strides {list(x.stride())} and starts at "
        f"element {x.storage_offset()}; the kernel reads {layout!r} in vectors of {row.align}\n"
        f"  try: {name}.contiguous(), with a last dim that is a multiple of {row.align}"
    )


def head_padded(row: Contract, x: Tensor) -> Tensor:
    """Zero columns change neither q k^T nor the columns of out that are kept. The copy has heads inside."""
    missing = -x.shape[-1] % row.head_multiple
    return F.pad(x.transpose(1, 2), (0, missing)).transpose(1, 2) if missing else x


def padded_bias(row: Contract, bias: Tensor, keys: int) -> Tensor:
    """An additive bias [b or 1, h or 1, s or 1, t or 1] with rows of all `keys`, at aligned addresses.

    Dims of size 1 stay so: the caller expands them with stride 0, which is aligned, and nothing is written out.
    """
    bias = bias.expand(*bias.shape[:-1], keys)
    missing = -keys % row.align
    if missing:
        bias = F.pad(bias, (0, missing)).narrow(-1, 0, keys)
    return prepared(row, "bias", bias)


def padded_lse(row: Contract, lse: Tensor) -> Tensor:
    """Rows of whole blocks. exp(score - inf) = 0 in the padding, as the forward kernel leaves it."""
    missing = -lse.shape[-1] % row.lse_multiple
    return prepared(row, "lse", F.pad(lse, (0, missing), value=math.inf) if missing else lse)
