"""How unevenly rows go to experts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.errors import ShardingError, is_number, reject


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


@dataclass(frozen=True)
class Choice:
    """Experts of a token: so many different ones, of all that there are."""

    count: int
    experts: int

    def __str__(self) -> str:
        return f"{self.count}of{self.experts}"

    @staticmethod
    def of(op: str) -> Choice | None:
        """That which what is pending, "sum2of8" or "routed2of8", says; None: it says none."""
        found = re.fullmatch(r"[a-z]+(\d+)of(\d+)", op)
        return Choice(*map(int, found.groups())) if found else None

    def ranks(self, ways: int) -> float:
        """How many ranks a token is wanted by, of so many that have equally many experts, where each expert is as
        likely: ways (1 - C(e - e / ways, count) / C(e, count)) of e experts, of which a rank has e / ways."""
        others = self.experts * (1.0 - 1.0 / ways)
        none = ((max(0.0, others - i) / (self.experts - i)) for i in range(min(self.count, self.experts)))
        return ways * (1.0 - math.prod(none))


def sum_of(choice: Choice) -> str:
    """Pending: a sum of which every element has as summands the rows of its token's experts."""
    return f"sum{choice}"


def copies_of(choice: Choice) -> str:
    """Pending, as `passes.layout.layout.ROUTED`: rows of which those of a token are alike."""
    return f"routed{choice}"


def checked_routing(routing: object) -> Routing:
    """From a factor, or a histogram of rows by expert in any unit. ShardingError for anything else."""
    if routing is None:
        return BALANCED
    wanted = "1.5, for half as many rows again on the fullest rank, a list of rows by expert, or None"
    if is_number(routing) and 1.0 <= routing < math.inf:
        return BALANCED if routing == 1 else Routing(float(routing))
    rows = routing if isinstance(routing, (list, tuple)) else []
    total = math.fsum(rows) if all(is_number(one) and 0.0 <= one < math.inf for one in rows) else 0.0
    if total == 0.0:
        raise reject("routing", routing, wanted)
    return Routing(shares=tuple(one / total for one in rows))


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
