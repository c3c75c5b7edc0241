"""Collectives that could take the place of those of a plan, on the way to the same layouts.

What is summed over two mesh axes is all-reduced over one and then the other, or over both at once. Both ways are often
nearly equal in price. A price that was timed beside one that was modelled says little of which is the faster: so
what a plan does one way is timed the other way, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from cost_model.mesh import MeshSpec
from passes.predict.step_work import CollectiveCase

__all__ = ["other_ways"]


def other_ways(collectives: Iterable[CollectiveCase], mesh: MeshSpec) -> list[CollectiveCase]:
    """All-reduces of as many bytes as some of `collectives`, that those do not have: over the axes of two together, and
    over each axis of one. What takes longest comes first. seconds: of what each would take the place of."""
    known = [case for case in collectives if case.kind == "all_reduce"]
    have = {(case.axes, case.nbytes) for case in known}
    found: dict[tuple[tuple[str, ...], int], CollectiveCase] = {}
    for case in (*_at_once(known, mesh), *_one_by_one(known)):
        if (case.axes, case.nbytes) not in have:
            found.setdefault((case.axes, case.nbytes), case)
    return sorted(found.values(), key=lambda case: -case.seconds)


def _at_once(known: Iterable[CollectiveCase], mesh: MeshSpec) -> Iterator[CollectiveCase]:
    """Over the axes of two that follow each other, as equal sizes say that they do."""
    for one, other in combinations(known, 2):
        if one.nbytes == other.nbytes and not set(one.axes) & set(other.axes):
            axes = tuple(axis for axis in mesh.names if axis in (*one.axes, *other.axes))
            yield CollectiveCase(one.kind, axes, one.nbytes, one.seconds + other.seconds)


def _one_by_one(known: Iterable[CollectiveCase]) -> Iterator[CollectiveCase]:
    """Over each of several axes."""
    for case in known:
        if len(case.axes) > 1:
            yield from (CollectiveCase(case.kind, (axis,), case.nbytes, case.seconds) for axis in case.axes)
