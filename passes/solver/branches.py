"""What bounds exclude: strategies and pairs that cost too much; and branch and bound with the relaxation.

A node whose strategies share its weight is given each of them in turn, and then all others. The dual values of the
relaxation bound a branch before it is solved and forbid most of what is left of it. The best choice is known within a
few parts in ten thousand by then: what takes time is to prove that no branch holds a better one, and few branches are
looked at for that. HiGHS's own search looks for choices and for cuts first, five times as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from .alike import Alike, Side
from .graph import DeadEnd, Graph, Restrict
from .local_search import descend
from .marginal import Relaxation, Relaxed
from .passing import MessagePassing, Messages, bound_of
from .presolve import presolve, propagate
from .problem import Array, Index


def prune(graph: Graph, messages: Messages, bound: float, cutoff: float, alike: Alike | None = None) -> float:
    """Forbid, in place, what the messages prove to cost `cutoff` or more.

    `bound` is theirs. Returns what is proven of all that went: no choice that uses any of it
    costs less. At least `cutoff`; inf if nothing went. Whole strategies get the cost inf; arc consistency removes them.

    alike: of the graph; what is like something that has to stay, stays, so that it is alike ever after.
    """
    room, alike = cutoff - bound, alike or Alike.none(graph)
    above: dict[int, Array] = {}
    for node in graph.cost:
        total = graph.cost[node].copy()
        for other in graph.adjacent[node]:
            total += messages[other, node]
        above[node] = total - total.min()
    joint = {node: vector.copy() for node, vector in above.items()}
    edges = [(i, j) for i in sorted(graph.adjacent) for j in sorted(graph.adjacent[i]) if i < j]
    pairs: dict[tuple[Side, Side], Array] = {}
    for i, j in edges:
        total = _pairs_above(graph, messages, (i, j), above, joint)
        kind = alike.kind(i, j)
        pairs[kind] = np.minimum(pairs[kind], total) if kind in pairs else total
    strategies: dict[int, Array] = {}
    for node, vector in joint.items():
        first = alike.like[node]
        strategies[first] = np.minimum(strategies[first], vector) if first in strategies else vector
    least = float("inf")
    for i, j in edges:
        matrix, total = graph.adjacent[i][j], pairs[alike.kind(i, j)]
        dead = (total >= room) & np.isfinite(matrix)
        if dead.any():
            graph.set_edge(i, j, graph.tables.intern(np.where(dead, np.inf, matrix)))
            least = min(least, float(total[dead].min()))
    for node, cost in list(graph.cost.items()):
        vector = strategies[alike.like[node]]
        dead = (vector >= room) & np.isfinite(cost)
        least = min(least, float(vector[dead].min(initial=np.inf)))
        graph.forbid(node, dead)
    return bound + least


def _pairs_above(
    graph: Graph,
    messages: Messages,
    edge: tuple[int, int],
    above: Mapping[int, Array],
    joint: dict[int, Array],
) -> Array:
    """[S_i, S_j] What every pair takes above the bound; to that of each strategy in `joint`, what the edge adds."""
    i, j = edge
    extra = graph.adjacent[i][j] - messages[j, i][:, None] - messages[i, j]
    extra -= extra.min()
    joint[i] += extra.min(axis=1)
    joint[j] += extra.min(axis=0)
    return extra + above[i][:, None] + above[j]


WORTHWHILE = 0.2
"""Share of the entries that a pruning must remove for another relaxation."""

Expand = Callable[[dict[int, int]], dict[int, int]]


class Branches:
    """best: of the nodes of the graph as it was given, a choice that costs less than the known one; None: none was
    found. cost: of it, or of the known one. bound: no choice that costs less than `cutoff` costs less. left:
    relaxations that may still be solved."""

    def __init__(self, graph: Graph, cost: float, tolerance: float, deadline: float, most: int) -> None:
        """cost: of a choice that is known. most: relaxations to solve; what is open then keeps the bound it has."""
        self.best: dict[int, int] | None = None
        self.cost = cost
        self.left = most
        self._tolerance, self._deadline = tolerance, deadline
        self.bound = self._explored(graph.twin(), dict, -float("inf"))

    @property
    def cutoff(self) -> float:
        """What costs this much or more need not be looked at."""
        return self.cost - self._tolerance / 2

    def _offer(self, graph: Graph, choice: Mapping[int, int], expand: Expand) -> None:
        cost = graph.value(dict(choice))
        if cost < self.cost:
            self.best, self.cost = expand(graph.expand(choice)), cost

    def _explored(self, graph: Graph, expand: Expand, known: float) -> float:
        """A bound for all choices of a presolved graph. known: one that is proven."""
        if not graph.cost:
            self._offer(graph, {}, expand)
            return graph.constant
        if not self.left or time.monotonic() > self._deadline:
            return known
        self.left -= 1
        relaxation = Relaxation(graph)
        relaxed = relaxation.solve(self._deadline)
        if relaxed is None:
            return self.cutoff if relaxation.impossible else known
        self._offer(graph, descend(graph, relaxed.choice), expand)
        bound = max(known, bound_of(graph, relaxed.messages))
        if bound >= self.cutoff or relaxed.integral:
            return bound
        onward: Expand = lambda choice: expand(graph.expand(choice))
        pruned = graph.twin()
        cutoff = self.cutoff
        if not self._reduced(pruned, relaxed.messages, bound):
            return cutoff
        if pruned.entries() <= (1.0 - WORTHWHILE) * graph.entries():
            return min(cutoff, self._explored(pruned, onward, bound))
        return max(bound, self._branched(graph, relaxed, bound, onward))

    def _branched(self, graph: Graph, relaxed: Relaxed, bound: float, expand: Expand) -> float:
        shares = relaxed.by_node(graph)
        # Nodes of which branches are bounded, to say which is branched on.
        tried = sorted(shares, key=lambda node: (float(shares[node].max()), node))[:6]
        node = max(tried, key=lambda node: self._least_bound(graph, node, shares[node], relaxed.messages))
        least = float("inf")
        for keep in _parts(shares[node]):
            least = min(least, self._branch(graph, node, keep, relaxed.messages, bound, expand))
        return least

    def _least_bound(self, graph: Graph, node: int, shares: Array, messages: Messages) -> float:
        """The least bound of branches at `node`, after a pass of messages."""
        least = float("inf")
        for keep in _parts(shares):
            if len(keep) == 1:
                try:
                    branch, own = _restricted(graph, node, keep, messages)
                except DeadEnd:
                    continue
                passing = MessagePassing(branch)
                settled = passing.ascend(passing.packed(own), 1, self._deadline)
                least = min(least, passing.lower_bound(settled))
        return least

    def _branch(
        self, graph: Graph, node: int, keep: Index, messages: Messages, known: float, expand: Expand
    ) -> float:
        cutoff = self.cutoff
        try:
            branch, own = _restricted(graph, node, keep, messages)
        except DeadEnd:
            return cutoff
        passing = MessagePassing(branch)
        # Of messages in a branch, from the dual values of the whole.
        settled = passing.ascend(passing.packed(own), 5, self._deadline)
        own_bound = passing.lower_bound(settled)
        bound = max(known, own_bound)
        if bound >= cutoff:
            return bound
        if not self._reduced(branch, passing.unpacked(settled), own_bound):
            return cutoff
        return min(cutoff, self._explored(branch, expand, bound))

    def _reduced(self, graph: Graph, messages: Messages, bound: float) -> bool:
        """Without what the messages, whose bound this is, prove to cost too much; False: nothing is left."""
        try:
            prune(graph, messages, bound, self.cutoff)
            presolve(graph, self._deadline)
        except DeadEnd:
            return False
        return True


def _parts(shares: Array) -> Iterator[Index]:
    """The strategies one by one that have weight, the most first; and all others."""
    order = np.argsort(-shares, kind="stable")
    # Weight from which on a strategy is a branch of its own.
    count = int((shares[order] >= 0.01).sum())
    for place in order[:count]:
        yield np.array([place])
    if count < len(order):
        yield np.sort(order[count:])


def _restricted(graph: Graph, node: int, keep: Index, messages: Messages) -> tuple[Graph, Messages]:
    """The branch, and the messages for what is left of it. Raises DeadEnd."""
    branch = graph.twin()
    branch.restrict(node, keep)
    propagate(branch)
    own = dict(messages)
    for step in branch.trail:
        assert isinstance(step, Restrict)
        for other in branch.adjacent[step.node]:
            own[other, step.node] = own[other, step.node][step.keep]
    return branch, own
