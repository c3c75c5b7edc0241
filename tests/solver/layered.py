"""Random problems of equal layers, forward and backward: what the search of a deep model is like, small."""

from __future__ import annotations

import numpy as np

from passes.solver.problem import Array, Problem

__all__ = ["layered"]


def layered(seed: int, layers: int, size: int = 2, room: float = 0.6) -> Problem:
    """Of every layer what is kept for its backward, and what is gone before the next; those of one layer are joined,
    and each layer with the next. The limit is `room` of what all that use most would use."""
    rng = np.random.default_rng(seed)
    kept, gone = rng.random(size), rng.random(size)
    inside, onward = rng.random((size, size)), rng.random((size, size))
    held, made = rng.integers(1, 10, size), rng.integers(1, 10, size)
    costs: list[Array] = []
    edges: list[tuple[int, int]] = []
    matrices: list[Array] = []
    intervals: list[tuple[int, int]] = []
    for layer in range(layers):
        first = 2 * layer
        costs += [kept - 0.1 * held, gone]  # to keep more takes less
        edges.append((first, first + 1))
        matrices.append(inside)
        if layer:
            edges.append((first - 1, first))
            matrices.append(onward)
        intervals += [(layer, 2 * layers - layer), (layer, layer + 1)]
    usages = (held, made) * layers
    whole = Problem(tuple(costs), tuple(edges), tuple(matrices), tuple(intervals), usages, 0.0)
    most = whole.peak([int(np.argmax(usage)) for usage in usages])[0]
    return Problem(tuple(costs), tuple(edges), tuple(matrices), tuple(intervals), usages, room * most)
