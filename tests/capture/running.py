"""Run a captured graph on real tensors and compare it with eager autograd."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.capture import Captured, capture, flatten_call
from passes.capture.call import tensor_names

Call = tuple[tuple[Any, ...], dict[str, Any]]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **{
            f"{n}.{k}" if n else k: v
            for n, m in model.named_modules()
            for k, v in vars(m).items()
            if type(v) is Tensor
        },
    }


def run_graph(
    captured: Captured,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
) -> dict[tuple[str, str], Tensor | None]:
    """The graph's results by (kind, name)."""
    joint = captured.joint
    values: list[Tensor] = []
    for spec in joint.inputs:
        match spec.kind:
            case "param" | "buffer":
                values.append(state[spec.name].detach())
            case "constant":
                values.append(joint.constants[spec.name])
            case "input":
                values.append(inputs[spec.index].detach())
            case _:
                tangent = tangents[spec.index]
                assert tangent is not None, f"a tangent for output {spec.index}, which has no gradient"
                values.append(tangent)
    with torch.no_grad():
        results = fx.Interpreter(joint.module).run(*values)
    return {(spec.kind, spec.name): result for spec, result in zip(joint.outputs, results, strict=True)}


def run_eager(
    captured: Captured, model: nn.Module, call: Call, tangents: Sequence[Tensor | None]
) -> dict[tuple[str, str], Tensor | None]:
    """The same by the unmodified model: a copy of it, since buffers may change."""
    model = copy.deepcopy(model)
    args, kwargs = call
    inputs, _ = flatten_call(args, kwargs)
    outputs = captured.call.flatten_outputs(model(*args, **kwargs), args, kwargs)
    pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if o.requires_grad and t is not None]
    sources = {n: p for n, p in model.named_parameters() if p.requires_grad}
    sources |= {n: t for n, t in zip(tensor_names(captured.call.key), inputs, strict=True) if t.requires_grad}
    grads: Sequence[Tensor | None] = [None] * len(sources)
    if pairs:
        grads = torch.autograd.grad(
            [o for o, _ in pairs], list(sources.values()), [t for _, t in pairs], allow_unused=True
        )
    state = tensors_of(model)
    buffers = [spec.name for spec in captured.joint.outputs if spec.kind == "buffer"]
    return {
        **{("output", f"output {i}"): o for i, o in enumerate(outputs)},
        **{("buffer", name): state[name] for name in buffers},
        **({("grad", name): g for name, g in zip(sources, grads, strict=True)} if pairs else {}),
    }


def check(model: nn.Module, *args: Any, rtol: float = 1e-5, atol: float = 1e-6, **kwargs: Any) -> Captured:
    """Capture the call, and compare outputs, new buffers and gradients with eager execution."""
    captured = capture(model, args, kwargs)
    inputs, _ = flatten_call(args, kwargs)
    wanted_tangents = {spec.index for spec in captured.joint.inputs if spec.kind == "tangent"}
    values = [None if node is None else node.meta["val"] for node in captured.joint.results]
    tangents = [
        torch.randn(values[i].shape, dtype=values[i].dtype) if i in wanted_tangents else None  # type: ignore[union-attr]
        for i in range(captured.call.output_count)
    ]
    eager = run_eager(captured, model, (args, kwargs), tangents)
    graph = run_graph(captured, tensors_of(model), inputs, tangents)
    assert graph.keys() == eager.keys()
    for name, wanted in eager.items():
        got = graph[name]
        if wanted is None or got is None:
            assert wanted is got is None, name
        else:
            torch.testing.assert_close(
                got, wanted.detach(), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )
    check_invariants(captured)
    return captured


def check_invariants(captured: Captured) -> None:
    """What every JointGraph promises."""
    joint = captured.joint
    joint.graph.lint()
    assert len(joint.placeholders) == len(joint.inputs)
    assert len(joint.results) == len(joint.outputs)
    forward = {n for n, spec in zip(joint.results, joint.outputs, strict=True) if spec.kind != "grad"}
    assert all(n is None or n.op == "placeholder" or n.meta["phase"] == "forward" for n in forward)
    for node in joint.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        if node.op == "call_function":
            assert {"val", "phase", "module", "source"} <= node.meta.keys()
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable, node
            if node.meta["phase"] == "forward":
                assert all(i.meta["phase"] == "forward" for i in node.all_input_nodes)
