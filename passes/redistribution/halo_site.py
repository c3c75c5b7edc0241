"""A step of a redistribution as one rank sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout, Span
from passes.redistribution.emit_steps import Emitter
from passes.redistribution.message_table import pieces

__all__ = ["HaloSite", "without"]


@dataclass(frozen=True)
class HaloSite:
    """A step as one rank sees it."""

    emit: Emitter
    step: Any  # the Step subclass that `_EMIT` dispatched on
    shape: tuple[int, ...]
    mesh: MeshSpec
    rank: int
    groups: Mapping[tuple[str, ...], str]

    @cached_property
    def group_axes(self) -> tuple[str, ...]:
        return tuple(sorted(self.step.axes, key=self.mesh.index))

    @property
    def group_name(self) -> str:
        return self.groups[self.group_axes]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's group, in the group's order."""
        return self.mesh.group(self.rank, self.group_axes)

    def nesting(self, axes: Sequence[str]) -> tuple[list[int], list[int]]:
        """Of the step's axes, as a layout nests them: (ranks along each, positions among them of the group's axes)."""
        return [self.mesh.size(axis) for axis in axes], [axes.index(axis) for axis in self.group_axes]

    def span(self, layout: Layout, dim: int, rank: int | None = None) -> Span:
        return layout.interval(self.shape, self.mesh, dim, self.rank if rank is None else rank)

    def part_sizes(self, layout: Layout, dim: int) -> list[int]:
        """Sizes of the group's parts of `dim`, as the layout nests them: in ascending order."""
        spans = (self.span(layout, dim, rank) for rank in self.mesh.group(self.rank, self.step.axes))
        return [hi - lo for lo, hi in spans]

    def overlaps(self, dim: int, sender: int, receiver: int) -> list[tuple[Span, Span]]:
        """What rank `sender` holds of what `receiver` wants of `dim`, positions modulo its length: (places in the
        sender's tensor, places in the receiver's result), in the receiver's order."""
        held, wanted = self.span(self.step.before, dim, sender), self.span(self.step.after, dim, receiver)
        return [
            ((piece.lo - held[0], piece.hi - held[0]), (piece.place, piece.place + piece.size))
            for piece in pieces(held, wanted, self.shape[dim])
        ]

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.step.after.local_shape(self.shape, self.mesh, self.rank)


def without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
