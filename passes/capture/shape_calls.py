"""Functions whose results are as long as values say, in a fixed shape: the length is asked of the values, as an
`int(n.sum())` of a forward is (`passes.capture.questions`), or is told, and then asked whether it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["LENGTHS"]


def repeat_interleave(
    input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """The same arguments and result as `torch.repeat_interleave`."""
    if repeats is None:
        return _repeated(input, output_size)
    x, dim = (input.reshape(-1), 0) if dim is None else (input, dim)
    if not isinstance(repeats, Tensor):
        return torch.repeat_interleave(x, repeats, dim, output_size=output_size)
    if repeats.numel() == 1:
        repeats = repeats.reshape(1).expand(x.shape[dim])
    if repeats.shape != (x.shape[dim],):
        raise RuntimeError("repeats must have the same size as input along dim")
    return x.index_select(dim, _repeated(repeats, output_size))


def _repeated(repeats: Tensor, length: int | None) -> Tensor:
    """[length], place i as often as `repeats[i]` says."""
    if repeats.dim() != 1 or repeats.is_floating_point():
        raise RuntimeError("repeat_interleave only accepts 1D vectors of integers as repeat")
    ends = repeats.cumsum(0, dtype=torch.int64)
    if length is None:
        length = int(ends[-1]) if repeats.numel() else 0
    elif ((repeats < 0).any() | (repeats.sum() != length)).any():
        raise RuntimeError(
            f"repeat_interleave: repeats are negative, or do not add up to output_size={length}"
        )
    return torch.searchsorted(ends, torch.arange(length), right=True).clamp(max=max(0, repeats.numel() - 1))


def unique(
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """The same arguments and results as `torch.unique`."""
    if dim is not None:
        return torch.unique(input, sorted, return_inverse, return_counts, dim)
    x, order = input.reshape(-1).sort(stable=True)
    values, inverse, counts = _runs(x)
    inverse = torch.zeros_like(inverse).scatter(0, order, inverse)
    return _wanted(values, return_inverse and inverse.reshape(input.shape), return_counts and counts)


def unique_consecutive(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The same arguments and results as `torch.unique_consecutive`."""
    if dim is not None:
        return torch.unique_consecutive(input, return_inverse, return_counts, dim)
    values, inverse, counts = _runs(input.reshape(-1))
    return _wanted(values, return_inverse and inverse.reshape(input.shape), return_counts and counts)


def _runs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The value of each run of equal ones, the run of each value, and how long each is."""
    begins = torch.cat([torch.ones_like(x[:1], dtype=torch.bool), x[1:] != x[:-1]])
    count = int(begins.sum()) if x.numel() else 0
    first = begins.logical_not().to(torch.uint8).argsort(dim=0, stable=True)[:count]
    ends = torch.cat([first[1:], torch.full_like(first[:1], x.numel())])
    return x[first], begins.cumsum(0) - 1, ends - first


def _wanted(*results: Any) -> Any:
    given = tuple(result for result in results if isinstance(result, Tensor))
    return given if len(given) > 1 else given[0]


LENGTHS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.repeat_interleave, Tensor.repeat_interleave), repeat_interleave),
    **dict.fromkeys((torch.unique, Tensor.unique), unique),
    **dict.fromkeys((torch.unique_consecutive, Tensor.unique_consecutive), unique_consecutive),
}
"""Torch functions to answer otherwise while tracing."""
