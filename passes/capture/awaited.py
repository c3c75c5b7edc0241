"""Numbers that a forward reads out of tensors and only keeps: `self.log.append(loss.item())`, `return y, loss.item()`.

They are known after the call. While it is traced, a stand-in is in the place of each, which can be stored and
returned, and tells of any other use. In the structure of what a call leaves it is a leaf, `Number`: an output of the
program, read when the call has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from passes.capture.stand_ins import CONTAINERS, NUMBERS, note_uses

__all__ = ["Awaited", "Number", "widest"]


@dataclass(frozen=True)
class Number:
    """The number in the tensor at `index` of the flat list; lists of them, of a tensor with dims."""

    index: int


class Awaited:
    """In place of `value.tolist()`. look: the error for a use of it, by the name of a special method."""

    __slots__ = ("_look", "value")

    def __init__(self, value: Tensor, look: Callable[[str], Exception]) -> None:
        self.value, self._look = widest(value), look

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """For `isinstance`."""
        return self._kind

    @property
    def _kind(self) -> type:
        if self.value.dim():
            return list
        if self.value.is_floating_point():
            return float
        return complex if self.value.is_complex() else bool if self.value.dtype == torch.bool else int

    def __deepcopy__(self, memo: dict[int, Any]) -> Awaited:
        return self

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._kind, name):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {name!r}")
        raise self._look(name)

    def _looked(self, method: str, *args: Any) -> Any:
        raise self._look(method)


note_uses(Awaited, f"{NUMBERS} {CONTAINERS} repr")


def widest(value: Tensor) -> Tensor:
    """With the precision of Python's numbers."""
    if value.is_floating_point() or value.is_complex():
        return value.to(torch.complex128 if value.is_complex() else torch.float64)
    return value if value.dtype == torch.bool else value.to(torch.int64)
