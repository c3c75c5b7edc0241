"""Where a thread is in the user's code, and whether it waits in torch.distributed."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress

import torch
import torch.distributed

__all__ = ["whereabouts"]

_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _shown(path: str) -> str:
    """As a dump of stacks has it."""
    return path.encode("ascii", "backslashreplace").decode("ascii")


_TORCH = _shown(os.path.dirname(torch.__file__) + os.sep)
_DISTRIBUTED = _shown(os.path.dirname(torch.distributed.__file__) + os.sep)
_OURS = _shown(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep)
_PACKAGES = tuple(_OURS + name + os.sep for name in ("autoshard", "passes", "cost_model"))
_LIBRARY = _shown(os.path.dirname(os.__file__) + os.sep)


def whereabouts(thread: int) -> tuple[str, str]:
    """(file:line of the innermost frame that is the user's, the function of torch.distributed that it called or "").

    The stack is read as text that the interpreter writes without making an object of any frame. Frames of
    `sys._current_frames()` of a thread that goes on meanwhile crashed CPython 3.11, once in some million looks.
    """
    distributed = ""
    for file, line, function in _frames(thread):
        if file.startswith(_DISTRIBUTED) and not function.startswith(("_", "wrapper")):
            distributed = function
        elif not file.startswith((_TORCH, _LIBRARY, "<", *_PACKAGES)):
            return f"{os.path.basename(file)}:{line}", distributed
    return "", distributed


def _frames(thread: int) -> Iterator[tuple[str, str, str]]:
    """(file, line, function), the innermost first: at most 100. None where no file can be written."""
    inside = False
    for text in _stacks().splitlines():
        head, frame = _THREAD.match(text), _FRAME.match(text)
        if head is not None:
            inside = int(head[1], 16) == thread
        elif inside and frame is not None:
            yield frame[1], frame[2], frame[3]


def _stacks() -> str:
    """Of all threads."""
    with suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode("ascii", "replace")
    return ""
