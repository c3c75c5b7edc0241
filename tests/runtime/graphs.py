"""Joint graphs of small models, made without the capture pass: what the runtime's tests run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from passes.ir.joint import GraphInput, GraphOutput, JointGraph
from passes.ir.torch_compat import fake_mode_of
from passes.ir.torch_sizes import fresh_fakes

__all__ = ["Local", "joint_graph", "joint_of"]


def joint_of(
    fn: Callable[..., Sequence[Tensor]],
    params: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    outputs: int,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> JointGraph:
    """The joint graph of `fn(params, *inputs) -> outputs`, all outputs differentiable."""
    names = list(params)
    example = fn(params, *inputs)
    tangents = [torch.ones_like(o) for o in example]

    def joint(*flat: Tensor) -> tuple[Tensor | None, ...]:
        leaves = dict(zip(names, flat, strict=False))
        leaves = {n: t.detach().requires_grad_() for n, t in leaves.items()}
        given = flat[len(names) : len(names) + len(inputs)]
        results = fn(leaves, *given)
        grads = torch.autograd.grad(
            results, list(leaves.values()), flat[len(names) + len(inputs) :], allow_unused=True
        )
        return (*(r.detach() for r in results), *grads)

    flat = [*(p.detach() for p in params.values()), *inputs, *tangents]
    module = make_fx(joint, tracing_mode="fake", decomposition_table=decompositions)(*flat)
    module.graph.eliminate_dead_code()
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return JointGraph(
        module,
        (
            *(GraphInput("param", n) for n in names),
            *(GraphInput("input", f"args[{i}]", i) for i in range(len(inputs))),
            *(GraphInput("tangent", f"tangent {i}", i) for i in range(outputs)),
        ),
        (
            *(GraphOutput("output", f"output {i}", i) for i in range(outputs)),
            *(GraphOutput("grad", n, i) for i, n in enumerate(names)),
        ),
    )


def joint_graph(
    model: nn.Module,
    inputs: Sequence[Tensor],
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> JointGraph:
    """The joint graph of a model without buffers that returns one tensor or a tuple of tensors."""

    def run(params: Mapping[str, Tensor], *given: Tensor) -> tuple[Tensor, ...]:
        out = functional_call(model, dict(params), given)
        return out if isinstance(out, tuple) else (out,)

    params = dict(model.named_parameters())
    return joint_of(run, params, inputs, len(run(params, *inputs)), decompositions)


class Local:
    """One rank's graph written by hand: float32 inputs, ops, a flat tuple returned."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = fake_mode_of(tuple(fresh_fakes([torch.empty(0)])))

    def input(self, *shape: int) -> fx.Node:
        node = self.graph.placeholder(f"arg{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, target: Any, *args: Any, serves: str | None = None, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])  # type: ignore[index]
        if serves is not None:
            node.meta["serves"] = serves
        return node

    def module(self, *results: fx.Node | None) -> fx.GraphModule:
        self.graph.output(tuple(results))
        return fx.GraphModule(nn.Module(), self.graph)
