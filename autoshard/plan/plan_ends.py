"""The layouts at the ends of a call and of its plan: of parameters by name, of inputs and outputs by position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from passes.capture import Captured
from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.layout.layout import Layout

__all__ = ["CallLayouts", "output_layouts", "parameter_layouts", "result_layouts"]


def parameter_layouts(joint: JointGraph, assignment: Assignment, captured: Captured) -> dict[str, Layout]:
    """By every name that a parameter has."""
    layouts: dict[str, Layout] = {}
    for spec, node in zip(joint.inputs, joint.placeholders, strict=True):
        if spec.kind == "param":
            for name in (spec.name, *captured.aliases.get(spec.name, ())):
                layouts[name] = assignment[node.name].results[0]
    return layouts


def output_layouts(joint: JointGraph, assignment: Assignment) -> dict[int, Layout | None]:
    """None where an output is no tensor."""
    layouts = result_layouts(joint.results, assignment)
    ends = zip(joint.outputs, layouts, strict=True)
    return {spec.index: layout for spec, layout in ends if spec.kind == "output"}


def result_layouts(results: Iterable[fx.Node | None], assignment: Assignment) -> list[Layout | None]:
    """Of every result of a graph, by position."""
    ends = iter(assignment["output"].operands)
    return [None if result is None else next(ends) for result in results]


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
