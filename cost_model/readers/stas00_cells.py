"""Payloads and bandwidths with their units, as the torch.distributed benchmarks print them."""

from __future__ import annotations

import re

from cost_model.readers.lines import Line
from cost_model.readers.points import refuse
from cost_model.readers.printed import Printed

__all__ = ["Bandwidth", "bandwidth", "payload"]

Bandwidth = Printed
"""Bytes per second."""

_PAYLOAD = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B")
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(Bps|B/s|bps|b/s|bit/s)")
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def payload(line: Line, text: str, base: int) -> int:
    """Bytes of "32KB" or "32KiB"; K without i means `base`. The tables mean 1024 by both, the first script
    1000. ProfileError for anything else."""
    match = _PAYLOAD.fullmatch(text)
    nbytes = round(float(match[1]) * (1024 if match[3] else base) ** _POWER[match[2]]) if match else 0
    if nbytes < 1:
        refuse(line.place, f"the payload is {text!r}", line.text, "a size with its unit, such as 32KiB")
    return nbytes


def bandwidth(line: Line, text: str) -> Bandwidth:
    """Bytes per second of "0.92GBps", or of "7.36Gbps" (bits). ProfileError for anything else."""
    match = _BANDWIDTH.fullmatch(text)
    value = Printed.parse(match[1]) if match else None
    if match is None or value is None:
        refuse(
            line.place,
            f"the bandwidth is {text!r}",
            line.text,
            "a number with its unit: GBps for bytes, Gbps for bits per second",
        )
    bits = match[3].startswith("b")
    return value.times(1000.0 ** _POWER[match[2]] / (8 if bits else 1))
