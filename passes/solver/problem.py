"""The labelling problem that the search solves: arrays only, no graph of tensors.

Choose one strategy per node. The cost is the sum of node costs and edge costs; at every time step the usages
of the nodes live there may not exceed the limit. This is the format of the ASPLOS/EuroSys 2025 contest on
intra-operator parallelism (iopddl), with `inf` for what is impossible.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

Array = NDArray[np.float64]
Index = NDArray[np.intp]
BLOCK = 1 << 20
"""Entries of the largest temporary array of a blocked operation."""


class Tables:
    """Interns arrays, and memoises operations on interned ones. All results are interned and read-only.

    Most nodes of a deep model are copies of a few hundred, so the same min-plus product, restriction or comparison
    comes up once per layer. Interned arrays are compared by identity, which makes those memo look-ups."""

    def __init__(self, above: Tables | None = None) -> None:
        """above: tables whose arrays are known here too; what they say of one array is computed there, once for all."""
        self._above = above
        self._by_digest: dict[Hashable, Array] = {}
        self._interned: dict[int, Array] = {}
        self._memo: dict[Hashable, object] = {}
        self.entries = 0
        """Of all arrays that are held."""

    @property
    def size(self) -> int:
        """Number of distinct arrays held."""
        return len(self._interned)

    def intern(self, array: Array) -> Array:
        """The one array with this shape and these values."""
        if self._holds(array) or self._of(array) is not self:
            return array
        array = np.ascontiguousarray(array, dtype=np.float64)
        digest = array.shape, hash(array.tobytes()), int(array.view(np.uint64).sum())
        known = self._by_digest.get(digest)
        if known is None and self._above is not None:
            known = self._above._by_digest.get(digest)
        if known is None:
            known = array.copy()
            known.flags.writeable = False
            self._by_digest[digest] = known
            self._interned[id(known)] = known
            self.entries += known.size
        return known

    def _holds(self, array: Array) -> bool:
        return self._interned.get(id(array)) is array

    def _of(self, array: Array) -> Tables:
        """The tables that know `array` by itself: those above if it is theirs."""
        return self._above if self._above is not None and self._above._holds(array) else self

    def _array(self, key: Hashable, make: Callable[[], Array]) -> Array:
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self.intern(make())
        assert isinstance(found, np.ndarray)
        return found

    def transpose(self, matrix: Array) -> Array:
        own = self._of(matrix)
        key = ("T", id(matrix))
        found = own._memo.get(key)
        if isinstance(found, np.ndarray):
            return found
        result = own.intern(np.ascontiguousarray(matrix.T))
        own._memo[key] = result
        own._memo["T", id(result)] = matrix
        return result

    def take(self, table: Array, keep: Index) -> Array:
        """`table[keep]`."""
        return self._array(("take", id(table), keep.tobytes()), lambda: table[keep])

    def add(self, left: Array, right: Array) -> Array:
        return self._array(("+", id(left), id(right)), lambda: left + right)

    def project(self, matrix: Array, cost: Array) -> Array:
        """[a] = min over k of matrix[a, k] + cost[k]."""
        return self._array(("min", id(matrix), id(cost)), lambda: (matrix + cost).min(axis=1))

    def min_plus(self, left: Array, cost: Array, right: Array) -> Array:
        """[a, b] = min over k of left[a, k] + cost[k] + right[k, b]."""
        return self._array(("min+", id(left), id(cost), id(right)), lambda: _min_plus(left + cost, right))

    def possible(self, matrix: Array) -> NDArray[np.bool_]:
        """[a]: row a has a finite entry."""
        memo, key = self._of(matrix)._memo, ("possible", id(matrix))
        found = memo.get(key)
        if found is None:
            found = memo[key] = np.isfinite(matrix).any(axis=1)
        assert isinstance(found, np.ndarray)
        return found

    def once(self, name: str, arrays: tuple[Array, ...], make: Callable[[], T]) -> T:
        """What `make` returns, the operation `name` of these arrays: made once for the same objects."""
        key = (name, *map(id, arrays))
        if key not in self._memo:
            self._memo[key] = arrays, make()  # with the arrays, so that their ids stay their own
        _, made = cast(tuple[object, T], self._memo[key])
        return made

    def function(self, matrix: Array) -> Index | None:
        """The column of each row, if every row has exactly one finite entry; otherwise None."""
        memo, key = self._of(matrix)._memo, ("function", id(matrix))
        if key not in memo:
            finite = np.isfinite(matrix)
            single = bool((finite.sum(axis=1) == 1).all())
            memo[key] = finite.argmax(axis=1) if single else None
        found = memo[key]
        return found if isinstance(found, np.ndarray) else None

    def separate(self, matrix: Array) -> tuple[Array, Array] | None:
        """(rows, columns) with matrix[a, b] = rows[a] + columns[b], if there are such; otherwise None."""
        own = self._of(matrix)
        key = ("separate", id(matrix))
        if key not in own._memo:
            parts = _separate(matrix)
            own._memo[key] = parts and (own.intern(parts[0]), own.intern(parts[1]))
        found = own._memo[key]
        return found if isinstance(found, tuple) else None


def _min_plus(left: Array, right: Array) -> Array:
    columns = np.ascontiguousarray(left.T)
    result = columns[0][:, None] + right[0]
    term = np.empty_like(result)
    for k in range(1, len(columns)):
        np.add(columns[k][:, None], right[k], out=term)
        np.minimum(result, term, out=result)
    return result


def _separate(matrix: Array) -> tuple[Array, Array] | None:
    if not np.isfinite(matrix).all():
        return None
    rows = matrix[:, 0] - matrix[0, 0]
    columns = matrix[0]
    rounding = 4 * np.finfo(np.float64).eps * np.abs(matrix).max()
    if np.abs(matrix - rows[:, None] - columns).max() > rounding:
        return None
    return rows, columns


@dataclass(frozen=True, eq=False)
class Problem:
    """One strategy per node, least total cost, within a limit at every time step.

    node_costs:  per node [S_i]; inf is impossible.
    edges:       pairs (i, j), i != j. Parallel edges and both orientations may occur; their costs add up.
    edge_costs:  per edge [S_i, S_j]; inf is impossible. One array object may serve many edges.
    intervals:   per node the half-open interval of time steps at which it is live; may be empty.
    usages:      per node [S_i], what it uses while it is live (bytes), not negative.
    limit:       of the sum of usages at every step; None is no limit.
    tables:      what is known of its arrays; shared by problems made from it with `replace`, most of whose arrays are
                 the same.
    """

    node_costs: tuple[Array, ...]
    edges: tuple[tuple[int, int], ...] = ()
    edge_costs: tuple[Array, ...] = ()
    intervals: tuple[tuple[int, int], ...] = ()
    usages: tuple[NDArray[np.float64] | NDArray[np.int64], ...] = ()
    limit: float | None = None
    tables: Tables = field(default_factory=Tables)

    def __post_init__(self) -> None:
        assert len(self.edges) == len(self.edge_costs)
        assert self.limit is None or len(self.intervals) == len(self.usages) == len(self.node_costs)
        for (i, j), matrix in zip(self.edges, self.edge_costs, strict=True):
            assert i != j, f"edge from node {i} to itself"
            assert matrix.shape == (len(self.node_costs[i]), len(self.node_costs[j])), (i, j, matrix.shape)

    def cost(self, choice: Sequence[int]) -> float:
        """Total of node and edge costs of one strategy index per node; inf if it uses an impossible one."""
        total = float(sum(float(vector[a]) for vector, a in zip(self.node_costs, choice, strict=True)))
        for (i, j), matrix in zip(self.edges, self.edge_costs, strict=True):
            total += float(matrix[choice[i], choice[j]])
        return total

    def peak(self, choice: Sequence[int]) -> tuple[float, int]:
        """The largest usage over all time steps, and the first step at which it occurs. (0.0, 0) if none."""
        steps = self.steps
        if not len(steps):
            return 0.0, 0
        profile = self.profile(choice)
        top = int(np.argmax(profile))
        return float(profile[top]), int(steps[top])

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether the choice stays within the limit, if there is one."""
        return self.limit is None or self.peak(choice)[0] <= self.limit

    def profile(self, choice: Sequence[int]) -> Array:
        """Usage [T] at each of `steps`."""
        return self._over_steps(lambda node: self.usages[node][choice[node]])

    def least_profile(self) -> Array:
        """[T]: at each of `steps` a lower bound on the usage, every node at its least possible strategy."""
        possible = lambda node: self.usages[node][np.isfinite(self.node_costs[node])]
        return self._over_steps(lambda node: min(possible(node), default=0.0))

    def _over_steps(self, used: Callable[[int], float]) -> Array:
        total = np.zeros(len(self.steps) + 1)
        for node, (first, last) in self.live.items():
            nbytes = float(used(node))
            total[first] += nbytes
            total[last] -= nbytes
        return np.cumsum(total)[:-1]

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """The steps at which some node's life starts, ascending: the peak is always at one of them."""
        starts = {start for start, end in self.intervals if start < end}
        return np.array(sorted(starts), dtype=np.int64)

    @cached_property
    def live(self) -> dict[int, tuple[int, int]]:
        """Per node with a life, the half-open range of positions in `steps` at which it is live."""
        spans = np.array(self.intervals, dtype=np.int64).reshape(-1, 2)
        first = np.searchsorted(self.steps, spans[:, 0])
        last = np.searchsorted(self.steps, spans[:, 1])
        return {
            node: (int(first[node]), int(last[node]))
            for node in range(len(spans))
            if first[node] < last[node] and spans[node, 0] < spans[node, 1]
        }


@dataclass(frozen=True)
class Solution:
    """A choice, and what is proven of it.

    choice:      strategy index per node.
    cost:        `Problem.cost(choice)`.
    lower_bound: proven: no choice within the limit costs less.
    gap:         (cost - lower_bound) / |cost|; 0.0 where both agree.
    status:      "optimal" if the gap is no more than was asked for (and rounding), else "feasible".
    prices:      what a unit of room is worth about, by row (position in `Problem.steps`), where a limit binds.
    others:      choices that were found on the way, the cheapest first.
    """

    choice: tuple[int, ...]
    cost: float
    lower_bound: float
    gap: float
    status: Literal["optimal", "feasible"]
    prices: Mapping[int, float] = field(default_factory=dict[int, float])
    others: tuple[tuple[int, ...], ...] = ()


class Infeasible(Exception):
    """No choice is possible. For whoever builds the problem to translate; not for users.

    kind "edges":   `nodes` cannot all have a strategy at once; the first is where the contradiction appeared.
    kind "memory":  at time `step` any choice uses at least `bound`; `nodes` are those live there, largest
                    usage first, in a choice with the least usage at that step. If no single step exceeds the limit
                    by itself (several together do), `bound` equals the limit.
    kind "time":    no choice was found within the time limit, and none was excluded.
    """

    def __init__(
        self,
        kind: Literal["edges", "memory", "time"],
        nodes: Sequence[int] = (),
        bound: float = 0.0,
        step: int = 0,
    ) -> None:
        super().__init__(f"{kind}: nodes {list(nodes)[:10]}, bound {bound}, step {step}")
        self.kind: Literal["edges", "memory", "time"] = kind
        self.nodes = tuple(nodes)
        self.bound = bound
        self.step = step
