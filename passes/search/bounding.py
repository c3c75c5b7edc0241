"""Bounds with memory rows active, and forbidding what they prove too costly.

A bound is made of prices for the rows, which move them into the node costs, and messages on the graph so priced.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .dual import Messages, ascend, lower_bound, prune, zero_messages
from .graph import Graph
from .lagrange import priced
from .marginal import build_program, relax
from .presolve import presolve

__all__ = ["Bounding", "bound_by_messages", "bound_by_relaxation", "forbid_costlier"]

ROUNDS, WORTHWHILE = 4, 0.1
"""Another round of the same kind, if the last one removed this share of the entries; and how many at most."""
PASSES = 20
RELAXATION_LIMIT = 400_000
"""Edge entries of the largest relaxation that is solved for its dual values."""


@dataclass(frozen=True)
class Bounding:
    """`graph`: a priced copy; with the messages it gives a lower bound, and reasons to forbid."""

    graph: Graph
    messages: Messages
    prices: dict[int, float]

    @cached_property
    def bound(self) -> float:
        return lower_bound(self.graph, self.messages)


def bound_by_messages(graph: Graph, prices: dict[int, float], accuracy: float, until: float) -> Bounding:
    """Pass messages until `PASSES` of them raise the bound by less than `accuracy`."""
    copy = priced(graph, prices)
    messages = zero_messages(copy)
    best, gain = Bounding(copy, ascend(copy, messages, PASSES, until), prices), float("inf")
    while gain > accuracy and time.monotonic() < until:
        better = Bounding(copy, ascend(copy, messages, PASSES, until), prices)
        best, gain = better, better.bound - best.bound
    return best


def bound_by_relaxation(graph: Graph, until: float) -> Bounding | None:
    """Prices and messages as dual values of the relaxation; None if that is too large or takes too long."""
    if not graph.cost or graph.entries() > RELAXATION_LIMIT:
        return None
    relaxed = relax(graph, build_program(graph), until)
    return relaxed and Bounding(priced(graph, relaxed.prices), relaxed.messages, relaxed.prices)


def forbid_costlier(
    graph: Graph, cutoff: float, prices: dict[int, float], accuracy: float, until: float
) -> tuple[float, float]:
    """Forbid in `graph`, in place, what is proven to cost `cutoff` or more, and reduce again.

    Returns (bound, pruned): no choice costs less than `bound`; none that uses anything forbidden costs less than
    `pruned`, which is `cutoff` at least, and inf if nothing went. Raises DeadEnd if nothing is left.
    """
    bound, pruned = -float("inf"), float("inf")
    for kind in (_messages_of(graph, prices, accuracy, until), _relaxations_of(graph, until)):
        before = graph.entries()
        for bounding in kind:
            bound = max(bound, min(pruned, bounding.bound))
            least = prune(bounding.graph, bounding.messages, bounding.bound, cutoff)
            if least == float("inf"):
                break
            pruned = min(pruned, least)
            _forbid_same(graph, bounding.graph)
            presolve(graph)
            if graph.entries() > (1 - WORTHWHILE) * before:
                break
            before = graph.entries()
    return bound, pruned


def _messages_of(graph: Graph, prices: dict[int, float], accuracy: float, until: float) -> Iterator[Bounding]:
    for _ in range(ROUNDS):
        yield bound_by_messages(graph, prices, accuracy, until)


def _relaxations_of(graph: Graph, until: float) -> Iterator[Bounding]:
    for _ in range(ROUNDS):
        bounding = bound_by_relaxation(graph, until)
        if bounding is None:
            return
        yield bounding


def _forbid_same(graph: Graph, pruned: Graph) -> None:
    """Forbid in `graph` what is forbidden in its priced copy."""
    for node, vector in pruned.cost.items():
        graph.forbid(node, ~np.isfinite(vector))
        for other, matrix in pruned.adjacent[node].items():
            if node < other:
                graph.set_edge(node, other, matrix)
