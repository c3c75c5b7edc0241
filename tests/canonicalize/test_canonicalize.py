"""The whole pipeline: canonical graphs compute the same, from the ops that it promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from passes.canonicalize import PIPELINE, canonicalize
from passes.capture import capture
from passes.ir.graph_pass import GraphPass, copy_joint
from passes.ir.joint import JointGraph, tensor_operands
from tests import models
from tests.canonicalize.functions import FUNCTIONS
from tests.canonicalize.gone import is_gone
from tests.canonicalize.graphs import Function, assert_same, assert_valid, joint_of, ops, ramp, run, text

GONE = {
    "mm", "bmm", "addmm", "baddbmm", "view", "t", "transpose", "unsqueeze", "squeeze", "clone", "detach",
    "alias", "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_batch_norm",
    "_native_batch_norm_legit_functional", "native_batch_norm_backward", "_softmax", "_log_softmax",
    "_softmax_backward_data", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward",
    "native_dropout", "bernoulli", "rand_like", "mean", "var", "var_mean", "std", "zeros_like", "scatter",
    "scalar_tensor", "lift_fresh_copy",
}  # fmt: skip


def checked(joint: JointGraph, inputs: list[torch.Tensor]) -> JointGraph:
    before = text(joint)
    canonical = canonicalize(joint)
    assert text(joint) == before, "canonicalize changed its argument"
    assert_valid(canonical)
    assert not GONE & set(ops(canonical))
    targets = {n.target for n in canonical.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    assert not [op for op in targets if is_gone(op)]
    assert_same(joint, canonical, inputs, rtol=1e-5, atol=1e-5)
    return canonical


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    checked(joint_of(function, *inputs), list(inputs))


def test_an_einsum_is_one_product() -> None:
    function, inputs = FUNCTIONS["einsum over two"]
    assert ops(canonicalize(joint_of(function, *inputs))) == {"contract": 3}


def test_attention_keeps_batch_heads_and_both_lengths_apart() -> None:
    function, inputs = FUNCTIONS["attention"]
    canonical = canonicalize(joint_of(function, *inputs))
    equations = [
        line.split(", ", 2)[2].split(")")[0] for line in text(canonical) if line.startswith("contract")
    ]
    assert equations[1:3] == ["b0 m b1 k, b0 n b1 k -> b0 b1 m n", "b0 b1 m k, b0 k b1 n -> b0 m b1 n"]


def test_a_loss_on_flat_logits_is_computed_on_their_own_dims() -> None:
    function, inputs = FUNCTIONS["cross entropy"]
    canonical = canonicalize(joint_of(function, *inputs))
    shapes = {tuple(n.meta["val"].shape) for n in canonical.graph.nodes if n.op == "call_function"}
    assert not [shape for shape in shapes if 10 in shape], "nothing has batch and sequence in one dim"


def test_variance_loses_no_digits() -> None:
    x = 1e4 + ramp(2, 64)
    (got,) = [y for y in run_canonical(lambda x: x.var(1), x) if y is not None]
    torch.testing.assert_close(got, x.double().var(1).float(), rtol=1e-4, atol=0)


def run_canonical(function: Function, x: torch.Tensor) -> list[torch.Tensor | None]:
    return run(canonicalize(joint_of(function, x, grads=False)), [x])


class Conv(nn.Module):
    """Every norm for images, dropout at 0, pooling and a loss that ignores an index."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(128, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.pool(torch.relu(self.norms(self.conv(x))))
        return F.cross_entropy(self.head(hidden.flatten(1)), y, label_smoothing=0.1)


def conv() -> tuple[nn.Module, dict[str, Any]]:
    return Conv().train(), {"x": torch.randn(4, 3, 8, 8), "y": torch.tensor([1, -100, 0, 4])}


def values(joint: JointGraph, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What the graph's inputs other than tangents are in `model` and the call."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    found: dict[str, Mapping[str, torch.Tensor]] = {"constant": joint.constants, "input": inputs}
    named = [(i.name, found.get(i.kind, state)) for i in joint.inputs if i.kind not in ("tangent", "seed")]
    return [where[name].detach() for name, where in named]


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "llama": models.llama,
    "gpt2": models.gpt2,
    "bert": models.bert,
    "vit": models.vit,
    "conv": conv,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model, inputs = MODELS[name]()
    joint = capture(model, (), inputs).joint
    order = [i.kind for i in joint.inputs]
    assert order == sorted(order, key=lambda kind: kind == "tangent"), "the test gives tangents last"
    canonical = checked(joint, values(joint, model, inputs))
    assert_linear_layers_are_products(model, canonical)


def assert_linear_layers_are_products(model: nn.Module, canonical: JointGraph) -> None:
    """Each 2-d weight of a linear layer is read, as it is, by products that keep all dims of the tokens,
    and its gradient is a product as it comes."""
    gradients = {
        o.name: r for o, r in zip(canonical.outputs, canonical.results, strict=True) if o.kind == "grad"
    }
    parameters = {i.name: p for i, p in zip(canonical.inputs, canonical.placeholders, strict=True)}
    linear = [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
    assert linear
    for name in linear:
        weight = parameters.get(f"{name}.weight")
        if weight is None:  # tied
            continue
        readers = [reader for reader in weight.users if reader.op == "call_function"]
        assert {str(reader.target) for reader in readers} <= {
            "autoshard.contract.default",
            "autoshard.use.default",
        }
        for reader in readers:
            tokens = tensor_operands(reader)[0].meta["val"]
            assert reader.meta["val"].ndim == tokens.ndim
        gradient = gradients[f"{name}.weight"]
        assert gradient is not None and str(gradient.target) == "autoshard.contract.default", gradient


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_models_with_dropout(name: str) -> None:
    model, inputs = (models.bert if name == "bert" else models.vit)(dropout=0.1)
    joint = capture(model, (), inputs).joint
    canonical = canonicalize(joint)
    assert_valid(canonical)
    assert not GONE & set(ops(canonical))
    targets = {n.target for n in canonical.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    assert not [op for op in targets if is_gone(op)]
    draws = [n for n in canonical.graph.nodes if n.target is torch.ops.autoshard.uniform.default]
    assert len({n.args[4] for n in draws}) == len(draws) > 4, "every draw has its own stream"
    assert all(n.meta["phase"] == "forward" for n in draws), "the backward reads the forward's masks"


@pytest.mark.parametrize("graph_pass", {type(p): p for p in PIPELINE}.values(), ids=lambda p: p.name)
def test_a_pass_and_its_test_have_one_name(graph_pass: GraphPass) -> None:
    assert (Path(__file__).parent / f"test_{graph_pass.name.replace('-', '_')}.py").exists()


def test_the_same_model_gets_the_same_names() -> None:
    model, inputs = models.gpt2()
    first, second = (canonicalize(capture(model, (), inputs).joint) for _ in range(2))
    assert text(first) == text(second)
    assert first.placeholders[0].name == "transformer_wte_weight"


def test_every_pass_leaves_the_graph_valid() -> None:
    model, inputs = models.bert(layers=1)
    joint = copy_joint(capture(model, (), inputs).joint)
    for graph_pass in PIPELINE:
        joint = graph_pass(joint)
        assert_valid(copy_joint(joint))


def test_canonicalize_is_quick() -> None:
    """Below 2 ms a node; Llama-3-8B has 32 layers and takes 1.5 s on an idle core."""
    model, inputs = models.llama(layers=8, batch=2)
    joint = capture(model, (), inputs).joint
    start = time.process_time()
    canonicalize(joint)
    assert time.process_time() - start < 0.002 * len(joint.graph.nodes)
