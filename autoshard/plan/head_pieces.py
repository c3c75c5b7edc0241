"""Head and loss in pieces over tokens, where a call does not fit a memory limit otherwise."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from passes.capture import Captured
from passes.micro_batches.cut_head import cut_head
from passes.micro_batches.head_times import may_have_head
from passes.micro_batches.time_axis import trains
from passes.micro_batches.uncut import Uncut

__all__ = ["cut_call_head", "fitting"]

_log = logging.getLogger("autoshard")

_COUNTS = (4, 16)
"""Pieces of a head. Few more take little longer, and every search for one that does not fit takes its time."""
_FEWEST = 2
"""Where it cannot be cut so often."""
_WHOLE_SHARE = 0.5
"""Share of the time in which the model as it is must be found to fit, where its head can be cut."""

T = TypeVar("T")


def cut_call_head(captured: Captured, count: int) -> Captured:
    """The call with head and loss in `count` pieces; as it is, if nothing is trained by it, or if it is cut. Raises
    Uncut."""
    joint = captured.joint
    return (
        replace(captured, joint=cut_head(joint, count))
        if trains(joint) and joint.head_pieces == 1
        else captured
    )


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
    if memory_limit is None or joint.head_pieces > 1 or not trains(joint) or not may_have_head(joint):
        return planned(captured, deadline)
    cuts = _cuts(captured)
    fewest = next(cuts, None)
    if fewest is None:
        return planned(captured, deadline)
    try:
        return planned(captured, deadline.share(_WHOLE_SHARE))
    except Uncut:
        raise
    except InfeasibleError as error:
        reason = error
    for cut in itertools.chain([fewest], cuts):
        if deadline.left <= 0.0:
            break
        try:
            found = planned(cut, deadline)
        except InfeasibleError:
            continue
        _log.info("plan: head and loss in %d pieces, as they do not fit whole", cut.joint.head_pieces)
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
                yield cut_call_head(captured, _FEWEST)
            return
