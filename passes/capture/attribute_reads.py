"""Which attributes of which modules a forward reads: what its program depends on beside the arguments."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from passes.capture.snapshot import Snapshot
from passes.capture.surroundings import is_own
from passes.ir.torch_tracing import module_reads_seen

__all__ = ["attributes_read"]

_EVERY_CLASS = frozenset(vars(nn.Module))


@contextmanager
def attributes_read(before: Snapshot) -> Generator[dict[nn.Module, set[str]]]:
    """Module -> names of the attributes read inside, as they were `before`: one that was assigned first is no input
    of the forward. Attributes of the class count if they are data, and `forward` counts, since users exchange it.
    Tables of parameters, modules and hooks, and the training flag, do not count."""
    found: dict[nn.Module, set[str]] = {}

    def note(module: nn.Module, name: str, value: object) -> None:
        if name.startswith("__") or is_own(module, name):
            return
        if before.untouched(module, name, value) or (
            before.lacks(module, name)
            and (name == "forward" or not (callable(value) or name in _EVERY_CLASS))
        ):
            found.setdefault(module, set()).add(name)

    with module_reads_seen(note):
        yield found
