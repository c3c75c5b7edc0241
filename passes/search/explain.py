"""Why no choice is possible: a small set of nodes that already contradict each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .core import Budget, solve_presolved
from .graph import DeadEnd, Graph
from .presolve import presolve, propagate
from .problem import Infeasible

__all__ = ["contradiction"]

LARGEST = 400
"""Nodes of the largest set that is made minimal; a larger one is returned as it is."""
SECONDS = 20.0


def contradiction(base: Graph, suspect: int) -> list[int]:
    """Nodes of `base` (unreduced) that have no possible joint choice, `suspect` or what is nearest to it first.

    Grows a ball around `suspect` until it has none, then drops nodes it does not need. The set is irreducible (every
    proper subset of it has a choice) unless it is large.
    """
    try:
        propagate(base.copy())
        possible = _possible
    except DeadEnd as dead:  # a contradiction that arc consistency sees: it is enough, and fast, to look for those
        possible, suspect = _consistent, dead.node
    ball = _ball(base, suspect, possible)
    if len(ball) > LARGEST:
        return ball
    needed = _shrink(base, ball, [], possible)
    return [node for node in ball if node in set(needed)]
