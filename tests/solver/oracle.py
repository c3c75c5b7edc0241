"""Random small problems, and brute force over all their choices."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from passes.solver.problem import Array, Problem

__all__ = ["Truth", "brute_force", "chain", "on_nodes", "random_problem"]


@dataclass(frozen=True)
class Truth:
    """Least cost within the limit (inf: none), whether any choice has finite cost, the least possible peak."""

    cost: float
    possible: bool
    least_peak: float


def brute_force(problem: Problem) -> Truth:
    best, possible, least_peak = np.inf, False, np.inf
    for choice in itertools.product(*(range(len(vector)) for vector in problem.node_costs)):
        cost = problem.cost(choice)
        if not np.isfinite(cost):
            continue
        peak = problem.peak(choice)[0]
        possible, least_peak = True, min(least_peak, peak)
        if problem.limit is None or peak <= problem.limit:
            best = min(best, cost)
    return Truth(best, possible, least_peak)


def random_problem(seed: int) -> Problem:
    """At most 7 nodes of at most 4 strategies; parallel, shared, permutation and partly impossible edges."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    sizes = [int(size) for size in rng.integers(1, 5, count)]
    whole = rng.random() < 0.7

    def table(*shape: int) -> Array:
        values = rng.integers(0, 20, shape).astype(np.float64) if whole else rng.random(shape)
        if rng.random() < 0.5:
            values[rng.random(shape) < rng.choice([0.1, 0.3, 0.5])] = np.inf
        return values

    edges: list[tuple[int, int]] = []
    matrices: list[Array] = []
    shared: dict[tuple[int, int], Array] = {}
    for _ in range(int(rng.integers(0, 2 * count + 1)) if count > 1 else 0):
        i, j = (int(node) for node in rng.choice(count, 2, replace=False))
        shape = (sizes[i], sizes[j])
        if shape not in shared or rng.random() < 0.5:
            shared[shape] = table(*shape)
            if sizes[i] == sizes[j] and rng.random() < 0.3:
                shared[shape] = np.full(shape, np.inf)
                shared[shape][np.arange(sizes[i]), rng.permutation(sizes[i])] = rng.integers(0, 3)
        edges.append((i, j))
        matrices.append(shared[shape])
    lives = [sorted(int(t) for t in rng.integers(0, 6, 2)) for _ in range(count)]
    return Problem(
        tuple(table(size) for size in sizes),
        tuple(edges),
        tuple(matrices),
        tuple((start, end) for start, end in lives),
        tuple(rng.integers(0, 10, size) for size in sizes),
        None if rng.random() < 0.3 else float(rng.integers(1, 5 * count + 1)),
    )


def on_nodes(problem: Problem, nodes: set[int]) -> Problem:
    """The same without limit, with all other nodes and their edges made free."""
    kept = [e for e, (i, j) in enumerate(problem.edges) if i in nodes and j in nodes]
    return Problem(
        tuple(v if node in nodes else np.zeros(len(v)) for node, v in enumerate(problem.node_costs)),
        tuple(problem.edges[e] for e in kept),
        tuple(problem.edge_costs[e] for e in kept),
        problem.intervals,
        problem.usages,
    )


def chain(count: int, size: int, seed: int, *, skip: int, limit: float | None = None) -> Problem:
    """A chain of `count` nodes with a second edge every `skip` nodes (a residual), and three distinct matrices."""
    rng = np.random.default_rng(seed)
    matrices = [np.round(rng.random((size, size)), 3) * (1 - np.eye(size)) for _ in range(3)]
    vectors = [np.round(rng.random(size), 3) for _ in range(4)]
    edges = [(node, node + 1) for node in range(count - 1)]
    edges += [(node, node + skip) for node in range(0, count - skip, skip)]
    return Problem(
        tuple(vectors[node % 4] for node in range(count)),
        tuple(edges),
        tuple(matrices[i % 3] for i, _ in edges),
        tuple((node, node + skip) for node in range(count)),
        tuple(np.argsort(vectors[node % 4])[::-1] * 10 for node in range(count)),
        limit,
    )
