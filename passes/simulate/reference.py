"""The values of the unsharded model, which every sharded run is compared with, and how far rounding may move them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.capture.model_state import named_parameters, named_state, state_kept
from passes.ir.graph_pass import duplicate_module
from passes.ir.joint import GraphInput, GraphOutput, JointGraph, node_value
from passes.ir.op_traits import READ_AS_BYTES, draws, rounds
from passes.ir.process_state import autocast_off


@dataclass(frozen=True)
class Rounding:
    """Largest absolute change of each result and of each node's value, by name; inf for whole numbers that change. Of
    floats of 8 bits the share that changes: what is alike is rounded alike, and few are near the next number."""

    results: Sequence[float]
    nodes: Mapping[str, float]


@autocast_off()
def measured_rounding(
    joint: JointGraph,
    values: Sequence[Tensor],
    results: Sequence[Tensor | None],
    nodes: Mapping[str, Any],
    *,
    seed: int,
) -> Rounding:
    """What two runs of the graph with other roundings make of `results` and `nodes`, those of a plain run on `values`.

    Every result of an op that rounds is multiplied by 1 + e, |e| at most its dtype's epsilon, drawn for each element.
    Whole numbers stay: masks and counts are exact. [Stochastic arithmetic: Vignes, CESTAC]
    """
    found = dict.fromkeys(nodes, 0.0)
    ends = [0.0] * len(results)
    for run in range(2):
        nudged = _Nudged(joint.module, nodes, found, seed + run + 1)
        with torch.no_grad():
            flat = nudged.run(*values)
        for i, (now, before) in enumerate(zip(flat, results, strict=True)):
            ends[i] = max(ends[i], _change(now, before))
    return Rounding(ends, found)


class _Reference(fx.Interpreter):
    """Runs a canonical graph, whose strides mean nothing."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in READ_AS_BYTES:
            args = (args[0].contiguous(), *args[1:])
        return super().call_function(target, args, kwargs)


class _Nudged(_Reference):
    def __init__(
        self, module: fx.GraphModule, before: Mapping[str, Any], found: dict[str, float], seed: int
    ) -> None:
        super().__init__(module)
        self._before, self._found = before, found
        self._generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        value = seeded_call(n, super().run_node)
        if n.op != "call_function":
            return value
        if rounds(n):
            nudge = self._nudge
            value = type(value)(map(nudge, value)) if isinstance(value, (tuple, list)) else nudge(value)
        if isinstance(value, Tensor):
            self._found[n.name] = max(self._found[n.name], _change(value, self._before[n.name]))
        return value

    def _nudge(self, value: Any) -> Any:
        if (
            not isinstance(value, Tensor)
            or not (value.is_floating_point() or value.is_complex())
            or not value.numel()
        ):
            return value
        epsilon = torch.finfo(value.dtype).eps
        if is_narrow(value):  # rounds what is alike alike
            return value
        share = (torch.rand(value.shape, generator=self._generator) * 2 - 1).to(value.device) * epsilon
        wide = widened(value)
        moved = (wide + wide * share).to(value.dtype)
        whole = torch.zeros((), dtype=torch.bool) if value.is_complex() else wide == wide.round()
        return torch.where(whole | ~wide.isfinite(), value, moved)


def seeded_call(node: fx.Node, run: Any) -> Any:
    """`run(node)`; an op that draws gives the same numbers wherever and however often it runs."""
    if draws(node):
        torch.manual_seed(0)
    return run(node)


def is_narrow(value: object) -> bool:
    """Floats of 8 bits."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 1


def changed_share(now: Tensor, before: Tensor) -> float:
    """Of numbers of the same shape."""
    now, before = widened(now), widened(before)
    same = (now == before) | (now.isnan() & before.isnan())
    return float((~same).double().mean()) if same.numel() else 0.0


def widened(value: Tensor) -> Tensor:
    """A real or complex `value` in double precision: torch compares no float8."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _change(now: Any, before: Any) -> float:
    """Largest finite |now - before|; inf where whole numbers, or what is finite, differ."""
    if not isinstance(now, Tensor) or not isinstance(before, Tensor) or not now.numel():
        return 0.0
    if not (now.is_floating_point() or now.is_complex()):
        return 0.0 if torch.equal(now, before) else math.inf
    if is_narrow(before):
        return changed_share(now, before)
    now, before = widened(now), widened(before)
    difference = (now - before).abs()
    if bool((now.isfinite() != before.isfinite()).any()):
        return math.inf
    return float(torch.where(now.isfinite(), difference, 0.0).max())


def reference_inputs(
    joint: JointGraph, model: nn.Module, tensors: Sequence[Tensor], *, seed: int
) -> list[Tensor]:
    """A value for every placeholder: the model's own, the call's, and random tangents."""
    generator = torch.Generator().manual_seed(seed)
    named = _named(model)

    def value(node: fx.Node, spec: GraphInput) -> Tensor:
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

    return [value(node, spec) for node, spec in joint.given]


class _Recorder(_Reference):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = seeded_call(n, super().run_node)
        self.values[n.name] = value
        return value


@autocast_off()
def graph_values(joint: JointGraph, values: Sequence[Tensor]) -> tuple[list[Tensor | None], dict[str, Any]]:
    """(the graph's flat results, the value of every node) of the unsharded graph."""
    recorder = _Recorder(joint.module)
    with torch.no_grad():
        results = recorder.run(*values)
    return list(results), recorder.values


def call_outputs(
    joint: JointGraph, model: nn.Module, tensors: Sequence[Tensor], indices: Collection[int]
) -> dict[int, Tensor]:
    """Some outputs of the call, by index, of the unsharded graph: nothing that they do not need is computed."""
    places = {
        end.index: p for p, end in enumerate(joint.outputs) if end.kind == "output" and end.index in indices
    }
    module = duplicate_module(joint.module)
    output = module.graph.output_node()
    returned: Any = output.args[0]
    output.args = (tuple(returned[place] for place in places.values()),)
    module.graph.eliminate_dead_code()
    values = reference_inputs(joint, model, tensors, seed=0)
    results, _ = graph_values(replace(joint, module=module), values)
    return {index: value for index, value in zip(places, results, strict=True) if value is not None}


def eager_results(
    joint: JointGraph, model: nn.Module, call: Callable[[], Sequence[Tensor]], values: Sequence[Tensor]
) -> list[Tensor | None]:
    """The graph's flat results as the untouched model computes them with autograd.

    `call` runs the model and returns the tensor outputs of the call in order. No gradient is accumulated, and what
    `call` changes in the model is put back; buffer updates are read before that.
    """
    given = zip(joint.inputs, values, strict=True)
    tangents = {spec.index: value for spec, value in given if spec.kind == "tangent"}
    named = _named(model)
    changed = {spec.name for spec in joint.outputs if spec.kind == "buffer"} | named_state(model).keys()
    kept = [(named[name], named[name].detach().clone()) for name in changed]
    with state_kept(model):
        try:
            outputs = call()
            gradients = _gradients(model, outputs, tangents)
            return [_result(spec, outputs, model, gradients) for spec in joint.outputs]
        finally:
            with torch.no_grad():
                for state, value in kept:
                    state.copy_(value)


def _gradients(
    model: nn.Module, outputs: Sequence[Tensor], tangents: Mapping[int, Tensor]
) -> dict[str, Tensor]:
    """By parameter name. `autograd.grad`: `.grad` of parameters and inputs, and what hooks do with it, stay."""
    trained = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    pairs = [(outputs[i], tangent) for i, tangent in tangents.items() if outputs[i].requires_grad]
    if not pairs or not trained:
        return {}
    roots, seeds = [root for root, _ in pairs], [seed for _, seed in pairs]
    found = torch.autograd.grad(roots, list(trained.values()), seeds, allow_unused=True)
    # None where a parameter was not used, which torch's annotation does not say. Sparse of `nn.Embedding(sparse=True)`.
    return {
        name: value if value.layout is torch.strided else value.to_dense()
        for name, value in zip(trained, found, strict=True)
        if isinstance(value, Tensor)
    }


def _result(
    spec: GraphOutput, outputs: Sequence[Tensor], model: nn.Module, gradients: Mapping[str, Tensor]
) -> Tensor | None:
    if spec.kind == "output":
        return outputs[spec.index].detach().clone()
    if spec.kind == "buffer":
        return _named(model)[spec.name].detach().clone()
    return gradients.get(spec.name)


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**named_parameters(model), **named_state(model)}
