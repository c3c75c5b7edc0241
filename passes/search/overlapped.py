"""Search where communication may hide behind computation: the exposed time of a phase is in the objective, and every
choice is a plane of lower bounds as a function of prices.

With t the seconds of a choice by kind, the step takes the sum of t and, per phase p, what its longest path holds less
than all of it (`passes.search.step_kinds`):

    T(x) = 1 . t + sum_p max_f (A_p t)_f  =  max over shares m_p of paths of  (1 + sum_p m_p A_p) . t

For fixed m that is a sum of node and edge costs, which `solve` minimises exactly, and a lower bound of T. In large
problems memory has prices v in the same way, instead of rows that every reduction must respect. The
highest bound is found by cutting planes: each solution is a plane, the next (m, v) is the highest point under all
planes [Kelley 1960]. All of m on the path of all computing, v = 0, where computation takes longer in every phase and
memory does not bind, comes first: if its solution is like that indeed, it is optimal.

A choice x with exposed seconds, computing C_p, hideable communication G_p and memory use[t] gives, for shares m in
[0,1] and prices v >= 0 (seconds for using the limit once more),

    L(x; m, v) = exposed + sum_p ((1 - e m_p) C_p + (1 - e (1 - m_p)) G_p) + sum_t v_t (use[t] / limit - 1)

min over all x of L is a lower bound of any choice that fits; the planes of some x bound that from above.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from passes.search.search_space import CostKinds, recombined
from passes.solver.graph import Graph
from passes.solver.problem import Array, Problem, Solution, Tables
from passes.solver.solve import ROUNDING, mixed, no_room, restricted, solve


@dataclass(frozen=True)
class Point:
    """shares: m, all phases' paths one behind the other. prices: v by memory row (position in `Problem.steps`); rows
    without one cost nothing."""

    shares: tuple[float, ...]
    prices: Mapping[int, float] = field(default_factory=dict[int, float])

    @staticmethod
    def first(paths: Sequence[Array]) -> Point:
        """All weight on the first path of each phase."""
        return Point(tuple(float(place == 0) for rows in paths for place in range(len(rows))))

    def towards(self, other: Point, share: float) -> Point:
        """The point at `share` of the way to `other`."""
        shares = tuple(a + share * (b - a) for a, b in zip(self.shares, other.shares, strict=True))
        prices = {
            row: a + share * (other.prices.get(row, 0.0) - a)
            for row in sorted({*self.prices, *other.prices})
            for a in (self.prices.get(row, 0.0),)
        }
        return Point(shares, prices)

    def weights(self, paths: Sequence[Array]) -> list[float]:
        """Per kind of `CostKinds`."""
        moved = np.asarray(self.shares) @ np.concatenate(paths)
        return [round(1.0 + float(w), 12) for w in moved]


@dataclass(frozen=True, eq=False)
class _Plane:
    """L of one choice: constant + slopes . m + sum_t v_t over[t]. over: use / limit - 1 by row; empty: no limit."""

    constant: float
    slopes: tuple[float, ...]
    over: Array

    @staticmethod
    def of(totals: Array, paths: Sequence[Array], over: Array) -> _Plane:
        slopes = np.concatenate(paths) @ totals
        return _Plane(float(totals.sum()), tuple(float(slope) for slope in slopes), over)


Rows = tuple[int, ...]
"""Memory rows that have one price: of equal layers, each of which holds too much in its turn."""


def highest_point(
    planes: Sequence[_Plane], phases: Sequence[int], rows: Sequence[Rows], cap: float
) -> tuple[float, Point] | None:
    """max over shares m and v in [0, cap]^rows of the least plane, and where it is. phases: paths of each.

    None if HiGHS cannot tell: prices of memory that have risen far make planes steeper than its tolerances allow."""
    scale = max(max(abs(plane.constant) for plane in planes), 1e-300)  # HiGHS's tolerances are absolute
    slopes = [
        [*(s / scale for s in plane.slopes), *(float(plane.over[list(some)].sum()) for some in rows)]
        for plane in planes
    ]
    paths = len(planes[0].slopes)
    owner = np.repeat(np.arange(len(phases)), phases)
    whole = [[0.0, *(float(o == phase) for o in owner), *[0.0] * len(rows)] for phase in range(len(phases))]
    from scipy.optimize import linprog

    result = linprog(
        [-1.0, *[0.0] * (paths + len(rows))],
        A_ub=[[1.0, *(-s for s in row)] for row in slopes],  # t <= constant + slopes . (m, v)
        b_ub=[plane.constant / scale for plane in planes],
        A_eq=whole,
        b_eq=[1.0] * len(phases),
        bounds=[(None, None), *[(0.0, 1.0)] * paths, *[(0.0, cap / scale)] * len(rows)],
        method="highs",
    )
    if not result.success:
        return None
    values = [float(v) for v in result.x]
    shares, prices = values[1 : 1 + paths], values[1 + paths :]
    named = dict[int, float]()
    for some, v in zip(rows, prices, strict=True):
        for row in some if v > 0 else ():
            named[row] = named.get(row, 0.0) + v * scale
    return values[0] * scale, Point(tuple(shares), named)


def peaks(over: Array) -> list[Rows]:
    """Where most is held, if that is too much; and the peaks together that are over the limit by half as much."""
    if not over.size or over.max() <= 0.0:
        return []
    high = np.flatnonzero(over > 0.5 * over.max())
    runs = np.split(high, np.flatnonzero(np.diff(high) > 1) + 1)
    together = tuple(int(run[np.argmax(over[run])]) for run in runs)
    return [(int(np.argmax(over)),), together]


def charged(problem: Problem, prices: Mapping[int, float]) -> Problem:
    """`problem` without its limit, but with sum_t v_t use[t] / limit in its node costs; one array per
    (cost array, usage array, price), so that copies of a layer stay copies."""
    free = replace(problem, limit=None)
    if not prices:
        return free
    assert problem.limit is not None
    slope = np.zeros(len(problem.steps) + 1)
    for row, price in prices.items():
        slope[row + 1] += price / problem.limit
    before = np.cumsum(slope)  # of the prices of the rows before each
    made: dict[tuple[int, int, float], Array] = {}
    costs = list(problem.node_costs)
    for node, (first, last) in problem.live.items():
        price = float(before[last] - before[first])
        if price <= 0.0:
            continue
        key = id(problem.node_costs[node]), id(problem.usages[node]), price
        if key not in made:
            made[key] = costs[node] + price * np.asarray(problem.usages[node], dtype=np.float64)
        costs[node] = made[key]
    return replace(free, node_costs=tuple(costs))


INNER_GAP, GAP_SHARE = 1e-4, 0.1
"""Relative gap of all solutions but the first, and what share of the gap between cost and bound it may be: planes need
not be exact to bound."""
LARGE, LARGE_GAP = 5_000_000, 5e-3
"""Different edge entries above which a relative gap is left, and how much."""
ROUNDS = 30
"""Most problems solved."""
ROWS_INSIDE = 2_000_000
"""Edge entries of the largest problem that is solved with its memory rows; in larger ones memory has prices."""
UNMOVED = 0.1
"""Share of what the bound may still rise by that the highest point must have fallen by, to go half way again."""


def solve_overlapped(
    problem: Problem,
    kinds: CostKinds,
    *,
    time_limit: float = 60.0,
    rows_inside: int = ROWS_INSIDE,
    warm: tuple[int, ...] | None = None,
    relative_gap: float = 0.0,
    known: Iterable[tuple[int, ...]] = (),
    hear: Callable[[Solution], bool] = lambda _: False,
    enough: float = 0.0,
) -> Solution:
    """The choice of least T (see above) within the memory limit; `Solution.cost` and `lower_bound` are of T.

    Where nothing can hide, T is `problem.cost`. Stops when the bound meets the best T or cannot rise by more than
    5e-4 of it, or after about `time_limit` seconds. What is left of the gap is real: T is convex but choices are
    discrete. rows_inside: see ROWS_INSIDE. warm: a choice known to be good. relative_gap: what may be left of the gap
    when it stops; enough: of `solve`. known: what other searches found: where mixes of it are best is solved first.
    hear: told of the best choice and its bound where they are not the last; whether they are good enough. Raises
    Infeasible.
    """
    small = sum(matrix.size for matrix in problem.edge_costs) <= rows_inside
    hides = kinds.hides()
    if not hides and (small or problem.limit is None):
        return solve(problem, time_limit=time_limit, warm=warm, relative_gap=relative_gap, enough=enough)
    search = CuttingPlanes(problem, kinds, time.monotonic() + time_limit, small, relative_gap, enough)
    if warm is not None:
        search.offer(warm)
    for choice in known:
        search.add(choice)
    search.known = len(search.found)
    search.run(hear)
    return search.solution()


class CuttingPlanes:
    """The best choice that fits, the best bound and its point, all choices so far, and their planes.

    worth: seconds for using the limit once more at a row, by the best bound. known: choices of other searches."""

    def __init__(
        self,
        problem: Problem,
        kinds: CostKinds,
        deadline: float,
        rows_inside: bool,
        relative_gap: float,
        enough: float = 0.0,
    ) -> None:
        self.problem, self.kinds, self.deadline = problem, kinds, deadline
        self.rows_inside, self.enough = rows_inside, enough
        self.mixes = rows_inside or problem.limit is None
        entries = sum({id(matrix): matrix.size for matrix in problem.edge_costs}.values())
        self.relative_gap = max(relative_gap, LARGE_GAP) if entries > LARGE else relative_gap
        self.choice: tuple[int, ...] = ()
        self.cost, self.bound = np.inf, -np.inf
        self.bound_at = Point.first(kinds.paths)
        self.found: list[tuple[int, ...]] = []
        self.planes: list[_Plane] = []
        self.rows: list[Rows] = []
        self.cap, self.highest = 0.0, np.inf
        self.has_room, self.known = False, 0
        self.worth: dict[int, float] = {}

    def run(self, hear: Callable[[Solution], bool] = lambda _: False) -> None:
        """Rounds until the bound meets the cost, is near enough to it, or cannot rise any more. hear: told of what is
        known after each but the last; whether that is enough."""
        found = self._highest_point() if self.planes else None
        point: Point | None = self.bound_at if found is None else found[1]
        if found is not None and self.mixes and len(self.planes) > 1:
            self.highest, point = self._of_mixes(found)
        weighs = self.kinds.hides() or not self.rows_inside
        for _ in range(ROUNDS if weighs else 1):
            self._solve_at(point)
            if self._gap() <= max(ROUNDING, self.relative_gap) or time.monotonic() >= self.deadline:
                break
            known = Solution(self.choice, self.cost, self.bound, self._gap(), "feasible")
            if self.choice and hear(known):
                break
            point = self._next()
            if point is None:
                break
        if not self.choice:
            self._with_rows()

    def solution(self) -> Solution:
        bound = min(self.bound, self.cost)
        gap = (self.cost - bound) / max(abs(self.cost), 1e-300)
        status = "optimal" if gap <= ROUNDING else "feasible"
        others = [each for each in dict.fromkeys(self.found[self.known :]) if each != self.choice]
        fitting = filter(self.problem.fits, others)
        ordered = sorted(fitting, key=lambda choice: self.kinds.seconds(self.problem, choice))
        return Solution(self.choice, self.cost, bound, gap, status, others=tuple(ordered))

    def _gap(self) -> float:
        return (self.cost - self.bound) / max(abs(self.cost), 1e-300) if self.choice else np.inf

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 1.0)

    def _weighted(self, point: Point) -> Problem:
        return self.kinds.weighted(self.problem, point.weights(self.kinds.paths))

    def _solve_at(self, point: Point) -> None:
        weighted = self._weighted(point)
        inner = weighted if self.rows_inside else charged(weighted, point.prices)
        found = self._solved(inner, self._inner_gap())
        bound = found.lower_bound - sum(point.prices.values())
        if bound > self.bound:
            self.bound, self.bound_at = bound, point
            self.worth = {row: price * (self.problem.limit or 0.0) for row, price in found.prices.items()}
        self.add(found.choice)
        self._mix()

    def _inner_gap(self) -> float:
        """The first may be the answer; of others a share of what is not proven yet."""
        if not self.planes:
            return self.relative_gap
        return max(self.relative_gap, INNER_GAP, min(LARGE_GAP, GAP_SHARE * self._gap()))

    def _solved(self, inner: Problem, gap: float) -> Solution:
        return solve(
            inner, time_limit=self._left(), relative_gap=gap, warm=self.choice or None, enough=self.enough
        )

    def add(self, choice: tuple[int, ...]) -> None:
        """A choice that was found, and its plane."""
        limit = self.problem.limit
        over = np.zeros(0) if limit is None else self.problem.profile(choice) / limit - 1.0
        plane = _Plane.of(self.kinds.totals(self.problem, choice), self.kinds.paths, over)
        if new := [some for some in dict.fromkeys(peaks(over)) if some not in self.rows]:
            self.rows += new
            # The largest price of memory at first, as a share of the cost; and by what it grows where
            # that is too small.
            self.cap = max(self.cap, 0.1 * abs(plane.constant))
        self.found.append(choice)
        self.planes.append(plane)
        self.offer(choice)

    def offer(self, choice: Sequence[int]) -> None:
        """Take a choice, or a mix of it with the best one, if it fits and is better."""
        candidates = [tuple(choice)]
        if self.choice:
            candidates.append(recombined(self.problem, self.kinds, self.choice, candidates[0]))
        for candidate in candidates:
            seconds = self.kinds.seconds(self.problem, candidate)
            if seconds < self.cost and self.problem.fits(candidate):
                self.cost, self.choice = seconds, candidate

    def _mix(self) -> None:
        """Offer the best mix of the last choices, where they differ in what fits."""
        if self.rows:
            self._offer_mix(self.found[-4:], self._mix_seconds())

    def _mix_seconds(self) -> float:
        # Share of the time left, and seconds at most, for one mix.
        return min(5.0, 0.1 * self._left())

    def _offer_mix(self, choices: Sequence[tuple[int, ...]], seconds: float) -> None:
        if len(choices) > 1:
            mix = mixed(self._weighted(self.bound_at), choices, seconds)
            if mix is not None:
                self.offer(mix)

    def _next(self) -> Point | None:
        """Where to solve next; None: nowhere, the bound cannot rise by enough."""
        found = self._highest_point()
        if found is not None and not self.choice and self._at_cap(found[1]) and len(self.planes) > 1:
            # The planes of choices that do not fit have no highest point: is there room at all?
            self.refuse_if_none_fits()
            self.cap *= 8.0
            found = self._highest_point()
        if found is None:
            return None
        if self.mixes and len(self.planes) > 1:
            found = self._of_mixes(found)
        highest, point = found
        # Share of the cost by which the bound may still rise when more solving is not worth the wait. The
        # gap that stays is stated in the plan.
        if self.choice and highest <= self.bound + max(5e-4, self._inner_gap()) * self.cost:
            return None
        unmoved = bool(self.choice) and self.highest - highest <= UNMOVED * (highest - self.bound)
        self.highest = highest
        return self.bound_at.towards(point, self._step(unmoved))

    def refuse_if_none_fits(self) -> None:
        """Raises Infeasible, of memory. Asked once."""
        if self.has_room:
            return
        reason = no_room(self.problem, Graph.of(self.problem, Tables()), self.deadline)
        if reason is not None:
            raise reason
        self.has_room = True

    def _of_mixes(self, found: tuple[float, Point]) -> tuple[float, Point]:
        """The highest point under the planes of all mixes of the choices so far: those that cut are added. A mix is
        found in little time, so fewer whole problems are solved."""
        choices = list(dict.fromkeys(self.found))
        keep = [sorted(set(strategies)) for strategies in zip(*choices, strict=True)]
        small = restricted(self.problem, dict(enumerate(keep)))
        for _ in range(ROUNDS):
            highest, point = found
            weighted = self.kinds.weighted(small, point.weights(self.kinds.paths))
            mix = solve(weighted, time_limit=self._left(), relative_gap=INNER_GAP)
            choice = tuple(k[a] for k, a in zip(keep, mix.choice, strict=True))
            if mix.cost >= (1.0 - INNER_GAP) * highest or choice in self.found:
                break
            self.add(choice)
            found = self._highest_point() or found
        return found

    def _step(self, unmoved: bool) -> float:
        """With one plane the highest point is a corner; with few it swings from side to side, until planes stop cutting
        it off: halfway, again and again, would only halve what is left to be proven."""
        if unmoved:
            return 1.0
        if len(self.planes) == 1:
            # How far to go from the best point so far to the highest under all planes [Ben-Ameur and
            # Neto 2007, in-out]: under those of mixes, which tell nearly where the bound is highest,
            # most of the way.
            return 0.25
        return 0.9 if self.mixes else 0.5

    def _highest_point(self) -> tuple[float, Point] | None:
        return highest_point(self.planes, [len(rows) for rows in self.kinds.paths], self.rows, self.cap)

    def _at_cap(self, point: Point) -> bool:
        return any(price >= (1.0 - ROUNDING) * self.cap for price in point.prices.values())

    def _with_rows(self) -> None:
        """No choice fitted at any price: search with the rows. Raises Infeasible if it finds none either."""
        found = solve(self._weighted(self.bound_at), time_limit=self._left())
        self.bound = max(self.bound, found.lower_bound)
        self.offer(found.choice)
