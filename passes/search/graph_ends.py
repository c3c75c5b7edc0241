"""Which layouts the ends of the graph may have: parameters, inputs, outputs, gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from passes.ir.joint import JointGraph, node_value
from passes.layout.layout import Layout


@dataclass(frozen=True)
class Boundary:
    """inputs:  placeholder position -> the layouts it may have (absent: any split in torch's sizes).
    outputs: result position -> the layouts it may have, where it is not tied (absent: any split in torch's sizes).
    tied:    result position -> placeholder position whose layout it shares: a gradient and its
             parameter, a buffer's new value and the buffer, an output and its tangent.
    """

    inputs: Mapping[int, tuple[Layout, ...]]
    outputs: Mapping[int, tuple[Layout, ...]]
    tied: Mapping[int, int]


def boundary_of(
    joint: JointGraph,
    parameters: Mapping[str, Layout],
    inputs: Mapping[int, Layout],
    outputs: Mapping[int, Layout | None],
    free: Collection[int] = (),
) -> Boundary:
    """The ends of `joint`.

    parameters: pinned parameters by name; the others are free.
    inputs:     layout of user inputs by tensor position; the others are replicated (global).
    outputs:    layout of user outputs by tensor position; None leaves it to the search; the others
                are replicated. A tangent always has its output's layout.
    free:    tensor outputs of any layout, also without a tangent.
    Buffers, constants and the seed are replicated.
    """
    nodes = joint.placeholders
    fixed: dict[int, tuple[Layout, ...]] = {}
    tangents: dict[int, int] = {}
    for position, (spec, node) in enumerate(zip(joint.inputs, nodes, strict=True)):
        replicated = Layout.replicated(node_value(node).ndim)
        if spec.kind == "param":
            if spec.name in parameters:
                fixed[position] = (parameters[spec.name],)
        elif spec.kind == "input":
            fixed[position] = (inputs.get(spec.index, replicated),)
        elif spec.kind == "tangent":
            tangents[spec.index] = position
            layout = outputs.get(spec.index, replicated)
            if layout is not None:
                fixed[position] = (layout,)
        else:
            fixed[position] = (replicated,)
    return _tie_outputs(joint, fixed, tangents, outputs, free)


def _tie_outputs(
    joint: JointGraph,
    fixed: Mapping[int, tuple[Layout, ...]],
    tangents: Mapping[int, int],
    outputs: Mapping[int, Layout | None],
    free: Collection[int],
) -> Boundary:
    tied: dict[int, int] = {}
    untied: dict[int, tuple[Layout, ...]] = {}
    for position, (spec, result) in enumerate(zip(joint.outputs, joint.results, strict=True)):
        if result is None:
            continue
        if spec.kind == "output":
            if spec.index in tangents:
                tied[position] = tangents[spec.index]
            elif spec.index not in free:
                layout = outputs.get(spec.index)
                untied[position] = (layout or Layout.replicated(node_value(result).ndim),)
        else:
            tied[position] = spec.index
    return Boundary(fixed, untied, tied)
