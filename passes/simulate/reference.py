"""What the unsharded model computes: the values every sharded run is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from passes.capture.model_state import named_state, state_kept
from passes.ir.autocast_off import autocast_off
from passes.ir.joint import GraphInput, GraphOutput, JointGraph, node_value
from passes.simulate.conditioning import seeded_call


def reference_inputs(
    joint: JointGraph, model: nn.Module, tensors: Sequence[torch.Tensor], *, seed: int
) -> list[torch.Tensor]:
    """A value for every placeholder: the model's own, the call's, and random tangents."""
    generator = torch.Generator().manual_seed(seed)
    named = {**_parameters(model), **named_state(model)}
    return [
        _value(spec, node, named, joint, tensors, generator)
        for spec, node in zip(joint.inputs, joint.placeholders, strict=True)
    ]


def _value(
    spec: GraphInput,
    node: fx.Node,
    named: Mapping[str, torch.Tensor],
    joint: JointGraph,
    tensors: Sequence[torch.Tensor],
    generator: torch.Generator,
) -> torch.Tensor:
    if spec.kind in ("param", "buffer"):
        return named[spec.name].detach().clone()
    if spec.kind == "constant":
        return joint.constants[spec.name]
    if spec.kind == "input":
        return tensors[spec.index].detach()
    wanted = node_value(node)
    if spec.kind == "seed":
        return torch.randint(0, 2**31, tuple(wanted.shape), dtype=wanted.dtype, generator=generator)
    return torch.randn(tuple(wanted.shape), generator=generator).to(wanted.dtype).to(wanted.device)


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = seeded_call(n, super().run_node)
        self.values[n.name] = value
        return value


@autocast_off()
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

    `call` runs the model and returns the tensor outputs of the call in order. No gradient is accumulated, and what
    `call` changes in the model is put back; buffer updates are read before that.
    """
    given = zip(joint.inputs, values, strict=True)
    tangents = {spec.index: value for spec, value in given if spec.kind == "tangent"}
    buffers = [(buffer, buffer.detach().clone()) for buffer in named_state(model).values()]
    with state_kept(model):
        try:
            outputs = call()
            gradients = _gradients(model, outputs, tangents)
            return [_result(spec, outputs, model, gradients) for spec in joint.outputs]
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _gradients(
    model: nn.Module, outputs: Sequence[torch.Tensor], tangents: Mapping[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """By parameter name. `autograd.grad`: `.grad` of parameters and inputs, and what hooks do with it, stay."""
    trained = {name: p for name, p in _parameters(model).items() if p.requires_grad}
    pairs = [(outputs[i], tangent) for i, tangent in tangents.items() if outputs[i].requires_grad]
    if not pairs or not trained:
        return {}
    roots, seeds = [root for root, _ in pairs], [seed for _, seed in pairs]
    found = torch.autograd.grad(roots, list(trained.values()), seeds, allow_unused=True)
    # None where a parameter was not used, which torch's annotation does not say. Sparse of `nn.Embedding(sparse=True)`.
    return {
        name: value if value.layout is torch.strided else value.to_dense()
        for name, value in zip(trained, found, strict=True)
        if isinstance(value, torch.Tensor)
    }


def _result(
    spec: GraphOutput,
    outputs: Sequence[torch.Tensor],
    model: nn.Module,
    gradients: Mapping[str, torch.Tensor],
) -> torch.Tensor | None:
    if spec.kind == "output":
        return outputs[spec.index].detach().clone()
    if spec.kind == "buffer":
        return named_state(model)[spec.name].detach().clone()
    return gradients.get(spec.name)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by every name: a tied one may be known to the graph by any of them."""
    return dict(model.named_parameters(remove_duplicate=False))
