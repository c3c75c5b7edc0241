"""A number as a program printed it: the value lies within half a unit of its last digit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

__all__ = ["Printed", "agree"]

_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)

_SLACK = 1e-6
"""Relative; covers arithmetic in other orders, and sizes in a float."""


@dataclass(frozen=True)
class Printed:
    """value +- half, both >= 0."""

    value: float
    half: float

    @staticmethod
    def parse(text: str) -> Printed | None:
        """None unless `text` is a plain finite number >= 0."""
        if not _NUMBER.fullmatch(text):
            return None
        try:
            number = Decimal(text)
        except InvalidOperation:  # an exponent of more digits than there are
            return None
        exponent = number.as_tuple().exponent
        assert isinstance(exponent, int)
        if not number.is_finite() or not -300 < exponent < 300 or number.adjusted() > 300:
            return None
        return Printed(float(number), 0.5 * 10.0**exponent)

    def times(self, factor: float) -> Printed:
        """The same number in another unit."""
        return Printed(self.value * factor, self.half * factor)

    @property
    def uncertainty(self) -> float:
        """Relative; infinite for a printed zero."""
        return self.half / self.value if self.value > 0 else float("inf")

    @property
    def low(self) -> float:
        return max(0.0, self.value - self.half) * (1.0 - _SLACK)

    @property
    def high(self) -> float:
        return (self.value + self.half) * (1.0 + _SLACK)


def agree(a: Printed, b: Printed) -> bool:
    """Whether one true value can have been printed as both."""
    return a.low <= b.high and b.low <= a.high
