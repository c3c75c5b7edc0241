"""How a call's tensors are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.layout.layout import Layout

__all__ = ["CallLayouts"]


@dataclass(frozen=True)
class CallLayouts:
    """How a call's tensors are laid out: by position, the layout of inputs that are not global and
    of outputs that are not; None leaves an output to the search. free: outputs that are left to it even where they
    get no gradient."""

    inputs: Mapping[int, Layout]
    outputs: Mapping[int, Layout | None]
    free: frozenset[int] = frozenset()

    def settled(self, found: Mapping[int, Layout | None]) -> CallLayouts:
        """With the layouts that were found for what is free."""
        free = {i: layout for i, layout in found.items() if i in self.free}
        return CallLayouts(self.inputs, {**self.outputs, **free})
