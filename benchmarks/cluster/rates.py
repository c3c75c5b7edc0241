"""Rates and latencies as users write them: "1gbit", "500mbit", "200us"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.cluster.errors import ClusterError

__all__ = ["each", "parse_latency", "parse_rate"]

# tc's units: powers of 1000, bits. Its "gbps" would be bytes, which nobody expects: refused.
BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str | None, what: str = "rate") -> int | None:
    """Bits per second of "1gbit" or "2.5mbit"; None (no limit) of None or "none"."""
    if text is None or text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)?bit", text.strip().lower())
    if found is None:
        raise ClusterError(f"{what} is {text!r}\n  try: a number and bit, kbit, mbit or gbit: 1gbit, 500mbit")
    bits = round(float(found[1]) * BITS[f"{found[2] or ''}bit"])
    if bits < 8000:
        raise ClusterError(f"{what} is {text!r}, less than a packet a second\n  try: at least 8kbit")
    return bits


def parse_latency(text: str | None) -> float | None:
    """Seconds of "200us" or "1ms", one way; None of None."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip().lower())
    if found is None:
        raise ClusterError(f"latency is {text!r}\n  try: a number and us, ms or s: 200us, 1ms")
    return float(found[1]) * SECONDS[found[2]]


def each(value: str | Sequence[str] | None, count: int, what: str, of: str) -> tuple[int | None, ...]:
    """One rate for all, or one for each of `count`: bits per second."""
    if value is None or isinstance(value, str):
        return (parse_rate(value, what),) * count
    if len(value) != count:
        raise ClusterError(
            f"{what} has {len(value)} values for {count} {of}\n  try: one value, or one for each of the {of}"
        )
    return tuple(parse_rate(one, what) for one in value)
