"""A joint graph as the graphs of its pieces."""

from __future__ import annotations

from passes.ir.joint import JointGraph
from passes.lower.missing_tangents import without_usually_missing
from passes.micro_batches.in_pieces import in_pieces, without_uses
from passes.micro_batches.run_times import find_run_times
from passes.micro_batches.uncut import check_cut, check_long_enough

__all__ = ["cut_batch"]


def cut_batch(joint: JointGraph, count: int) -> tuple[JointGraph, ...]:
    """The step of a canonical `joint` with each of `count` pieces of its batch, in the order in which they run.

    All hold what runs before and after the pieces, alike; the loss alone gets a gradient, where there is one scalar.
    Raises InfeasibleError, that says which op needs the whole batch at once.
    """
    check_long_enough(joint, count)
    plain = without_uses(without_usually_missing(joint))
    times = find_run_times(plain, count)
    check_cut(plain, times)
    return tuple(in_pieces(plain, times, index) for index in range(count))
