"""Steps that were taken in a table: their median and quartiles, and on which machine."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from datetime import date

import torch

__all__ = ["milliseconds", "taken_on"]


def milliseconds(seconds: Sequence[float], digits: int = 1) -> tuple[str, str]:
    """The median, and the quartiles: "12.3", "11.9, 12.8"."""
    low, median, high = (f"{1e3 * value:.{digits}f}" for value in statistics.quantiles(seconds, n=4))
    return median, f"{low}, {high}"


def taken_on() -> str:
    """Date and machine, with what else runs there."""
    load = os.getloadavg()[0]
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {load:.1f}"
    return f"{date.today().isoformat()}, {machine}, torch {torch.__version__}"
