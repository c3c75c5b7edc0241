"""What the unsharded model computes: the values every sharded run is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from passes.capture.state import named_state, state_kept
from passes.joint import JointGraph, node_value

__all__ = ["eager_results", "graph_values", "reference_inputs"]


def reference_inputs(
    joint: JointGraph, model: nn.Module, tensors: Sequence[torch.Tensor], *, seed: int
) -> list[torch.Tensor]:
    """A value for every placeholder: the model's own, the call's, and random tangents."""
    generator = torch.Generator().manual_seed(seed)
    named = {**_parameters(model), **named_state(model)}
    return [
        _value(spec.kind, spec.name, spec.index, node, named, joint, tensors, generator)
        for spec, node in zip(joint.inputs, joint.placeholders, strict=True)
    ]


def _value(
    kind: str,
    name: str,
    index: int,
    node: fx.Node,
    named: Mapping[str, torch.Tensor],
    joint: JointGraph,
    tensors: Sequence[torch.Tensor],
    generator: torch.Generator,
) -> torch.Tensor:
    if kind in ("param", "buffer"):
        return named[name].detach().clone()
    if kind == "constant":
        return joint.constants[name]
    if kind == "input":
        return tensors[index].detach()
    wanted = node_value(node)
    if kind == "seed":
        return torch.randint(0, 2**31, tuple(wanted.shape), dtype=wanted.dtype, generator=generator)
    return torch.randn(tuple(wanted.shape), generator=generator).to(wanted.dtype).to(wanted.device)


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = value
        return value


def graph_values(
    joint: JointGraph, values: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], dict[str, Any]]:
    """(the graph's flat results, the value of every node) of the unsharded graph."""
    recorder = _Recorder(joint.module)
    with torch.no_grad():
        results = recorder.run(*values)
    return list(results), recorder.values


def eager_results(
    joint: JointGraph,
    model: nn.Module,
    call: Callable[[], Sequence[torch.Tensor]],
    values: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """The graph's flat results as the untouched model computes them with autograd.

    `call` runs the model and returns the tensor outputs of the call in order. The model's state
    and gradients are put back as they were. Buffer updates are read before that.
    """
    kinds = dict(zip(joint.placeholders, joint.inputs, strict=True))
    tangents = {
        kinds[node].index: value
        for node, value in zip(joint.placeholders, values, strict=True)
        if kinds[node].kind == "tangent"
    }
    state = [(tensor, tensor.detach().clone()) for tensor in named_state(model).values()]
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        with state_kept(model):
            outputs = call()
            pairs = [(outputs[i], tangent) for i, tangent in tangents.items() if outputs[i].requires_grad]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [t for _, t in pairs])
            return [_result(spec.kind, spec.name, spec.index, outputs, model) for spec in joint.outputs]
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, value in state:
                tensor.copy_(value)


def _result(
    kind: str, name: str, index: int, outputs: Sequence[torch.Tensor], model: nn.Module
) -> torch.Tensor | None:
    if kind == "output":
        return outputs[index].detach().clone()
    if kind == "buffer":
        return named_state(model)[name].detach().clone()
    parameter = _parameters(model).get(name)
    return None if parameter is None or parameter.grad is None else parameter.grad.detach().clone()


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by every name: a tied one may be known to the graph by any of them."""
    return dict(model.named_parameters(remove_duplicate=False))
