"""Axes of a mesh that layouts use together: neighbours that all split the same dim, in mesh order, or are all pending
the same reduction, or are all unused.

    joined = (("a", "b"), ("c", "d"))     f32[64@a@b, 32@c@d], f32[64@c@d@a@b], f32[64]+a:sum+b:sum
                                          but not f32[64@a], f32[64@b@a], f32[64@a@c]

Axes that no run of `joined` names are on their own; () joins none. Such a layout is one of the whole mesh, with the
sizes and prices that it has there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout

Unit = tuple[str, ...]
JoinedAxes = tuple[Unit, ...]


def in_units(axes: Sequence[str], joined: JoinedAxes) -> list[Unit]:
    """`axes`, in which joined ones stand together, as units: (a, b, e), ((a, b),) -> [(a, b), (e,)]."""
    if not joined:
        return [(axis,) for axis in axes]
    first = {run[0]: run for run in joined}
    later = {axis for run in joined for axis in run[1:]}
    return [first.get(axis, (axis,)) for axis in axes if axis not in later]


def chained(units: Iterable[Unit]) -> tuple[str, ...]:
    """The axes of units, one after the other."""
    return tuple(itertools.chain.from_iterable(units))


def joined_text(units: Iterable[Unit]) -> str:
    """Those of several axes: "a+b, c+d"."""
    return ", ".join("+".join(unit) for unit in units if len(unit) > 1)


def orders(axes: Sequence[str], joined: JoinedAxes) -> Iterator[tuple[str, ...]]:
    """Every order of `axes` that keeps joined ones together."""
    return map(chained, itertools.permutations(in_units(axes, joined)))


def keeps_together(layout: Layout, one: str, two: str) -> bool:
    """Whether a layout uses two axes alike, the second right after the first where they split a dim."""
    partial = dict(layout.partial)
    if layout.dim_of(one) != layout.dim_of(two) or partial.get(one) != partial.get(two):
        return False
    dim = layout.dim_of(one)
    return dim is None or layout.dims[dim].index(two) == layout.dims[dim].index(one) + 1


def joining_problems(joined: JoinedAxes, mesh: MeshSpec) -> Iterator[str]:
    """Why axes cannot be joined like this on a mesh: each run is of neighbours, in mesh order, and no axis in two."""
    real = mesh.real_axes()
    first = 0
    for run in joined:
        place = real.index(run[0]) if run and run[0] in real else -1
        if len(run) < 2 or place < first or real[place : place + len(run)] != run:
            yield f"joined axes {list(run)} are no neighbours on the mesh, or out of order"
            return
        first = place + len(run)
