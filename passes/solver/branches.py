"""What bounds exclude: strategies and pairs that cost too much; branch and bound with the relaxation; and choices that
are improved by changing one node at a time, within the limit or towards it.

A node whose strategies share its weight is given each of them in turn, and then all others. The dual values of the
relaxation bound a branch before it is solved and forbid most of what is left of it. The best choice is known within a
few parts in ten thousand by then: what takes time is to prove that no branch holds a better one, and few branches are
looked at for that. HiGHS's own search looks for choices and for cuts first, five times as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from .graph import DeadEnd, Graph, Restrict, cost_beside
from .marginal import Relaxation, Relaxed
from .passing import MessagePassing, Messages, bound_of
from .presolve import presolve, propagate
from .problem import Array, Index
from .usage import Rows, before_each, over_ranges


def descend(graph: Graph, choice: Mapping[int, int], passes: int = 50) -> dict[int, int]:
    """Best strategy of each node in turn, given its neighbours, until nothing improves. Ignores memory rows."""
    best = dict(choice)
    order = sorted(graph.cost)
    dirty = set(order)
    for _ in range(passes):
        for node in order:
            if node not in dirty:
                continue
            dirty.discard(node)
            total = cost_beside(graph.cost[node], graph.adjacent[node].items(), best)
            a = int(np.argmin(total))
            if total[a] < total[best[node]]:
                best[node] = a
                dirty.update(graph.adjacent[node])
        if not dirty:
            break
    return best


class Search:
    """Local search over a reduced graph, its memory rows included.

    State: a choice, per node the cost [S_i] of each of its strategies given its neighbours, and what the choice uses
    above the room [rows].
    """

    def __init__(
        self, graph: Graph, rows: Rows, choice: Mapping[int, int], extra: Mapping[int, Array]
    ) -> None:
        """extra: node -> [S_i] added to its cost: prices of memory that guide a repair."""
        self.graph, self.rows, self.extra = graph, rows, extra
        self.choice = dict(choice)
        self.over = np.append(rows.profile(choice) - rows.slack, -np.inf)  # the end is no row
        self.around: dict[int, Array] = {node: self._around(node) for node in rows.nodes}
        self._ranges = {node: usage.ranges() for node, usage in rows.usages.items()}

    def _around(self, node: int) -> Array:
        cost = self.graph.cost[node] + self.extra.get(node, 0.0)
        return cost_beside(cost, self.graph.adjacent[node].items(), self.choice)

    def fits(self) -> bool:
        return float(self.over.max()) <= 0

    def possible(self) -> bool:
        """No impossible pair is chosen."""
        return all(np.isfinite(self.around[node][a]) for node, a in self.choice.items())

    def repair(self, price: float, deadline: float) -> bool:
        """Descend on cost + price * overflow, with a price that doubles until the choice fits."""
        for _ in range(40):
            if self.fits():
                return self.possible()
            if time.monotonic() > deadline:
                return False
            self.descend(price, deadline, 4)
            price *= 2
        return self.fits() and self.possible()

    def descend(self, price: float, deadline: float, passes: int = 20) -> None:
        """Best single changes for cost + price * overflow until none helps; price inf: never overflow more."""
        dirty = dict.fromkeys(self.rows.nodes)
        for _ in range(passes):
            batch, dirty = dirty, {}
            for node in batch:
                if self._improve(node, price):
                    dirty.update(dict.fromkeys(self.graph.adjacent[node]))
                    dirty[node] = None
            if not dirty or time.monotonic() > deadline:
                return
            if not np.isinf(price):
                dirty |= dict.fromkeys(self._overfilling())

    def _overfilling(self) -> list[int]:
        """The nodes whose strategy matters at a row that is overfilled."""
        count = before_each(self.over > 0)
        return [
            node for node, ranges in self._ranges.items() if (count[ranges[1::2]] > count[ranges[::2]]).any()
        ]

    def _improve(self, node: int, price: float) -> bool:
        now, around = self.choice[node], self.around[node]
        usage = self.rows.usages.get(node)
        if usage is None:
            best = int(np.argmin(around))
        else:
            peak = over_ranges(np.maximum, self.over, self._ranges[node])
            if around[now] <= around.min() and peak.max() <= 0:
                return False
            extra = usage.used - usage.used[:, [now]]
            if np.isinf(price):
                total = np.where(((peak[:, None] + extra <= 0) | (extra <= 0)).all(axis=0), around, np.inf)
            else:
                after = np.maximum(0.0, peak[:, None] + extra).sum(axis=0)
                total = around + price * (after - np.maximum(0.0, peak).sum())
            best = int(np.argmin(total))
            around = total
        least = around[now] if np.isinf(around[now]) else around[now] - 1e-12 * abs(around[now])
        if not around[best] < least:
            return False
        self._change(node, best)
        return True

    def _change(self, node: int, strategy: int) -> None:
        old = self.choice[node]
        self.choice[node] = strategy
        usage = self.rows.usages.get(node)
        if usage is not None:
            usage.add_each(self.over, usage.used[:, strategy] - usage.used[:, old])
        for other, matrix in self.graph.adjacent[node].items():
            if np.isfinite(matrix[old]).all():
                self.around[other] = self.around[other] - matrix[old] + matrix[strategy]
            else:
                self.around[other] = self._around(other)


def with_messages(graph: Graph, messages: Messages, node: int) -> Array:
    """[S] What each strategy of the node costs, with what the messages to it say of the rest."""
    total = graph.cost[node].copy()
    for other in graph.adjacent[node]:
        total += messages[other, node]
    return total


def prune(graph: Graph, messages: Messages, bound: float, cutoff: float) -> float:
    """Forbid, in place, what the messages prove to cost `cutoff` or more.

    `bound` is theirs. Returns what is proven of all that went: no choice that uses any of it
    costs less. At least `cutoff`; inf if nothing went. Whole strategies get the cost inf; arc consistency removes them.
    """
    room = cutoff - bound
    above: dict[int, Array] = {}
    for node in graph.cost:
        total = with_messages(graph, messages, node)
        above[node] = total - total.min()
    joint = {node: vector.copy() for node, vector in above.items()}
    least = float("inf")
    for i, j in graph.edges():
        matrix, total = graph.adjacent[i][j], _pairs_above(graph, messages, (i, j), above, joint)
        dead = (total >= room) & np.isfinite(matrix)
        if dead.any():
            graph.set_edge(i, j, graph.tables.intern(np.where(dead, np.inf, matrix)))
            least = min(least, float(total[dead].min()))
    for node, cost in list(graph.cost.items()):
        dead = (joint[node] >= room) & np.isfinite(cost)
        least = min(least, float(joint[node][dead].min(initial=np.inf)))
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
