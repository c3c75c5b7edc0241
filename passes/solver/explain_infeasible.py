"""Why no choice is possible: a small set of nodes that already contradict each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .core import Budget, solve_presolved
from .graph import DeadEnd, Graph
from .presolve import presolve, propagate
from .problem import Infeasible

__all__ = ["contradiction"]

LARGEST = 400
"""Nodes of the largest set that is made minimal; a larger one is returned as it is."""
SMALL = 60
"""Nodes of a set that is made minimal by solving, where arc consistency would do."""
SECONDS = 20.0
"""For each question whether a set has a choice."""
_Test = Callable[[Graph, Sequence[int]], bool]


def contradiction(base: Graph, suspect: int) -> list[int]:
    """Nodes of `base` (unreduced) that have no joint choice, those nearest to the contradiction first.

    Grows a ball around `suspect` until it has none, then drops nodes it does not need: every proper subset of the
    answer has a choice, unless it is large.
    """
    possible: _Test = _possible
    try:
        propagate(base.copy())
    except (
        DeadEnd
    ) as dead:  # arc consistency sees the contradiction: it is enough, and fast, to ask only that
        possible, suspect = _consistent, dead.node
    ball = _ball(base, suspect, possible)
    if len(ball) > LARGEST:
        return ball
    needed = _shrink(base, [], ball, possible)
    if possible is _consistent and len(needed) <= SMALL:  # a part of it may do, by reasons it does not see
        needed = _shrink(base, [], needed, _possible)
    return [node for node in ball if node in set(needed)]


def _ball(base: Graph, center: int, possible: _Test) -> list[int]:
    """Nodes by distance from `center`, as few layers as have no joint choice; the whole component at worst."""
    ball, layer, seen, tried = [center], [center], {center}, 0
    while layer:
        if len(ball) >= 1.5 * tried:
            if not possible(base, ball):
                return ball
            tried = len(ball)
        layer = sorted({other for node in layer for other in base.adjacent[node]} - seen)
        seen.update(layer)
        ball += layer
    return ball


def _shrink(
    base: Graph, kept: list[int], nodes: list[int], possible: _Test, grown: bool = False
) -> list[int]:
    """The part of `nodes` that contradicts `kept`, irreducible. `grown`: `kept` may be enough by now.

    [Junker, QuickXplain, 2004.]
    """
    if grown and not possible(base, kept):
        return []
    if len(nodes) == 1:
        return nodes
    first, second = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
    of_second = _shrink(base, kept + first, second, possible, grown=True)
    of_first = _shrink(base, kept + of_second, first, possible, grown=bool(of_second))
    return of_first + of_second


def _induced(base: Graph, nodes: Sequence[int]) -> Graph:
    kept = set(nodes)
    return Graph(
        base.tables,
        {node: base.cost[node] for node in sorted(kept)},
        {node: {k: m for k, m in base.adjacent[node].items() if k in kept} for node in sorted(kept)},
    )


def _consistent(base: Graph, nodes: Sequence[int]) -> bool:
    """Arc consistency leaves every node a strategy."""
    try:
        propagate(_induced(base, nodes))
    except DeadEnd:
        return False
    return True


def _possible(base: Graph, nodes: Sequence[int]) -> bool:
    """The nodes have a joint choice, or none could be excluded in time."""
    graph = _induced(base, nodes)
    try:
        presolve(graph)
        solve_presolved(graph, Budget(time.monotonic() + SECONDS, float("inf")))
    except DeadEnd:
        return False
    except Infeasible:
        return True
    return True
