"""Datasets that can read part of a sample."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cost_model.checked_arguments import reject
from cost_model.errors import ShardingError

__all__ = ["ArrayDataset", "PartialDataset"]

Slices = tuple[slice, ...]


@runtime_checkable
class PartialDataset(Protocol):
    """A map-style dataset from which a rank reads only its part of every sample.

    shapes: like a sample, with the shape of a tensor in place of each: {"x": (3, 97, 101), "y": ()}.
    read:   a sample cut to `slices`, which is like a sample too, with a tuple of slices, one per dim (of step
            1, maybe empty), in place of each tensor.
    """

    @property
    def shapes(self) -> Any: ...

    def __len__(self) -> int: ...

    def read(self, index: int, slices: Any) -> Any: ...


class ArrayDataset(Dataset[Any]):
    """Samples along dim 0 of tensors or numpy arrays, memory-mapped ones included; reads what is asked for.

        ArrayDataset(images, labels)           samples are tuples
        ArrayDataset(x=images, y=labels)       samples are dicts

    A sample is a copy. Raises ShardingError for arrays of different lengths.
    """

    def __init__(self, *arrays: Tensor | np.ndarray, **named: Tensor | np.ndarray) -> None:
        if bool(arrays) == bool(named):
            raise ShardingError(
                "ArrayDataset takes arrays by position or by name\n  try: ArrayDataset(x, y), ArrayDataset(x=x)"
            )
        self.arrays = dict(enumerate(arrays)) or named
        self._as_tuple = bool(arrays)
        for key, array in self.arrays.items():
            if not hasattr(array, "shape") or not hasattr(array, "__getitem__") or not len(array.shape):
                raise reject(
                    f"array {key} of an ArrayDataset", array, "a tensor or an array with samples along dim 0"
                )
        lengths = {key: len(array) for key, array in self.arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ShardingError(
                f"the arrays of an ArrayDataset have lengths {lengths}\n  try: as many samples in each"
            )

    @property
    def shapes(self) -> Any:
        return self._sample({key: tuple(array.shape[1:]) for key, array in self.arrays.items()})

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> Any:
        return self._sample({key: _copied(array, index, ()) for key, array in self.arrays.items()})

    def read(self, index: int, slices: Any) -> Any:
        """The sample cut to `slices`: {name: slices} or one tuple of slices per array."""
        return self._sample({key: _copied(array, index, slices[key]) for key, array in self.arrays.items()})

    def _sample(self, values: dict[Any, Any]) -> Any:
        return tuple(values.values()) if self._as_tuple else values


def _copied(array: Tensor | np.ndarray, index: int, slices: Slices) -> Tensor:
    part = array[(index, *slices)]
    # A copy in memory of just the part: a map may be read-only, and closed while the sample lives.
    return part.clone() if isinstance(part, Tensor) else torch.from_numpy(np.array(part))
