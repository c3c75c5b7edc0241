"""How unevenly rows go to experts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeGuard

from cost_model.errors import ShardingError, reject


@dataclass(frozen=True)
class Routing:
    """factor: rows of the fullest rank, over those that all have where experts are equally loaded. shares: of all rows
    those of each expert; (): the factor says."""

    factor: float = 1.0
    shares: tuple[float, ...] = ()

    @staticmethod
    def of(numbers: Sequence[float]) -> Routing:
        """What has these `numbers`."""
        return Routing(shares=tuple(numbers)) if len(numbers) > 1 else Routing(numbers[0])

    @property
    def numbers(self) -> tuple[float, ...]:
        """What it is made of again; (): experts are equally loaded."""
        return self.shares or (() if self.factor == 1.0 else (self.factor,))

    def share(self, experts: Sequence[int]) -> float:
        """Of all rows, those of the fullest rank; experts: how many each has, in order."""
        if not self.shares:
            return min(1.0, self.factor / len(experts))
        ends = [sum(experts[:i]) for i in range(len(experts) + 1)]
        return max(math.fsum(self.shares[lo:hi]) for lo, hi in itertools.pairwise(ends))

    def reckoned(self, rows: int, experts: int, count: int) -> int:
        """Of so many rows those of the fullest rank, where a rank has `count` of the experts."""
        if not self.numbers:
            return -(-rows * count // experts)
        held = [min(count, experts - first) for first in range(0, experts, count)]
        return math.ceil(rows * self.share(held))


BALANCED = Routing()


def sum_of(count: int) -> str:
    """Pending: a sum of which every element has at most so many summands, those of its rows' experts."""
    return f"sum{count}"


def summands(op: str) -> int | None:
    """Inverse of `sum_of`; None for what is pending otherwise."""
    return int(op[3:]) if op.startswith("sum") and op != "sum" else None


def checked_routing(routing: object) -> Routing:
    """From a factor, or a histogram of rows by expert in any unit. ShardingError for anything else."""
    if routing is None:
        return BALANCED
    wanted = "1.5, for half as many rows again on the fullest rank, a list of rows by expert, or None"
    if _is_number(routing) and 1.0 <= routing < math.inf:
        return BALANCED if routing == 1 else Routing(float(routing))
    rows = routing if isinstance(routing, (list, tuple)) else []
    total = math.fsum(rows) if all(_is_number(one) and 0.0 <= one < math.inf for one in rows) else 0.0
    if total == 0.0:
        raise reject("routing", routing, wanted)
    return Routing(shares=tuple(one / total for one in rows))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_experts(routing: Routing, experts: set[int]) -> None:
    """ShardingError unless a model with products of so many experts can be routed so."""
    if routing == BALANCED:
        return
    if not experts:
        raise ShardingError(
            "routing is given, and the model has no products with experts\n  try: routing=None"
        )
    wrong = sorted(count for count in experts if routing.shares and count != len(routing.shares))
    if wrong:
        raise ShardingError(
            f"routing has rows of {len(routing.shares)} experts, and the model has {wrong[0]}\n"
            "  try: one number for each expert, summed over layers, or a factor"
        )
