"""What an optimizer keeps and moves for each parameter, and memory limits as users write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from cost_model.checked_arguments import shown
from cost_model.errors import ShardingError

__all__ = ["ADAMW", "OPTIMIZERS", "Optimizer", "parse_bytes"]


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer stores and moves, counted in arrays the size of the parameter.

    states: arrays that it keeps for each parameter, in the parameter's dtype.
    passes: arrays read plus arrays written in a step.
    element_nbytes: kept besides for each number of a parameter, whatever its dtype.
    """

    states: int
    passes: int
    element_nbytes: int = 0

    def state_nbytes(self, nbytes: int, element_size: int) -> int:
        """What it keeps for a parameter of `nbytes`, whose numbers take `element_size` bytes each."""
        return nbytes * self.states + nbytes // element_size * self.element_nbytes


ADAMW = Optimizer(states=2, passes=20)
"""`torch.optim.AdamW` as it runs by default (foreach): exp_avg and exp_avg_sq, made by `zeros_like`, so in
the parameter's dtype. Reads and writes of its eight kernels: mul_ 2 (decay), lerp_ 3, mul_ 2, addcmul_ 3,
sqrt 2 (into a temporary), div_ 2, add_ 2, addcdiv_ 4. [torch/optim/adam.py, _multi_tensor_adam] Its
`step` counter, four bytes a parameter, is not counted."""

OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": ADAMW,
    "adam": Optimizer(states=2, passes=18),
    "adamw, amsgrad": Optimizer(states=3, passes=23),
    "adam, amsgrad": Optimizer(states=3, passes=21),
    "sgd": Optimizer(states=0, passes=3),
    "momentum": Optimizer(states=1, passes=8),
    "adamw, fp32 master": Optimizer(states=0, passes=20, element_nbytes=12),
    "adam, fp32 master": Optimizer(states=0, passes=18, element_nbytes=12),
    "sgd, fp32 master": Optimizer(states=0, passes=3, element_nbytes=4),
    "momentum, fp32 master": Optimizer(states=0, passes=8, element_nbytes=8),
}
"""By the names that users give them. Adam is AdamW without the decay's mul_ 2; SGD add_ 3; with momentum mul_ 2, add_ 3
and add_ 3. amsgrad keeps max_exp_avg_sq as well: maximum_ 3. [torch/optim/{adam,sgd}.py, foreach]
fp32 master: a float32 copy of each parameter, and states in float32, as mixed precision keeps them for parameters in
bfloat16 [Micikevicius et al. 2018]: 4 bytes a number each."""

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
