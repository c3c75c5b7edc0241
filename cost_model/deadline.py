"""When work must have ended: handed to every loop that may take long, which asks it now and then."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


class OutOfTime(Exception):
    """A deadline passed. For whoever set it to translate; not for users."""


@dataclass(frozen=True)
class Deadline:
    """at: on the clock of `time.monotonic`."""

    at: float

    @staticmethod
    def after(seconds: float) -> Deadline:
        """`seconds` from now."""
        return Deadline(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until then; negative once it has passed."""
        return self.at - time.monotonic()

    def check(self) -> None:
        """Raises OutOfTime once it has passed."""
        if self.left < 0.0:
            raise OutOfTime

    def earlier(self, seconds: float) -> Deadline:
        """So many seconds before this one."""
        return Deadline(self.at - seconds)

    def at_least(self, seconds: float) -> Deadline:
        """This one, or so many seconds from now if that is later."""
        return Deadline(max(self.at, time.monotonic() + seconds))

    def share(self, part: float) -> Deadline:
        """When `part` of the time that is left has passed."""
        return self if math.isinf(self.at) else Deadline.after(part * self.left)


NEVER = Deadline(math.inf)
