"""torch's attention kernels and what each requires: the choice of a kernel and every check read this table.

Facts are those of torch 2.13 (`sdp_utils.cpp`, `attention.cu`, `attention_backward.cu`, `flash_api.cpp`, the
headers of `mem_eff_attention`), and docs/attention.md says where each is found. No kernel drops out here: capture
writes dropout as plain math with our own counters, which a kernel's own generator could not repeat on another mesh.
Where a kernel takes no grouped heads, keys and values are written out head by head for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from cost_model.errors import UnsupportedOpError

Kernel = Literal["empty", "cudnn", "flash", "efficient", "cpu_flash", "math"]

MaskKind = Literal["none", "bool", "float"]

Capability = tuple[int, int]
"""Compute capability, (major, minor)."""

Layout = Literal["rows", "dense", "packed", "any"]
"""How an operand of [b, h, s, d] must lie in memory.

rows:   the last dim has stride 1; every other stride (of a dim longer than 1) and the start are multiples of the
        kernel's `align`, so that rows are read as whole vectors. Stride 0 is one of them.
dense:  contiguous as [b, s, h, d], and the start aligned.
packed: contiguous as it is."""


@dataclass(frozen=True)
class Chip:
    """What the choice needs to know of a CUDA device. hip: an AMD device, whose kernels are others. cudnn: the version
    of cuDNN that may be asked for attention, as it counts them (91900 is 9.19); 0: none."""

    capability: Capability
    hip: bool = False
    cudnn: int = 0


@dataclass(frozen=True)
class Contract:
    """device:          type of device; "any" for plain math.
    dtypes:          of q, k, v alike, each with the least compute capability that has it (None on CPUs).
    capabilities:    lowest and highest compute capability, inclusive.
    cudnn:           lowest and highest version of cuDNN, inclusive; None: it is no kernel of cuDNN.
    largest_head:    of the padded head sizes; None: no limit.
    head_multiple:   q, k and v are padded with zero columns to head sizes of this multiple.
    least_length:    of queries and of keys.
    equal_heads:     whether v must have the head size of q.
    refused_heads:   (capability from, to, padded head size from, to), inclusive, where the backward cannot run.
    masks:           kinds that it takes.
    causal_unequal:  whether causal means the same with unequal lengths: aligned at the top left.
    causal_masked:   whether it takes a mask and causality together.
    grouped_heads:   whether k and v may have fewer heads than q.
    largest_grid:    of batch and of heads, which are dims of the launch grid; None: no limit.
    align:           elements of a 16-byte vector that addresses and strides are multiples of.
    layouts:         of the operands, by name.
    lse_multiple:    the backward reads lse in rows padded to this, with +inf.
    blind_rows:      lse of a query that sees no key; `out` is 0 there with every kernel.
    deterministic:   "yes", or what makes it so.
    """

    kernel: Kernel
    device: str
    dtypes: Mapping[torch.dtype, Capability | None]
    masks: frozenset[MaskKind]
    capabilities: tuple[Capability, Capability] | None = None
    cudnn: tuple[int, int] | None = None
    largest_head: int | None = None
    head_multiple: int = 1
    least_length: int = 1
    equal_heads: bool = False
    refused_heads: tuple[tuple[Capability, Capability, int, int], ...] = ()
    causal_unequal: bool = True
    causal_masked: bool = False
    grouped_heads: bool = False
    largest_grid: int | None = None
    align: int = 1
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    lse_multiple: int = 1
    blind_rows: str = "-inf"
    deterministic: str = "yes"


_HALVES: dict[torch.dtype, Capability | None] = {torch.float16: (8, 0), torch.bfloat16: (8, 0)}
_ALL_MASKS: frozenset[MaskKind] = frozenset({"none", "bool", "float"})
_FUSED: dict[str, Layout] = {
    "q": "rows",
    "k": "rows",
    "v": "rows",
    "bias": "rows",
    "out": "dense",
    "grad_out": "dense",
    "lse": "packed",
}
_TILES_TOO_LARGE = (((8, 6), (8, 9), 193, 224), ((12, 0), (12, 1), 193, 224))
"""The backward's tiles for these head sizes do not fit in the 99 KiB of shared memory that a block has there
(`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`; with dropout up to 256). Forward and backward
run one kernel, and a forward does not know whether a gradient follows, so the forward does without it too."""


TABLE: tuple[Contract, ...] = (
    Contract(
        "cudnn",
        "cuda",
        dict.fromkeys(_HALVES, (9, 0)),
        frozenset({"none"}),
        capabilities=((9, 0), (9, 0)),
        # 9.19 of torch 2.11, compared with float64 on an H200, and 9.20 of torch 2.13. Only without a mask:
        # with one their backward gives NaN for some lengths (pytorch#196678), and for one query
        # (cudnn-frontend#1072).
        cudnn=(91900, 92099),
        largest_head=128,
        head_multiple=8,
        least_length=2,
        largest_grid=65535,
        align=8,
        layouts=_FUSED,
        blind_rows="not defined",
        deterministic="no; not chosen under torch.use_deterministic_algorithms(True)",
    ),
    Contract(
        "flash",
        "cuda",
        _HALVES,
        frozenset({"none"}),
        capabilities=((8, 0), (12, 1)),
        largest_head=256,
        head_multiple=8,
        equal_heads=True,
        refused_heads=_TILES_TOO_LARGE,
        causal_unequal=False,  # it aligns at the bottom right
        grouped_heads=True,
        largest_grid=65535,
        align=8,
        layouts=_FUSED,
        deterministic="forward; backward with torch.use_deterministic_algorithms(True)",
    ),
    Contract(
        "efficient",
        "cuda",
        {torch.float16: (5, 0), torch.float32: (5, 0), torch.bfloat16: (8, 0)},
        _ALL_MASKS,
        capabilities=((5, 0), (12, 1)),
        head_multiple=8,
        largest_grid=65535,
        align=8,
        layouts=_FUSED,
        lse_multiple=32,
        blind_rows="0",
        deterministic="forward; backward with torch.use_deterministic_algorithms(True)",
    ),
    Contract(
        "cpu_flash",
        "cpu",
        {torch.float16: None, torch.bfloat16: None, torch.float32: None, torch.float64: None},
        _ALL_MASKS,
        equal_heads=True,
        # It takes the last dim to have stride 1, and reads garbage where it has not.
        layouts={"q": "rows", "k": "rows", "v": "rows", "bias": "rows", "out": "rows", "grad_out": "rows"},
        blind_rows="0",
    ),
    Contract(
        "math",
        "any",
        {torch.float16: None, torch.bfloat16: None, torch.float32: None, torch.float64: None},
        _ALL_MASKS,
        causal_masked=True,
    ),
)
"""In order of preference: the first whose contract a call meets runs. Any call meets the last."""


def contract_of(kernel: Kernel) -> Contract:
    return next(contract for contract in TABLE if contract.kernel == kernel)


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
