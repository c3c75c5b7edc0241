"""Where the tensors of a call meet its program: the layouts in which it takes inputs and returns outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.plan.plan import Plan
from autoshard.runtime.leaves import InputSide, OutputSide, Returned
from passes.ir.joint import JointGraph, node_value
from passes.layout.layout import Layout

__all__ = ["CallEnds", "call_ends", "call_inputs", "input_sides", "output_shapes", "returned_as"]


@dataclass(frozen=True)
class CallEnds:
    """inputs: one per placeholder, tangents excepted. outputs: one per tensor output, in the order of their index."""

    inputs: tuple[InputSide, ...]
    outputs: tuple[OutputSide, ...]


def call_ends(joint: JointGraph, plan: Plan, asked: Mapping[int, Layout | None]) -> CallEnds:
    """asked: as in `CallLayouts`."""
    outputs: list[OutputSide] = []
    for index, shape in output_shapes(joint).items():
        layout = plan.outputs[index]
        assert layout is not None
        outputs.append(OutputSide(shape, layout, returned_as(index, asked)))
    return CallEnds(call_inputs(joint, plan), tuple(outputs))


def call_inputs(joint: JointGraph, plan: Plan) -> tuple[InputSide, ...]:
    """`CallEnds.inputs`."""
    return input_sides(
        joint, {node.name: plan.assignment[node.name].results[0] for node in joint.placeholders}
    )


def input_sides(joint: JointGraph, layouts: Mapping[str, Layout]) -> tuple[InputSide, ...]:
    """layouts: by name of the placeholder; the others are whole."""
    return tuple(
        InputSide(
            shape := tuple(node_value(node).shape), layouts.get(node.name, Layout.replicated(len(shape)))
        )
        for node, spec in zip(joint.placeholders, joint.inputs, strict=True)
        if spec.kind != "tangent"
    )


def output_shapes(joint: JointGraph) -> dict[int, tuple[int, ...]]:
    """Tensor output of a call -> its shape, by index."""
    found = {
        spec.index: tuple(node_value(result).shape)
        for spec, result in zip(joint.outputs, joint.results, strict=True)
        if spec.kind == "output" and result is not None
    }
    return dict(sorted(found.items()))


def returned_as(index: int, asked: Mapping[int, Layout | None]) -> Returned:
    return "global" if index not in asked else "dtensor" if asked[index] is None else "local"
