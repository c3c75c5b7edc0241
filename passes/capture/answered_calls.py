"""Torch functions that are answered otherwise while a forward is traced, whatever it is traced for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from passes.capture.counting import COUNTS
from passes.capture.ctc_calls import LOSSES
from passes.capture.dense_gradients import DENSE_GRADIENTS
from passes.capture.list_calls import LISTS
from passes.capture.matrix_calls import SOLUTIONS
from passes.capture.packed_calls import PACKED
from passes.capture.padding_calls import PADS
from passes.capture.row_table import ROWS
from passes.capture.shape_calls import LENGTHS

__all__ = ["ANSWERED"]

ANSWERED: dict[Any, Callable[..., Any]] = {
    **PADS,
    **PACKED,
    **COUNTS,
    **LENGTHS,
    **LISTS,
    **LOSSES,
    **SOLUTIONS,
    **DENSE_GRADIENTS,
    **ROWS,
}
