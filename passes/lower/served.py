"""What a collective is for, as a profiler shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from passes.ir.joint import JointGraph, tensor_operands


@dataclass(frozen=True)
class Served:
    """What a collective is for, as a profiler shows it.

    parameters: placeholder -> the parameter's name in the model. ends: per operand of the output node
    the parameter of which it is the gradient, else None.
    """

    parameters: Mapping[fx.Node, str]
    ends: Sequence[str | None]

    @staticmethod
    def of(joint: JointGraph) -> Served:
        inputs = zip(joint.placeholders, joint.inputs, strict=True)
        parameters = {node: spec.name for node, spec in inputs if spec.kind == "param"}
        ends = zip(joint.outputs, joint.results, strict=True)
        graded = set(parameters.values())
        return Served(
            parameters,
            [
                end.name if end.kind == "grad" and end.name in graded else None
                for end, result in ends
                if result is not None
            ],
        )

    def name(self, operand: fx.Node, reader: fx.Node, position: int) -> str:
        """The parameter moved, or whose gradient is moved, or else the module that needs the value."""
        parameter = self.ends[position] if reader.op == "output" else self._behind(operand)
        module = reader.meta.get("module") or operand.meta.get("module")
        return str(parameter or module or operand.name)

    def _behind(self, node: fx.Node) -> str | None:
        while node.op == "call_function" and len(tensor_operands(node)) == 1:
            node = tensor_operands(node)[0]
        return self.parameters.get(node)
