"""Choices in which all weights are stored over the same axes, whole or split over some or all of them, and most of
them read whole: data parallelism."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from passes.layout.layout import Layout
from passes.search.search_space import SearchSpace

Allowed = Mapping[int, Sequence[int]]
"""Search node -> the strategies that it may have, by their places; nodes that are not named may have all."""


def stored_alike(space: SearchSpace) -> Iterator[Allowed]:
    """For every set of axes: search node -> its strategies, of weights those that are split over these axes (over as
    many of them, and no others, as a weight can be), of their readers those that read them whole. For none and for all
    axes first without a word of readers."""
    held = {node: [strategy.results[0] for strategy in space.strategies[node]] for node in space.trained}
    axes = sorted({axis for layouts in held.values() for layout in layouts for axis in layout.axes})
    if not axes:
        return
    # Axes of which every set is listed; of more, none and all.
    counts = range(len(axes) + 1) if len(axes) <= 3 else (0, len(axes))
    readers = _reading_whole(space)
    known: list[Allowed] = []
    for chosen in itertools.chain.from_iterable(itertools.combinations(axes, count) for count in counts):
        weights = {node: _nearest(layouts, frozenset(chosen)) for node, layouts in held.items()}
        if weights not in known:
            known.append(weights)
            if len(chosen) in (0, len(axes)):
                yield weights
            yield {**weights, **readers}


def _reading_whole(space: SearchSpace) -> Allowed:
    """Ops of several operands that read a weight, or what ops of one operand make of it -> their strategies that split
    these operands over the fewest axes."""
    operands: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for edge in space.edges:
        if edge.operand is not None:
            operands[edge.consumer][edge.operand] = edge.producer
    passed = set(space.trained)
    found: dict[int, tuple[int, ...]] = {}
    for node, producers in sorted(operands.items()):
        read = [operand for operand, producer in producers.items() if producer in passed]
        if read and len(producers) == 1:
            passed.add(node)
        elif read:
            split = [
                sum(len(one.operands[operand].axes) for operand in read) for one in space.strategies[node]
            ]
            fewest = min(split)
            found[node] = tuple(place for place, count in enumerate(split) if count == fewest)
    return found


def _nearest(layouts: Sequence[Layout], axes: frozenset[str]) -> tuple[int, ...]:
    """Positions of those that use fewest other axes, and of these most of `axes`."""
    marks = [(-len(set(layout.axes) - axes), len(axes.intersection(layout.axes))) for layout in layouts]
    nearest = max(marks)
    return tuple(place for place, mark in enumerate(marks) if mark == nearest)


def places_in(allowed: Allowed, choice: Sequence[int]) -> tuple[int, ...]:
    """A choice of the restricted problem as one of the whole."""
    return tuple(allowed[node][place] if node in allowed else place for node, place in enumerate(choice))


def places_of(allowed: Allowed, choice: Sequence[int]) -> tuple[int, ...]:
    """A choice of the whole, of strategies that are allowed, as one of the restricted problem."""
    return tuple(
        list(allowed[node]).index(place) if node in allowed else place for node, place in enumerate(choice)
    )
