"""When work must have ended: handed to every loop that may take long, which asks it now and then."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

FIRST_PLAN_SECONDS = 20.0
"""For a first plan, after a time limit in which none was found."""


class OutOfTime(Exception):
    """A deadline passed. For whoever set it to translate; not for users."""


class Watch(Protocol):
    """Hears of each better answer of a search, and may end it before its time."""

    @property
    def ended(self) -> bool: ...

    def tell(self, answer: Any) -> None: ...


@dataclass(frozen=True)
class Deadline:
    """at: on the clock of `time.monotonic`. watch: of the search that must have ended then; deadlines made of this one
    have it, too. of_part: what is found is a part of an answer, of which the watch does not hear. last: until when a
    first plan may be looked for if none was found until `at`: no deadline made of this one is later, but those of
    `of_each_part`.
    """

    at: float
    watch: Watch | None = None
    of_part: bool = False
    last: float = -math.inf

    @staticmethod
    def after(seconds: float, watch: Watch | None = None, first_plan: float = FIRST_PLAN_SECONDS) -> Deadline:
        """`seconds` from now, and so many more for a first plan."""
        at = time.monotonic() + seconds
        return Deadline(at, watch, last=at + first_plan)

    @property
    def left(self) -> float:
        """Seconds until then; negative once it has passed, or the watch has ended it."""
        ended = self.watch is not None and self.watch.ended
        return -math.inf if ended else self.at - time.monotonic()

    def check(self) -> None:
        """Raises OutOfTime once it has passed."""
        if self.left < 0.0:
            raise OutOfTime

    @property
    def of_first_plan(self) -> Deadline:
        """For a search that has only to find a plan, and found none in time."""
        return replace(self, at=max(self.at, self.last))

    @property
    def firm(self) -> Deadline:
        """For what is not needed to have a plan."""
        return replace(self, last=-math.inf)

    @property
    def over(self) -> bool:
        """Whether nothing may begin any more, a first plan included."""
        return self.of_first_plan.left <= 0.0

    def earlier(self, seconds: float) -> Deadline:
        """So many seconds before this one."""
        return replace(self, at=self.at - seconds)

    def at_least(self, seconds: float) -> Deadline:
        """This one, or so many seconds from now if that is later."""
        return replace(self, at=max(self.at, time.monotonic() + seconds))

    def share(self, part: float) -> Deadline:
        """When `part` of the time that is left has passed; and for a first plan what is left of the remainder then."""
        if math.isinf(self.at):
            return self
        at = time.monotonic() + part * self.left
        return replace(self, at=at, last=min(self.last, at + FIRST_PLAN_SECONDS))

    @property
    def of_each_part(self) -> Deadline:
        """Of one of several parts that all need a plan: with a remainder of its own, if there is any."""
        own = max(self.at, time.monotonic()) + FIRST_PLAN_SECONDS
        return replace(self, last=max(self.last, own) if math.isfinite(self.last) else self.last)

    @property
    def as_part(self) -> Deadline:
        """Of the search of a part."""
        return replace(self, of_part=True)

    def tell(self, answer: Any) -> None:
        """What was found, and may be the best so far."""
        if self.watch is not None and not self.of_part:
            self.watch.tell(answer)


NEVER = Deadline(math.inf)
