"""What AdamW keeps and moves for each parameter, and memory limits as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from cost_model.checked_arguments import shown
from cost_model.errors import ShardingError

__all__ = ["ADAMW", "Optimizer", "parse_bytes"]


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer stores and moves, counted in arrays the size of the parameter.

    states: arrays that it keeps for each parameter, in the parameter's dtype.
    passes: arrays read plus arrays written in a step.
    """

    states: int
    passes: int


ADAMW = Optimizer(states=2, passes=20)
"""`torch.optim.AdamW` as it runs by default (foreach): exp_avg and exp_avg_sq, made by `zeros_like`, so in
the parameter's dtype. Reads and writes of its eight kernels: mul_ 2 (decay), lerp_ 3, mul_ 2, addcmul_ 3,
sqrt 2 (into a temporary), div_ 2, add_ 2, addcdiv_ 4. [torch/optim/adam.py, _multi_tensor_adam] Its
`step` counter, four bytes a parameter, is not counted."""

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
