"""Products of rows with the matrices of their experts: `autoshard::routed_mm` and `autoshard::routed_outer`.

    routed_mm(a, b, ids, first, count)      a [*s, k], b [count, k, n], ids [*s]  ->  [*s, n]
        turned=True: b [count, n, k]
    routed_outer(a, b, ids, first, count)   a [*s, m], b [*s, n],       ids [*s]  ->  [count, m, n]
    own_rows(a, ids, first, count)          a [*s, *d],                 ids [*s]  ->  [*s, *d]
    sum_rows(a, ids, first, count)          a [*s, r, *d],           ids [*s, r]  ->  [*s, *d]

Row i of `routed_mm` is `a[i] @ b[ids[i] - first]`, and 0 where that is none of the `count` matrices. `routed_outer`,
its gradient, adds up the outer products of the rows of each expert. `own_rows` has 0 for rows of other experts than
the `count`, and `sum_rows` adds up what it has of each token. ids: int64, 0 or more. Rows are in the order of
their tokens, so that batch and sequence may be split; sorting them by expert, which kernels want, is the op's affair.

A kernel computes rows in order, group by group: `autoshard::grouped_mm(a, b, offs, first, count)`. `offs` (int32 or
int64, rising) are the ends of all groups along a dim of length L: group g is [offs[g-1], offs[g]), offs[-1] meaning 0,
and ends outside [0, L] are taken to be 0 or L.

    rows:     a [L, k], b [count, k, n]  ->  [L, n]         rows of other groups, and of none, are 0
    summed:   a [m, L], b [L, n]         ->  [count, m, n]  groups without members are 0

torch's own `aten::_grouped_mm` leaves what is in no group undefined, takes all groups, and its fakes take bfloat16
alone; on CUDA it is what runs, where its operands' dtype and layout allow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from passes.ops.registration import differentiable_operator, operator

_ALIGN = 16
"""Bytes: rows, or columns, of torch's kernel begin at multiples of it (`check_valid_strides`)."""


def routed_mm_reference(
    a: Tensor, b: Tensor, ids: Tensor, first: int, count: int, *, turned: bool = False
) -> Tensor:
    """`routed_mm` as a sort and a product of groups."""
    order, offs = in_groups(ids, first, count)
    b = b.transpose(1, 2) if turned else b
    rows = grouped_mm_reference(a.reshape(ids.numel(), a.shape[-1])[order], b, offs, first, count)
    return torch.empty_like(rows).index_put((order,), rows).reshape(*ids.shape, b.shape[-1])


def routed_outer_reference(a: Tensor, b: Tensor, ids: Tensor, first: int, count: int) -> Tensor:
    """`routed_outer` as a sort and a product of groups."""
    order, offs = in_groups(ids, first, count)
    rows, others = (x.reshape(ids.numel(), x.shape[-1])[order] for x in (a, b))
    return grouped_mm_reference(rows.t(), others, offs, first, count)


def in_groups(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """(the order of the rows by expert, [number of rows]; the ends of the groups up to first + count)."""
    found, order = ids.reshape(-1).sort(stable=True)
    groups = torch.arange(first + count, dtype=found.dtype, device=found.device)
    return order, torch.searchsorted(found, groups, right=True)


routed_mm = differentiable_operator(
    "routed_mm(Tensor a, Tensor b, Tensor ids, int first, int count, *, bool turned=False) -> Tensor",
    lambda *operands, **how: routed_mm_reference(*operands, **how).clone(),  # no view: it may be written into
    lambda a, b, ids, first, count, *, turned=False: a.new_empty([*ids.shape, b.shape[1 if turned else 2]]),
)
"""See the module."""

routed_outer = differentiable_operator(
    "routed_outer(Tensor a, Tensor b, Tensor ids, int first, int count) -> Tensor",
    routed_outer_reference,
    lambda a, b, ids, first, count: a.new_empty([count, a.shape[-1], b.shape[-1]]),
)
"""See the module."""


def own_rows_reference(a: Tensor, ids: Tensor, first: int, count: int) -> Tensor:
    """`own_rows` as a choice by row."""
    own = (ids >= first) & (ids < first + count)
    return torch.where(own.reshape(*ids.shape, *[1] * (a.ndim - ids.ndim)), a, a.new_zeros(()))


def sum_rows_reference(a: Tensor, ids: Tensor, first: int, count: int) -> Tensor:
    """`sum_rows` as a choice by row and a sum."""
    return own_rows_reference(a, ids, first, count).sum(ids.ndim - 1)


operator(
    "own_rows(Tensor a, Tensor ids, int first, int count) -> Tensor",
    own_rows_reference,
    lambda a, ids, first, count: torch.empty_like(a, memory_format=torch.contiguous_format),
)
operator(
    "sum_rows(Tensor a, Tensor ids, int first, int count) -> Tensor",
    sum_rows_reference,
    lambda a, ids, first, count: a.new_empty([*ids.shape[:-1], *a.shape[ids.ndim :]]),
)

ROUTED: dict[Any, int] = {
    torch.ops.autoshard.routed_mm.default: 1,
    torch.ops.autoshard.routed_outer.default: 2,
}
"""How many of the first operands have the rows of `ids`."""

_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})

READ_ROWS: dict[Any, int] = {
    **ROUTED,
    torch.ops.autoshard.own_rows.default: 1,
    torch.ops.autoshard.sum_rows.default: 1,
}
"""The same of all that is told the experts of rows."""


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: Mapping[str, Any] = _NO_KEYWORDS
) -> None:
    a, b, ids, first, count = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, ids)
    ctx.groups, ctx.how = (first, count), keyword_only_inputs


Term = Callable[..., Tensor]
"""Of a, b, the result's gradient, ids, first and count, and what is said by keyword: the gradient of an operand."""


def _gradient(of_a: Term, of_b: Term) -> Callable[..., tuple[Tensor | None, ...]]:
    def gradient(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        a, b, ids = ctx.saved_tensors
        wanted = zip(ctx.needs_input_grad[:2], (of_a, of_b), strict=True)
        return (
            *(of(a, b, grad, ids, *ctx.groups, **ctx.how) if needs else None for needs, of in wanted),
            None,
            None,
            None,
        )

    return gradient


routed_mm.register_autograd(
    _gradient(
        lambda a, b, grad, *groups, turned: routed_mm(grad, b, *groups, turned=not turned),
        lambda a, b, grad, *groups, turned: routed_outer(*(grad, a) if turned else (a, grad), *groups),
    ),
    setup_context=_setup_context,
)
routed_outer.register_autograd(
    _gradient(
        lambda a, b, grad, *groups: routed_mm(b, grad, *groups, turned=True),
        lambda a, b, grad, *groups: routed_mm(a, grad, *groups),
    ),
    setup_context=_setup_context,
)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    """Reads `offs` on the host, except where torch's fused product runs."""
    return _fused(a, b, offs, first, count) if is_fused(a, b) else _by_group(a, b, offs, first, count)


def _shape(a: Tensor, b: Tensor, count: int) -> list[int]:
    plain = [a.shape[0], b.shape[-1]]
    return plain if b.ndim == 3 else [count, *plain]


grouped_mm = operator(
    "grouped_mm(Tensor a, Tensor b, Tensor offs, int first, int count) -> Tensor",
    _grouped_mm,
    lambda a, b, offs, first, count: a.new_empty(_shape(a, b, count)),
)
"""See the module."""


def _own_places(order: Tensor, ends: Tensor, first: int, length: int) -> Tensor:
    begin, end = ends[[first - 1, -1]].tolist() if first else (0, int(ends[-1]) if len(ends) else 0)
    return order[begin:end].clone()


own_places = operator(
    "own_places(Tensor order, Tensor ends, int first, int length) -> Tensor",
    _own_places,
    lambda order, ends, first, length: order.new_empty([length]),
)
"""Of the places of rows in order those from group `first` on, up to the last of `ends`. Their number is read on the
host; `length` is the one that is reckoned with."""

counted_places = operator(
    "counted_places(Tensor order, Tensor ends, int first, int length) -> Tensor",
    _own_places,
    lambda order, ends, first, length: order.new_empty([torch.library.get_ctx().new_dynamic_size()]),
)
"""The same for compilers, which reckon with any number."""


def grouped_mm_reference(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    """The op as ATen ops where torch's fused product can run, else the op itself: a loop over groups whose sizes are
    values is no graph."""
    return _fused(a, b, offs, first, count) if is_fused(a, b) else grouped_mm(a, b, offs, first, count)


def is_fused(a: Tensor, b: Tensor) -> bool:
    """Whether torch's kernel takes these: bfloat16 on CUDA, nothing empty, every group beginning at an aligned address.

    Groups begin at any row, so the jagged dim must be the outer one in memory, with rows of whole 16-byte vectors.
    """
    if a.device.type != "cuda" or torch.version.hip is not None or not a.dtype == b.dtype == torch.bfloat16:
        return False
    step = _ALIGN // a.element_size()
    if not (a.numel() and b.numel()):
        return False
    if b.ndim == 2:
        return a.shape[0] % step == 0 and b.shape[1] % step == 0
    return a.shape[1] % step == 0 and (
        _by_rows(b) or _by_rows(b.transpose(-1, -2)) or b.shape[-1] % step == 0
    )


def _by_rows(x: Tensor) -> bool:
    """Row-major in its last two dims, with rows and `x` beginning at aligned addresses (`check_valid_strides`)."""
    step = _ALIGN // x.element_size()
    outer, inner = x.stride()[-2:]
    whole = x.storage_offset() % step == 0 and (x.ndim == 2 or x.stride(0) % step == 0)
    return whole and inner == 1 and outer >= max(1, x.shape[-1]) and outer % step == 0


def _in_rows(x: Tensor, order: Tensor | None = None) -> Tensor:
    """`x`, its rows in that order, row-major; a copy only where it is not."""
    x = x if order is None else x.index_select(0, order)
    return x if _by_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _fused(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    """By torch's kernel, whose groups begin at 0: what lies before them is turned behind them and back."""
    rows = b.ndim == 3
    length = a.shape[0] if rows else a.shape[1]
    ends = offs.clamp(0, length)
    places = torch.arange(length, device=a.device)
    mine, begin, turned = ends.narrow(0, first, count), None, None
    if first:
        begin = ends.narrow(0, first - 1, 1)
        mine, turned = mine - begin, (places + begin) % length
    product, groups = torch.ops.aten._grouped_mm.default, mine.to(torch.int32)
    if not rows:
        return _packed(product(_in_rows(a.t(), turned).t(), _in_rows(b, turned), groups))
    b = b if _by_rows(b.transpose(-1, -2)) else _in_rows(b)
    result = product(_in_rows(a, turned), b, groups)
    inside = places < mine.narrow(0, count - 1, 1)
    result = torch.where(inside.unsqueeze(-1), result, 0.0)
    return _packed(result if begin is None else result.index_select(0, (places - begin) % length))


def _packed(x: Tensor) -> Tensor:
    """torch's kernel pads rows to whole vectors."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _by_group(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    length = a.shape[0] if b.ndim == 3 else a.shape[1]
    ends = [0, *offs.clamp(0, length).tolist()]
    result = a.new_empty(_shape(a, b, count))
    if b.ndim == 3:
        result[: ends[first]] = 0
        result[ends[first + count] :] = 0
    for group in range(count):
        begin, end = ends[first + group], ends[first + group + 1]
        if b.ndim == 3:
            torch.mm(a[begin:end], b[group], out=result[begin:end])
        else:
            torch.mm(a[:, begin:end], b[begin:end], out=result[group])
    return result
