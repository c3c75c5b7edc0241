"""What the search decides and the partition obeys: the layouts at every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from cost_model.checked_arguments import Text, Word
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout, Span, nested_spans


class FactorSplit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`factor` is split over `axes` (major to minor).

    spans: what each linear index over the axes computes of it; None: torch.chunk's parts. They may overlap where every
           result has the factor: then ranks compute the same, and need not be told by others.
    """

    factor: Text
    axes: tuple[Word, ...]
    spans: tuple[Span, ...] | None = None

    def parts(self, length: int, mesh: MeshSpec) -> tuple[Span, ...]:
        """What each linear index over the axes computes of a factor of `length`."""
        if self.spans is not None:
            return self.spans
        return nested_spans(length, tuple(mesh.size(axis) for axis in self.axes))


@dataclass(frozen=True)
class NodeLayouts:
    """operands: the layout in which the op reads each tensor operand (order of `tensor_operands`).
    results:  the layout of each result as the op leaves it.
    splits:   which factors of the op's rule are split, and how.

    A placeholder has one result and no operands; the graph's output node has operands only.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    splits: tuple[FactorSplit, ...] = ()


Assignment = Mapping[str, NodeLayouts]
"""Global node name -> layouts. `getitem` nodes are not in it: they select a result of their producer."""
