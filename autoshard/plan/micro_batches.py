"""How many pieces a batch is run in, or head and loss over tokens where they do not fit, and the plans for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from autoshard.plan.plan import Plan
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError, log
from passes.capture import Captured
from passes.micro_batches.cut_batch import Uncut, cut_batch
from passes.micro_batches.cut_head import cut_head, may_have_head
from passes.micro_batches.time_axis import batch_length


def cut_call(captured: Captured, count: int, head: int = 1, *, sizes_only: bool = False) -> Captured:
    """The call with its batch in `count` pieces, and in each its head and loss in `head`; whole, if nothing is trained
    by it. sizes_only: as of `cut_batch`, which is enough to plan them.

    Raises InfeasibleError where it cannot be cut."""
    cut = cut_call_head(captured, head)
    if not cut.joint.trains:
        return cut
    return replace(cut, joint=cut_batch(cut.joint, count, sizes_only=sizes_only))


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

    def of(count: int, until: Deadline) -> Plan:
        cut = lambda head: cut_call(head, count, sizes_only=True)
        return fitting(captured, memory_limit, lambda head, until: planned(cut(head), until), until)

    if micro_batches != "auto":
        return of(int(micro_batches), deadline)
    return fastest_of(_counts(captured, memory_limit), of, deadline)


def fastest_of(counts: Iterable[int], planned: Callable[[int, Deadline], Plan], deadline: Deadline) -> Plan:
    """The plan of the first of `counts`, ascending, after which the next is slower, or time is over.

    planned: the plan of so many pieces until then; it raises InfeasibleError, and so does this if there is none."""
    best: Plan | None = None
    reason: InfeasibleError | None = None
    for count in counts:
        until = deadline if best is None else deadline.firm
        if until.over and not (best is None and reason is None):
            break
        try:
            found = planned(count, until)
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
    smaller = memory_limit is not None and captured.joint.trains
    return doubled(1, most_pieces(captured) if smaller else 1)


def doubled(count: int, most: int) -> Iterator[int]:
    """It, and twice as much, up to `most`."""
    while count <= most:
        yield count
        count *= 2


_COUNTS = (4, 16)
"""Pieces of a head. Few more take little longer, and every search for one that does not fit takes its time."""

T = TypeVar("T")


def cut_call_head(captured: Captured, count: int) -> Captured:
    """The call with head and loss in `count` pieces; as it is, if nothing is trained by it, or if it is cut. Raises
    Uncut."""
    joint = captured.joint
    if count == 1 or joint.head_pieces > 1 or not joint.trains:
        return captured
    return replace(captured, joint=cut_head(joint, count))


def fitting(
    captured: Captured,
    memory_limit: int | None,
    planned: Callable[[Captured, Deadline], T],
    deadline: Deadline,
) -> T:
    """What is planned of a call; where that does not fit, with head and loss in pieces, in few or, if it must be, in
    more. Of a call that is cut already no more is.

    planned: raises InfeasibleError, and so does this: that of the whole call.
    """
    joint = captured.joint
    if memory_limit is None or joint.head_pieces > 1 or not joint.trains or not may_have_head(joint):
        return planned(captured, deadline)
    # Share of the time in which the model as it is must be found to fit, where its head can be cut.
    first = deadline.share(0.75)
    try:
        return planned(captured, first)
    except Uncut:
        raise
    except InfeasibleError as error:
        reason = error
    if deadline.over:
        raise reason
    # Only now, since it takes a search to say whether the head can be cut.
    cuts = _cuts(captured)
    fewest = next(cuts, None)
    if fewest is None and first.left <= 0.0:
        return planned(captured, deadline)
    for cut in itertools.chain([fewest] if fewest else [], cuts):
        if deadline.left <= 0.0 and cut is not fewest:
            break
        try:
            found = planned(cut, deadline)
        except InfeasibleError:
            continue
        log.info("plan: head and loss in %d pieces, as they do not fit whole", cut.joint.head_pieces)
        return found
    raise reason


def _cuts(captured: Captured) -> Iterator[Captured]:
    """The call with its head in pieces, in more and more."""
    for count in _COUNTS:
        try:
            yield cut_call_head(captured, count)
        except Uncut:
            if count > _COUNTS[0]:
                return
            with suppress(Uncut):
                # Where it cannot be cut so often.
                yield cut_call_head(captured, 2)
            return
