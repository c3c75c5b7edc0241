"""Bytes on one device: model state, liveness walk, and memory limits as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cost_model.arguments import shown
from cost_model.compute import ComputePrices
from cost_model.errors import ShardingError

__all__ = [
    "ADAMW",
    "ADAMW_FUSED",
    "SGD",
    "ModelState",
    "Optimizer",
    "live_bytes",
    "model_state",
    "optimizer_step_seconds",
    "parse_bytes",
    "peak_live_bytes",
]


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer stores and moves, counted in arrays the size of the parameter.

    states:      arrays that it keeps for each parameter, in the parameter's dtype.
    temporaries: arrays that live only during a step.
    passes:      arrays read plus arrays written in a step.
    kernels:     kernels that a step launches for a list of parameters.
    """

    name: str
    states: int
    temporaries: int
    passes: int
    kernels: int


ADAMW = Optimizer("AdamW", states=2, temporaries=1, passes=20, kernels=8)
"""`torch.optim.AdamW` as it runs by default (foreach): exp_avg and exp_avg_sq, made by `zeros_like`, so in
the parameter's dtype. Reads and writes of its eight kernels: mul_ 2 (decay), lerp_ 3, mul_ 2, addcmul_ 3,
sqrt 2 (into a temporary), div_ 2, add_ 2, addcdiv_ 4. [torch/optim/adam.py, _multi_tensor_adam] Its
`step` counter, four bytes a parameter, is not counted."""

ADAMW_FUSED = Optimizer("AdamW(fused=True)", states=2, temporaries=0, passes=7, kernels=1)
"""One kernel: reads parameter, gradient and both states, writes parameter and both states."""

SGD = Optimizer("SGD", states=0, temporaries=0, passes=3, kernels=1)
"""`torch.optim.SGD` without momentum: reads parameter and gradient, writes the parameter."""


@dataclass(frozen=True)
class ModelState:
    """Bytes of what outlives a training step on one device. Adds up with `+`."""

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def total(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def __add__(self, other: ModelState) -> ModelState:
        return ModelState(
            self.parameter_bytes + other.parameter_bytes,
            self.gradient_bytes + other.gradient_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
        )


def model_state(
    elements: int, itemsize: int, *, requires_grad: bool = True, optimizer: Optimizer = ADAMW
) -> ModelState:
    """State of one parameter's local shard of `elements` elements of `itemsize` bytes.

    The gradient has the parameter's shape and dtype. A buffer or frozen parameter
    (requires_grad=False) has neither gradient nor optimizer state.
    """
    nbytes = elements * itemsize
    if not requires_grad:
        return ModelState(parameter_bytes=nbytes)
    return ModelState(nbytes, nbytes, optimizer.states * nbytes)


def optimizer_step_seconds(
    prices: ComputePrices, parameter_bytes: float, optimizer: Optimizer = ADAMW
) -> float:
    """One optimizer step over local trainable parameters of `parameter_bytes` in all.

    Memory-bound: kernels * launch + passes * parameter_bytes / bandwidth. 0 without parameters.
    """
    if parameter_bytes == 0:
        return 0.0
    moved = prices.memory_seconds(optimizer.passes * parameter_bytes)
    return optimizer.kernels * prices.launch_seconds + moved


def live_bytes(intervals: ArrayLike, sizes: ArrayLike) -> NDArray[np.int64]:
    """Bytes live at each step 0 .. last, given values that live during [start, end).

    intervals: int[k, 2], half open, 0 <= start <= end; an empty one never lives.
    sizes:     int[k], bytes, not negative.
    """
    spans = np.asarray(intervals, dtype=np.int64).reshape(-1, 2)
    weights = np.asarray(sizes, dtype=np.int64).reshape(-1)
    assert len(spans) == len(weights), f"{len(spans)} intervals, {len(weights)} sizes"
    assert (spans[:, 0] >= 0).all(), "an interval starts before step 0"
    assert (spans[:, 0] <= spans[:, 1]).all(), "an interval ends before its start"
    assert (weights >= 0).all(), "a size is negative"
    changes = np.zeros(int(spans[:, 1].max(initial=0)) + 1, dtype=np.int64)
    np.add.at(changes, spans[:, 0], weights)
    np.subtract.at(changes, spans[:, 1], weights)
    return np.cumsum(changes)[:-1]


def peak_live_bytes(intervals: ArrayLike, sizes: ArrayLike) -> tuple[int, int]:
    """(most bytes live at once, first step at which they are); (0, 0) when nothing lives.

    Arguments as `live_bytes`.
    """
    live = live_bytes(intervals, sizes)
    if not len(live):
        return 0, 0
    step = int(live.argmax())
    return int(live[step]), step


_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base ** (power + 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP")
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(value: str | int, argument: str = "memory_limit") -> int:
    """70_000_000_000, "70GB" (decimal), "64GiB" (binary), "1.5 TB" -> bytes.

    Raises ShardingError, naming `argument`, for anything else, and for less than one byte.
    """
    if isinstance(value, str):
        nbytes = _parse_text(value, argument)
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        raise _bad_size(value, argument)
    if not 1 <= nbytes < 2**63:
        raise _bad_size(value, argument)
    return nbytes


def _parse_text(text: str, argument: str) -> int:
    match = _SIZE.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise _bad_size(text, argument)
    return round(Decimal(match[1]) * units[match[2].lower()])


def _bad_size(value: object, argument: str) -> ShardingError:
    units: Sequence[str] = [unit for unit in _UNITS if unit]
    return ShardingError(
        f"{argument} is {shown(value)}; it must be a number of bytes above zero\n"
        f"  the units are {', '.join(units)}\n"
        '  try: "70GB" (70 * 1000**3), "64GiB" (64 * 1024**3) or an integer'
    )
