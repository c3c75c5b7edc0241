"""What the search decides and the partition obeys: the layouts at every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.layout import Layout

__all__ = ["Assignment", "FactorSplit", "NodeLayouts"]


@dataclass(frozen=True)
class FactorSplit:
    """`factor` is split over `axes` (major to minor) in whole multiples of `unit`."""

    factor: str
    axes: tuple[str, ...]
    unit: int = 1


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
