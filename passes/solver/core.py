"""Least cost of a graph without memory rows: reduce, bound, prune, and a program for the rest.

Each round passes messages for a lower bound, decodes them into a choice, and forbids what the bound proves to be no
better than the best choice so far; that makes new reductions possible. When the messages prune no more, the
relaxation in marginal form takes over (its dual values are better messages), and integers only if it stays fractional.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from .branches import Branches, descend, prune, with_messages
from .graph import DeadEnd, Graph
from .marginal import Relaxation, Relaxed
from .passing import MessagePassing, Messages, bound_of
from .presolve import presolve
from .problem import Index, Infeasible

PROGRAM_LIMIT = 6_000_000
"""Edge entries of the largest program that is handed to HiGHS."""
LARGE = 200_000
"""Edge entries above which the scale of costs is only estimated."""
PASSES = 5
"""Of messages before they are looked at."""
QUICK = 100_000
"""Edge entries up to which a relaxation takes no longer than four times five passes of messages, and bounds better:
where messages have not converged by then it is its turn."""
WORTHWHILE = 0.2
"""Share of the entries that a pruning must remove for another round of the same kind: the next kind is stronger."""
BRANCHES, FEW = 100, 10
"""Relaxations solved in branches before HiGHS searches by itself; and where only a better choice is looked for before
there is a relaxation."""
LIKELY = 6
"""Strategies of a node, the best by messages, of which the best choice is looked for."""
STALLED, SLOWLY = 0.02, 0.005
"""Share of the gap by which the bound rises too little for five more passes: where a relaxation is quick, and where it
takes longer than many of them."""


@dataclass(frozen=True)
class Budget:
    """When to stop: at `deadline` (time.monotonic), or when the bound is within `tolerance` (absolute); within `enough`
    neither relaxations of what is large are tried nor integer programs of all that is left, but where it is small."""

    deadline: float
    tolerance: float
    enough: float = 0.0

    @property
    def spent(self) -> bool:
        return time.monotonic() > self.deadline


@dataclass(frozen=True)
class Solved:
    """The best choice (of the nodes of the graph as it was given), its cost, and a proven lower bound."""

    choice: dict[int, int]
    cost: float
    bound: float


def solve_graph(graph: Graph, budget: Budget) -> Solved:
    """Solve `graph`, which is consumed and must have no trail. Raises DeadEnd if nothing is possible."""
    assert not graph.trail
    presolve(graph, budget.deadline)
    return solve_presolved(graph, budget)


def solve_presolved(
    graph: Graph, budget: Budget, warm: dict[int, int] | None = None, start: Messages | None = None
) -> Solved:
    """The same for a graph that is presolved already; its trail is undone in the answer.

    warm: a choice of what is left, from which better ones are looked for. start: messages to improve.
    """
    assert not len(graph.slack) or not graph.use
    parts = graph.components()
    choice: dict[int, int] = {}
    cost = bound = graph.constant
    share = 1.0 / max(1, len(parts))
    each = Budget(budget.deadline, share * budget.tolerance, share * budget.enough)
    for part in parts:
        found = _Connected(graph.copy(part), each, warm, start).solve()
        choice |= found.choice
        cost += found.cost
        bound += found.bound
    return Solved(graph.expand(choice), cost, bound)


def cost_scale(graph: Graph, deadline: float = float("inf")) -> tuple[float, Messages]:
    """Roughly the least cost of a presolved graph, rather below it: turns a relative gap into an absolute one. And the
    messages that say so.

    Memory rows aside, which can only raise it.
    """
    passing = MessagePassing(graph)
    messages = passing.zeros()
    cost, bound = float("inf"), passing.lower_bound(messages)
    for _ in range(8):
        bound = passing.lower_bound(passing.ascend(messages, 3, deadline))
        cost = min(cost, graph.value(descend(graph, passing.decode(messages))))
        if abs(cost - bound) <= 0.5 * abs(cost) or graph.entries() > LARGE or time.monotonic() > deadline:
            break
    scale = max(bound if cost > 0 else -cost, 1e-3 * abs(cost)) if np.isfinite(cost) else 0.0
    return scale, passing.unpacked(messages)


def weighted(graph: Graph, relaxed: Relaxed, deadline: float) -> Graph:
    """The part of `graph` that has only strategies which the relaxation gives weight [Berthold 2007, RENS], reduced.
    Raises DeadEnd."""
    # Weight in the relaxation of a strategy that may be part of its nearest choices.
    kept = {node: np.flatnonzero(shares > 1e-6) for node, shares in relaxed.by_node(graph).items()}
    return _part(graph, kept, deadline)


def likely(graph: Graph, messages: Messages, choices: Sequence[Mapping[int, int]], deadline: float) -> Graph:
    """The part of `graph` that has only the strategies that are the best by messages, and those of `choices`, reduced.
    Raises DeadEnd."""
    kept: dict[int, Index] = {}
    for node in graph.cost:
        best = np.argsort(with_messages(graph, messages, node), kind="stable")[:LIKELY]
        some = {int(a) for a in best}
        kept[node] = np.array(sorted(some | {choice[node] for choice in choices}))
    return _part(graph, kept, deadline)


def _part(graph: Graph, kept: Mapping[int, Index], deadline: float) -> Graph:
    part = graph.copy()
    for node, strategies in kept.items():
        part.restrict(node, strategies)
    presolve(part, deadline)
    return part


class _Connected:
    """One connected, presolved graph, with the best choice so far and the bound of what was pruned."""

    def __init__(
        self, graph: Graph, budget: Budget, warm: dict[int, int] | None, start: Messages | None
    ) -> None:
        self.graph, self.budget, self._messages = graph, budget, start
        self.best: dict[int, int] | None = None
        self.cost = float("inf")
        self.bound = -float("inf")
        self._weighted = False
        if warm is not None:
            self._offer(descend(graph, warm))

    def solve(self) -> Solved:
        for step in (self._by_messages, self._by_relaxation, self._by_integers):
            again = True
            while again:
                again = step()
                if not self._done() and len(self.graph.components()) != 1:
                    self._split()
                    return self._found()
                if self._done():
                    return self._found()
        return self._found()

    def _found(self) -> Solved:
        if self.best is None:
            raise Infeasible("time", sorted(self.graph.cost))
        return Solved(self.best, self.cost, min(self.bound, self.cost))

    def _done(self) -> bool:
        return self.cost - self.bound <= self.budget.tolerance or (
            self.best is not None and self.budget.spent
        )

    def _offer(self, choice: dict[int, int]) -> None:
        """Take a choice of the remaining nodes if it is better."""
        cost = self.graph.value(choice)
        if cost < self.cost:
            self.best, self.cost = self.graph.expand(choice), cost

    @property
    def _cutoff(self) -> float:
        """What costs this much or more need not be looked at."""
        return self.cost - self.budget.tolerance / 2

    def _split(self) -> None:
        """Solve what pruning has cut into parts (or to nothing)."""
        rest = solve_graph(self.graph.copy(), self.budget)
        cost = self.graph.constant + rest.cost
        if cost < self.cost:
            self.best, self.cost = self.graph.expand(rest.choice), cost
        self.bound = max(self.bound, min(self._cutoff, self.graph.constant + rest.bound))

    def _prune(self, messages: Messages, bound: float) -> bool:
        """True if enough was pruned for another round; the graph is then presolved."""
        self.bound = max(self.bound, min(bound, self._cutoff))
        if self._done():
            return False
        before = self.graph.entries()
        try:
            if prune(self.graph, messages, bound, self._cutoff) == float("inf"):
                return False
            presolve(self.graph, self.budget.deadline)
        except DeadEnd:
            self.bound = self._cutoff
            return False
        after = self.graph.entries()
        # Less is worth it where the graph is too large for the next kind.
        return after <= before * (1 - (0.02 if after > PROGRAM_LIMIT else WORTHWHILE))

    def _by_messages(self) -> bool:
        passing = MessagePassing(self.graph)
        start, self._messages = self._messages, None
        messages = settled = passing.zeros() if start is None else passing.packed(start)
        bound = new = -float("inf")
        quick = self.graph.entries() <= QUICK
        left, least = (4, STALLED) if quick else (float("inf"), SLOWLY)
        stalled = 0
        decoded: list[dict[int, int]] = []
        # Once in any case: a search whose time is over before it began has a bound as well.
        # Messages have converged when the bound rose too little this many times in a row.
        while stalled < 3 and left > 0 and not (np.isfinite(bound) and self.best and self.budget.spent):
            settled = passing.ascend(messages, PASSES, self.budget.deadline)
            new = passing.lower_bound(settled)
            for backward in (False, True):
                decoded.append(descend(self.graph, passing.decode(messages, backward)))
                self._offer(decoded[-1])
            left -= 1
            gain = new - bound
            bound = max(bound, new)
            stalled = stalled + 1 if gain <= least * (self.cost - bound) else 0
            if self.cost - bound <= self.budget.tolerance:
                break
        else:
            if not quick:
                found = partial(likely, self.graph, passing.unpacked(messages), decoded)
                self._offer_part(found, FEW)
        return self._prune(passing.unpacked(settled), new)

    def _by_relaxation(self) -> bool:
        entries = self.graph.entries()
        if entries > PROGRAM_LIMIT or (entries > QUICK and self.cost - self.bound <= self.budget.enough):
            return False
        relaxed = Relaxation(self.graph).solve(self.budget.deadline)
        if relaxed is None:
            return False
        self._offer(descend(self.graph, relaxed.choice))
        if not self._weighted:
            self._weighted = True
            self._offer_part(partial(weighted, self.graph, relaxed), BRANCHES)
        return self._prune(relaxed.messages, bound_of(self.graph, relaxed.messages))

    def _offer_part(self, part: Callable[[float], Graph], most: int) -> None:
        """The best of some strategies. most: relaxations to solve."""
        try:
            rest = part(self.budget.deadline)
        except DeadEnd:
            return
        # Share of the entries at most, that these strategies have, for the best of them to be looked for.
        if rest.entries() <= 0.2 * self.graph.entries():
            known = self.cost - self.graph.constant
            found = Branches(rest, known, self.budget.tolerance, self.budget.deadline, most)
            if found.best is not None:
                self._offer(rest.expand(found.best))

    def _by_integers(self) -> bool:
        if self.graph.entries() > PROGRAM_LIMIT or self.cost - self.bound <= self.budget.enough:
            return False
        now = time.monotonic()
        # Share of the time left.
        until = now + 0.5 * (self.budget.deadline - now)
        branches = Branches(self.graph, self.cost, self.budget.tolerance, until, BRANCHES)
        if branches.best is not None:
            self._offer(branches.best)
        self.bound = max(self.bound, min(self._cutoff, branches.bound))
        if self._done():
            return False
        program = Relaxation(self.graph, integers=True)
        choice, bound = program.solve_integers(self.budget.tolerance / 2, self.budget.deadline)
        if choice is not None:
            self._offer(choice)
        elif self.best is None and bound == float("inf"):
            raise DeadEnd(min(self.graph.cost))
        self.bound = max(self.bound, min(self._cutoff, bound))
        return False
