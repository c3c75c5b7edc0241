"""How many pieces a batch is run in, and the plans for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

from autoshard.plan.head_pieces import cut_call_head, fitting
from autoshard.plan.plan import Plan
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from passes.capture import Captured
from passes.micro_batches.cut_batch import cut_batch
from passes.micro_batches.time_axis import batch_length, trains
from passes.micro_batches.uncut import Uncut

__all__ = ["cut_call", "fastest_in_pieces", "fastest_of", "most_pieces"]


class _Timed(Protocol):
    @property
    def step_time(self) -> float: ...


P = TypeVar("P", bound=_Timed)


def cut_call(captured: Captured, count: int, head: int = 1) -> Captured:
    """The call with its batch in `count` pieces, and in each its head and loss in `head`; whole, if nothing is trained
    by it.

    Raises InfeasibleError where it cannot be cut."""
    cut = cut_call_head(captured, head)
    return replace(cut, joint=cut_batch(cut.joint, count)) if trains(cut.joint) else cut


def most_pieces(captured: Captured) -> int:
    """Into how many pieces a call's batch can be cut: a last, smaller batch of an epoch into fewer."""
    return max(1, batch_length(captured.joint))


def fastest_in_pieces(
    captured: Captured,
    micro_batches: int | str,
    memory_limit: int | None,
    planned: Callable[[Captured, Deadline], Plan],
    deadline: Deadline,
) -> Plan:
    """The plan of so many pieces; of "auto", the fastest of 1, 2, 4 ... that fits. Head and loss are in pieces where
    it does not fit otherwise.

    planned: what plans a call, cut or not, until then; it raises InfeasibleError. "auto" looks no further once a plan
    with more pieces is slower: each piece's kernels are smaller, and what is done once for each is done more often.
    """

    def of(count: int) -> Plan:
        return fitting(
            captured, memory_limit, lambda head, until: planned(cut_call(head, count), until), deadline
        )

    if micro_batches != "auto":
        return of(int(micro_batches))
    return fastest_of(_counts(captured, memory_limit), of, deadline)


def fastest_of(counts: Iterable[int], planned: Callable[[int], P], deadline: Deadline) -> P:
    """The plan of the first of `counts`, ascending, after which the next is slower, or time is over.

    planned: the plan of so many pieces; it raises InfeasibleError, and so does this if there is none."""
    best: P | None = None
    reason: InfeasibleError | None = None
    for count in counts:
        if best is not None and deadline.left <= 0.0:
            break
        try:
            found = planned(count)
        except Uncut as error:
            reason = reason or error
            break
        except InfeasibleError as error:
            reason = error
            if best is not None:
                break
            continue
        if best is not None and found.step_time >= best.step_time:
            break
        best = found
    if best is None:
        assert reason is not None
        raise reason
    return best


def _counts(captured: Captured, memory_limit: int | None) -> Iterator[int]:
    yield 1
    count = 2
    while memory_limit is not None and trains(captured.joint) and count <= batch_length(captured.joint):
        yield count
        count *= 2
