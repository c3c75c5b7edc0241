"""A joint graph as the graphs of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from passes.ir.joint import JointGraph
from passes.lower.missing_tangents import without_usually_missing
from passes.micro_batches.in_pieces import in_pieces, without_uses
from passes.micro_batches.run_times import find_run_times
from passes.micro_batches.time_axis import first_pieces, trains
from passes.micro_batches.uncut import check_cut, check_long_enough

__all__ = ["cut_batch", "cut_for_stages"]


def cut_batch(joint: JointGraph, count: int, pieces: Sequence[int] | None = None) -> JointGraph:
    """The step of a canonical `joint`, its batch in `count` pieces: the graph of the first, with those of the others.

    pieces: of which there are graphs, the first among them; None: all.

    All hold what runs before and after the pieces, alike; the loss alone gets a gradient, where there is one scalar.
    Raises Uncut, an InfeasibleError that says which op needs the whole batch at once.
    """
    if count == 1:
        return joint
    check_long_enough(joint, count)
    plain = without_uses(without_usually_missing(joint))
    times = find_run_times(plain, count)
    check_cut(plain, times)
    first, *others = (in_pieces(plain, times, index) for index in pieces or range(count))
    return replace(first, others=tuple(others))


def cut_for_stages(joint: JointGraph, count: int, *, sizes_only: bool = False) -> JointGraph:
    """The graph of a call of which the stages of a pipeline are cut: if it trains, in `count` pieces, with a gradient
    for the loss alone where there is one scalar; else as it is. Raises Uncut.

    sizes_only: of pieces of one size there is one graph, which is enough to plan them."""
    if not trains(joint):
        return joint
    if count == 1:
        return without_usually_missing(joint)
    return cut_batch(joint, count, first_pieces(joint, count) if sizes_only else None)
