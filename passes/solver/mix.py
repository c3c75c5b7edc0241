"""The best mix of known choices: at every node the strategy of one of them, within the memory limit.

Copies of a layer have the same best strategies at any one price of memory; a plan just inside the limit has some
layers the one way and some the other. With a few strategies left per node that is a small problem, solved as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .problem import Array, Infeasible, Problem
from .solve import solve

__all__ = ["mixed", "restricted"]

GAP = 1e-4
"""Relative gap at which the mix is good enough: layers are discrete, so it seldom vanishes."""


def mixed(problem: Problem, choices: Sequence[Sequence[int]], seconds: float) -> tuple[int, ...] | None:
    """The choice of least `problem.cost` that takes, at every node, a strategy that some of `choices` takes.

    Searches for about `seconds` at most; None if no mix was found that fits.
    """
    keep = [sorted(set(strategies)) for strategies in zip(*choices, strict=True)]
    small = restricted(problem, keep)
    positions = [[k.index(a) for k, a in zip(keep, choice, strict=True)] for choice in choices]
    fitting = [p for p in positions if small.fits(p)]
    warm = min(fitting, key=small.cost, default=None)
    try:
        found = solve(small, time_limit=seconds, relative_gap=GAP, warm=warm)
    except Infeasible:
        return None
    return tuple(k[a] for k, a in zip(keep, found.choice, strict=True))


def restricted(problem: Problem, keep: Sequence[Sequence[int]]) -> Problem:
    """`problem` with the strategies `keep` of every node; one array per (array, strategies)."""
    made: dict[tuple[int, ...], Array] = {}

    def part(array: Array | NDArray[np.int64], *ends: Sequence[int]) -> Array:
        key = (id(array), *(a for end in ends for a in (-1, *end)))
        if key not in made:
            made[key] = np.asarray(array[np.ix_(*ends)], dtype=np.float64)
        return made[key]

    pairs = zip(problem.edges, problem.edge_costs, strict=True)
    return replace(
        problem,
        node_costs=tuple(part(c, k) for c, k in zip(problem.node_costs, keep, strict=True)),
        edge_costs=tuple(part(matrix, keep[i], keep[j]) for (i, j), matrix in pairs),
        usages=tuple(part(u, k) for u, k in zip(problem.usages, keep, strict=True)) if problem.usages else (),
    )
