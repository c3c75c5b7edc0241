"""The layouts at the ends of a plan: of parameters by name, of a call's outputs by position."""

from __future__ import annotations

from passes.capture import Captured
from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.layout.layout import Layout

__all__ = ["output_layouts", "parameter_layouts"]


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
    ends = iter(assignment["output"].operands)
    found: dict[int, Layout | None] = {}
    for spec, result in zip(joint.outputs, joint.results, strict=True):
        layout = None if result is None else next(ends)
        if spec.kind == "output":
            found[spec.index] = layout
    return found
