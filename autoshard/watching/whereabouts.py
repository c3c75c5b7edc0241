"""Where a thread is in the user's code, and whether it waits in torch.distributed."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch
import torch.distributed

__all__ = ["whereabouts"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.dirname(torch.distributed.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_PACKAGES = tuple(_OURS + name + os.sep for name in ("autoshard", "passes", "cost_model"))
_LIBRARY = os.path.dirname(os.__file__) + os.sep


def whereabouts(thread: int) -> tuple[str, str]:
    """(file:line of the innermost frame that is the user's, the function of torch.distributed that it called or "")."""
    frame: FrameType | None = sys._current_frames().get(thread)
    distributed = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_DISTRIBUTED) and not frame.f_code.co_name.startswith(("_", "wrapper")):
            distributed = frame.f_code.co_name
        elif not file.startswith((_TORCH, _LIBRARY, "<", *_PACKAGES)):
            return f"{os.path.basename(file)}:{frame.f_lineno}", distributed
        frame = frame.f_back
    return "", distributed
