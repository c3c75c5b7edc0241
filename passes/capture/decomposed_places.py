"""Reading and writing where strides, a slice or a mask say, stacks, repeats and shuffles, as permute, reshape, select,
cat, pad and scatter; and how a tensor lies in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cost_model.errors import UnsupportedOpError

aten = torch.ops.aten


def laid_as(x: Tensor, result: Tensor) -> Tensor:
    """`result` with its dims in memory in the order of those of `x`: what is written through a view, `x`, is looked
    at through the tensor's other views."""
    order = _by_stride(x.shape, x.stride())
    if _by_stride(result.shape, result.stride()) == order:
        return result
    return result.permute(order).contiguous().permute(_inverse(order))


def _start(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> int:
    """Where the first element is, counted from that of `x`. Raises UnsupportedOpError for what is no part of `x`."""
    first = 0 if offset is None else offset - int(x.storage_offset())
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if not _lies_dense(x.shape, x.stride()) or first < 0 or last >= x.numel():
        raise UnsupportedOpError(
            f"as_strided({list(size)}, {list(stride)}) of a tensor of shape {list(x.shape)} reads memory that is not "
            "the tensor's own\n  try: view, slice, unfold or expand"
        )
    return first


def _in_order(x: Tensor) -> Tensor:
    return x.permute(_by_stride(x.shape, x.stride()))


def _whole(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> bool:
    return math.prod(size) == x.numel() and _lies_dense(size, stride)


def _places(size: Sequence[int], stride: Sequence[int], start: int) -> Tensor:
    """Of each element, in a row."""
    places = torch.full([], start, dtype=torch.int64)
    for n, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(n) * step
    return places.reshape(-1)


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """All of `x` in another order is a permuted reshape. Else a choice from the dims that do not stay in front."""
    start = _start(x, size, stride, offset)
    ordered = _in_order(x)
    if _whole(x, size, stride):
        order = _by_stride(size, stride)
        return ordered.reshape([size[d] for d in order]).permute(_inverse(order))
    kept = _kept(ordered, size, stride, start)
    inner = ordered.reshape([*ordered.shape[:kept], -1])
    found = aten.index_select.default(inner, kept, _places(size[kept:], stride[kept:], start))
    return found.reshape(size)


def _kept(ordered: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> int:
    """How many dims stay in front: the others reach no further than one of the last of these."""
    kept = 0
    while kept < min(ordered.ndim, len(size)):
        inner = math.prod(ordered.shape[kept + 1 :])
        reach = start + sum((n - 1) * s for n, s in zip(size[kept + 1 :], stride[kept + 1 :], strict=True))
        if (size[kept], stride[kept]) != (ordered.shape[kept], inner) or reach >= inner:
            break
        kept += 1
    return kept


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    start = _start(x, size, stride, offset)
    ordered = _in_order(x)
    if _whole(x, size, stride):
        written = src.permute(_by_stride(size, stride))
    else:
        written = aten.scatter.src(ordered.reshape(-1), 0, _places(size, stride, start), src.reshape(-1))
    return written.reshape(ordered.shape).permute(_inverse(_by_stride(x.shape, x.stride())))


def _rows(mask: Tensor, shape: Sequence[int], count: int) -> tuple[Tensor, Tensor, int]:
    """(per row of `shape` whether it is chosen, and as the how-manieth, the length of a row): a mask that is the same
    along the last dims chooses whole rows. count: elements of what is chosen from, a whole number of rows."""
    mask = mask.expand(shape)
    width, lead = 1, len(shape)
    while (
        lead
        and (mask.stride(lead - 1) == 0 or shape[lead - 1] == 1)
        and count % (width * shape[lead - 1]) == 0
    ):
        lead -= 1
        width *= shape[lead]
    chosen = mask[(..., *[0] * (len(shape) - lead))].reshape(-1)
    return chosen, (chosen.cumsum(0) - 1).clamp(min=0), width


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Row i of those that are chosen is row i of `source`."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    if not source.numel():
        return x.expand(shape).clone()
    chosen, at, width = _rows(mask, shape, source.numel())
    rows = aten.index_select.default(source.reshape(-1, width), 0, at)
    written = torch.where(chosen.unsqueeze(-1), rows, x.expand(shape).reshape(-1, width))
    return laid_as(x.expand(shape), written.reshape(shape))


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Rows that are not chosen add zeros to one that is."""
    count = math.prod(sizes)
    if not count:
        return grad.new_zeros(sizes)
    chosen, at, width = _rows(mask, grad.shape, count)
    rows = torch.where(chosen.unsqueeze(-1), grad.reshape(-1, width), 0.0)
    return grad.new_zeros([count // width, width]).index_add(0, at, rows).reshape(sizes)


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Places in all of `x` in a row."""
    values = source.reshape(index.shape)
    return laid_as(x, aten.index_put.default(x.reshape(-1), [index], values, accumulate).reshape(x.shape))


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Python's slice bounds, clipped to [0, size], end at least start."""
    place = lambda at: min(max(at + size if at < 0 else at, 0), size)
    low, high = 0 if start is None else place(start), size if end is None else place(end)
    return low, max(low, high)


def _pad(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    return aten.constant_pad_nd.default(x, [0, 0] * (x.ndim - 1 - dim) + [before, after], 0)


def slice_backward(grad: Tensor, shape: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    """The gradient padded back with zeros to `shape`."""
    if step != 1:
        return NotImplemented
    dim %= len(shape)
    low, high = _bounds(shape[dim], start, end)
    return _pad(grad, dim, low, shape[dim] - high)


def select_backward(grad: Tensor, shape: Sequence[int], dim: int, index: int) -> Tensor:
    dim %= len(shape)
    index %= shape[dim]
    return _pad(grad.unsqueeze(dim), dim, index, shape[dim] - 1 - index)


def slice_scatter(
    x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """x[..., start:end, ...] = src, as the three pieces side by side; every `step`-th: each place's own or from src."""
    dim %= x.ndim
    size = x.shape[dim]
    low, high = _bounds(size, start, end)
    window = [*x.shape]
    window[dim] = -((low - high) // step)
    if step != 1 and window[dim]:
        place = torch.arange(size, device=x.device) - low
        here = (place >= 0) & (place < high - low) & (place % step == 0)
        taken = src.to(x.dtype).expand(window).index_select(dim, place.clamp(0, high - low - 1) // step)
        return laid_as(x, torch.where(here.reshape(-1, *[1] * (x.ndim - dim - 1)), taken, x))
    pieces = [src.to(x.dtype).expand(window)]
    if low > 0:
        pieces.insert(0, aten.slice.Tensor(x, dim, 0, low))
    if high < size:
        pieces.append(aten.slice.Tensor(x, dim, high, size))
    return laid_as(x, pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces, dim))


def select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    dim %= x.ndim
    index %= x.shape[dim]
    return slice_scatter(x, src.unsqueeze(dim), dim, index, index + 1)


def unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [aten.select.int(x, dim, i) for i in range(x.shape[dim])]


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Every tensor with a new dim. torch's own lays them end to end along a dim that they have, where a rank or a piece
    of a batch that has a part of each has no part of the whole."""
    dim %= tensors[0].ndim + 1
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


def repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """Every dim of n repeated r times is [r, n] with r broadcast, flattened. Torch's result lies in rows."""
    x = x.reshape([*([1] * (len(repeats) - x.ndim)), *x.shape])
    paired = [s for n in x.shape for s in (1, n)]
    spread = [s for r, n in zip(repeats, x.shape, strict=True) for s in (r, n)]
    result = [r * n for r, n in zip(repeats, x.shape, strict=True)]
    return x.reshape(paired).expand(spread).reshape(result).clone(memory_format=torch.contiguous_format)


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """torch's own goes by way of four Python functions, for every product of a model."""
    if x.ndim < 2 or dim0 == dim1:
        return aten.alias.default(x)
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return aten.permute.default(x, order)


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Only what rolls as one vector is taken apart: a rolled dim is split in space as it is."""
    if dims:
        return NotImplemented
    return aten.roll.default(x.reshape(-1), shifts, [0]).reshape(x.shape)


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """[n, g c, ...] -> [n, c g, ...]"""
    n, channels, *rest = x.shape
    fine = x.reshape([n, groups, channels // groups, *rest])
    return fine.transpose(1, 2).reshape(x.shape).clone()


def copy(x: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """The functional form of `x.copy_(src)`."""
    return laid_as(x, src.to(dtype=x.dtype, device=x.device).expand(x.shape).clone())


PLACES: dict[Any, Callable[..., Any]] = {
    aten.as_strided.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.put.default: put,
    aten.masked_scatter.default: masked_scatter,
    aten.masked_scatter_backward.default: masked_scatter_backward,
    aten.slice_backward.default: slice_backward,
    aten.select_backward.default: select_backward,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.unbind.int: unbind,
    aten.stack.default: stack,
    aten.repeat.default: repeat,
    aten.transpose.int: transpose,
    aten.t.default: lambda x: transpose(x, 0, x.ndim - 1),
    aten.roll.default: roll,
    aten.channel_shuffle.default: channel_shuffle,
    aten.native_channel_shuffle.default: channel_shuffle,
    aten.copy.default: copy,
}


def _by_stride(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dims, those of the greatest strides first; of size 1 in front, whatever their strides."""
    return sorted(range(len(sizes)), key=lambda d: (sizes[d] > 1, -strides[d] if sizes[d] > 1 else 0))


def _lies_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill one run of memory, each place once."""
    run = 1
    for d in reversed(_by_stride(sizes, strides)):
        if sizes[d] > 1 and strides[d] != run:
            return False
        run *= sizes[d]
    return True


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


@dataclass(frozen=True)
class Arrangement:
    """How a tensor lies in memory, whatever its sizes.

    order: its dims, the outer ones first. gaps: those between whose elements memory is left out. repeated: those whose
    elements share a place (`expand`)."""

    order: tuple[int, ...]
    gaps: frozenset[int]
    repeated: frozenset[int]


Lies = Arrangement | tuple[int, ...] | None
"""How a tensor lies in memory: None where its shape says it, strides where elements overlap."""


def lies_as(tensor: Tensor) -> Lies:
    strides = strides_of(tensor)
    return None if strides is None else _arrangement(tensor.shape, strides) or strides


def strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """None where they follow from the shape."""
    return None if tensor.is_contiguous() else tensor.stride()


def _arrangement(sizes: Sequence[int], strides: Sequence[int]) -> Arrangement | None:
    """None where elements overlap in another way than `expand`'s."""
    order, gaps = _by_stride(sizes, strides), set[int]()
    repeated = {dim for dim, stride in enumerate(strides) if stride == 0 and sizes[dim] > 1}
    run = reach = 1
    for dim in reversed([dim for dim in order if sizes[dim] > 1 and dim not in repeated]):
        if strides[dim] < reach:
            return None
        if strides[dim] != run:
            gaps.add(dim)
        run, reach = strides[dim] * sizes[dim], strides[dim] * (sizes[dim] - 1) + reach
    return Arrangement(tuple(order), frozenset(gaps), frozenset(repeated))


def laid(shape: Sequence[Any], lies: Lies, **how: Any) -> Tensor:
    """`torch.empty(shape, **how)` that lies so."""
    if isinstance(lies, tuple):
        return torch.empty_strided(tuple(shape), lies, **how)
    if lies is None:
        return torch.empty(tuple(shape), **how)
    sizes, places = list[Any](), list[int]()
    for dim in lies.order:
        places.append(len(sizes))
        sizes.append(1 if dim in lies.repeated else shape[dim])
        if dim in lies.gaps:
            sizes.append(2)
    whole = torch.empty(sizes, **how)
    for place in reversed([at for at in range(len(sizes)) if at not in places]):
        whole = whole.select(place, 0)
    return whole.permute(_inverse(lies.order)).expand(tuple(shape))


def relaid(x: Tensor, lies: Lies) -> Tensor:
    """`x`, lying so; of elements that share a place there, the first. As it is where elements overlap."""
    if not isinstance(lies, Arrangement):
        return x
    made = laid(x.shape, lies, dtype=x.dtype, device=x.device)
    place = made
    for dim in lies.repeated:
        place, x = place.narrow(dim, 0, 1), x.narrow(dim, 0, 1)
    place.copy_(x)
    return made
