"""How unevenly rows go to experts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cost_model.errors import ShardingError, is_number, reject
from cost_model.mesh import MeshSpec
from passes.layout.layout import ROUTED


@dataclass(frozen=True)
class Routing:
    """factor: rows of the fullest rank, over those that all have where experts are equally loaded. shares: of all rows
    those of each expert; (): the factor says. groups, once: how a token's experts lie, and how it travels to them, as
    `Choice` has them."""

    factor: float = 1.0
    shares: tuple[float, ...] = ()
    groups: tuple[int, int] = (1, 1)
    once: int = 1

    @staticmethod
    def of(numbers: Sequence[float]) -> Routing:
        """What has these `numbers`."""
        return Routing(shares=tuple(numbers)) if len(numbers) > 1 else Routing(numbers[0])

    @property
    def numbers(self) -> tuple[float, ...]:
        """What it is made of again; (): experts are equally loaded."""
        return self.shares or (() if self.factor == 1.0 else (self.factor,))

    def choice(self, count: int, experts: int) -> Choice:
        """Of so many experts of all."""
        return Choice(count, experts, self.groups, self.once)

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
    """Experts of a token: so many different ones, of all that there are. groups: of so many groups of neighbours they
    lie in so many, chosen at random: (4, 8) where a router limits them to 4 of 8. once: a token travels once to all
    experts of so many neighbouring ranks, which pass it on among them; 0: once to each expert."""

    count: int
    experts: int
    groups: tuple[int, int] = (1, 1)
    once: int = 1

    def __str__(self) -> str:
        groups = "" if self.groups == (1, 1) else "in{}of{}".format(*self.groups)
        return f"{self.count}of{self.experts}{groups}{'' if self.once == 1 else f'by{self.once}'}"

    @staticmethod
    def of(op: str) -> Choice | None:
        """That which what is pending, "sum2of8" or "routed8of256in4of8by8", says; None: it says none."""
        found = re.fullmatch(r"[a-z]+?(\d+)of(\d+)(?:in(\d+)of(\d+))?(?:by(\d+))?", op)
        if found is None:
            return None
        count, experts, chosen, groups, once = (int(said or 1) for said in found.groups())
        return Choice(count, experts, (chosen, groups), once)

    def ranks(self, ways: int) -> float:
        """How many ranks a token is wanted by, of so many that have equally many experts, where each expert that it may
        have is as likely. Of e experts that it may have, of which a rank has r, it has none of the rank's in
        C(e - r, count) / C(e, count) of cases; a rank has r of 0, one or several groups that are chosen."""
        chosen, groups = self.groups if self._in_whole_groups(ways) else (1, 1)
        size, held = self.experts / groups, max(1, groups // ways)
        share = min(size, self.experts / ways)  # of one group, what a rank has
        likely = lambda n: (
            math.comb(held, n) * math.comb(groups - held, chosen - n) / math.comb(groups, chosen)
        )
        return ways * math.fsum(
            likely(n) * (1.0 - self._without(chosen * size, n * share))
            for n in range(1, min(held, chosen) + 1)
        )

    def copies(self, ranks: Sequence[int]) -> float:
        """How often a token travels over the slowest link that joins these ranks, among which the experts are split."""
        if not self.once:
            return self.count
        reached = len({rank // self.once for rank in ranks})
        return self.ranks(reached if reached > 1 else len(ranks))

    def travelling(self, nbytes: int, ranks: Sequence[int]) -> int:
        """Bytes over that link, of as many that reach ranks."""
        return math.ceil(nbytes * self.copies(ranks) / self.ranks(len(ranks)))

    def _in_whole_groups(self, ways: int) -> bool:
        """Whether a rank has whole groups, or a part of one."""
        return self.groups[1] % ways == 0 or ways % self.groups[1] == 0

    def _without(self, experts: float, others: float) -> float:
        """How likely none of `others` is chosen, of so many experts."""
        left = experts - others
        return math.prod(max(0.0, left - i) / (experts - i) for i in range(min(self.count, int(experts))))


def sum_of(choice: Choice) -> str:
    """Pending: a sum of which every element has as summands the rows of its token's experts."""
    return f"sum{choice}"


def copies_of(choice: Choice) -> str:
    """Pending, as `ROUTED`: rows of which those of a token are alike."""
    return f"{ROUTED}{choice}"


def rows_share(
    partial: Sequence[tuple[str, str]],
    mesh: MeshSpec,
    fullest: Callable[[Sequence[int]], float] = lambda ways: 1.0 / math.prod(ways),
) -> float:
    """What part of a tensor a rank has under what is pending: rows of its experts, or sums of tokens that have some of
    these. fullest: ways of ranks that share experts -> of all rows those of the rank with the most."""
    share = 1.0
    for op in dict.fromkeys(op for _, op in partial):
        ways = [mesh.size(axis) for axis in mesh.names if (axis, op) in partial]
        if op.startswith(ROUTED):
            share *= fullest(ways)
        elif choice := Choice.of(op):
            share *= min(1.0, choice.ranks(math.prod(ways)) * fullest(ways))
    return share


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
    if not routing.numbers:
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
