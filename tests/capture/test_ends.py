"""Inputs and outputs of every form, and what is left of the model afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.fx import traceback as fx_traceback

from passes.capture import capture, flatten_call
from passes.capture.call import tensor_names
from tests.capture.running import check, tensors_of
from tests.models import Followed


class Pair(nn.Module):
    """Two linears; `second` is not used unless asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, deep: bool = False) -> Tensor:
        x = self.first(x)
        return self.second(x) if deep else x


def test_unused_parameter_is_kept_and_has_no_gradient() -> None:
    captured = check(Pair(), torch.randn(2, 4))
    by_name = {
        (o.kind, o.name): r for o, r in zip(captured.joint.outputs, captured.joint.results, strict=True)
    }
    assert by_name["grad", "second.weight"] is None
    assert by_name["grad", "first.weight"] is not None
    assert "second.weight" in {spec.name for spec in captured.joint.inputs}


def test_python_arguments_are_part_of_the_key() -> None:
    x = torch.randn(2, 4)
    shallow, deep = (flatten_call((x,), {"deep": flag})[1] for flag in (False, True))
    assert shallow != deep
    assert hash(shallow) == hash(flatten_call((torch.zeros(2, 4),), {"deep": False})[1])
    assert flatten_call((x,), {"deep": 1})[1] != deep
    check(Pair(), x, deep=True)


def test_frozen_parameter_has_no_gradient_output() -> None:
    model = Pair()
    model.first.weight.requires_grad_(False)
    captured = check(model, torch.randn(2, 4))
    grads = {spec.name for spec in captured.joint.outputs if spec.kind == "grad"}
    assert grads == {"first.bias", "second.weight", "second.bias"}


def test_input_that_requires_grad_gets_a_gradient() -> None:
    captured = check(Pair(), torch.randn(2, 4, requires_grad=True))
    assert "args[0]" in {spec.name for spec in captured.joint.outputs if spec.kind == "grad"}


def test_nothing_requires_grad_gives_a_forward_graph() -> None:
    captured = check(Pair().requires_grad_(False), torch.randn(2, 4))
    assert all(spec.kind != "tangent" for spec in captured.joint.inputs)


def test_inference_mode() -> None:
    with torch.inference_mode():
        captured = capture(Pair(), (torch.randn(2, 4),), {})
    assert all(spec.kind != "tangent" for spec in captured.joint.inputs)


@dataclass
class Answer:
    value: Tensor
    note: str
    parts: dict[str, Any]


class Named(NamedTuple):
    a: str
    b: Tensor


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, batch: dict[str, Any], pairs: list[tuple[Tensor, Tensor]], *, extra: Named) -> Any:
        y = batch["x"] * self.weight + pairs[0][0] + pairs[1][1] * extra.b
        return Answer(
            y, "fine", {"same": y, "input": batch["x"], "weight": self.weight, "none": None, "n": 3}
        ), [(y > 0, y.detach())]


def _nested() -> tuple[tuple[Any, ...], dict[str, Any]]:
    t = [torch.randn(2, 3) for _ in range(6)]
    return ({"x": t[0], "flag": True}, [(t[1], t[2]), (t[3], t[4])]), {"extra": Named("word", t[5])}


def test_nested_inputs_and_outputs() -> None:
    args, kwargs = _nested()
    model = Structured()
    captured = check(model, *args, **kwargs)
    assert tensor_names(captured.call.key) == [
        "args[0]['x']", "args[1][0][0]", "args[1][0][1]", "args[1][1][0]", "args[1][1][1]", "extra[1]",
    ]  # fmt: skip
    returned = model(*args, **kwargs)
    flat = captured.call.flatten_outputs(returned, args, kwargs)
    answer, rest = captured.call.unflatten(flat, args, kwargs)
    assert isinstance(answer, Answer) and answer.note == "fine"
    assert answer.parts["same"] is answer.value and answer.parts["none"] is None and answer.parts["n"] == 3
    assert isinstance(rest[0], tuple)
    assert [spec.index for spec in captured.joint.inputs if spec.kind == "tangent"] == [0, 2]  # y and weight
    assert not captured.joint.results[1].meta["val"].requires_grad  # type: ignore[union-attr]


def test_outputs_that_are_inputs_or_parameters() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Any:
            return x, self.weight, x, x[0], None

    captured = check(Through(), torch.randn(2, 3))
    assert captured.call.output_count == 3
    a, b, c, d, e = captured.call.unflatten([1, 2, 3], (), {})
    assert (a, b, c, d, e) == (1, 2, 1, 3, None)


class Listed(nn.Module):
    """Part of a list of parameters, which is a list of its own, and a copy of a dict of them."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))
        self.named = nn.ParameterDict({"scale": torch.randn(4), "shift": torch.randn(4)})
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights[1:]:
            x = torch.tanh(x @ weight)
        named = self.named.copy()
        assert all(isinstance(value, nn.Parameter) for value in (self.weights[0], named["scale"]))
        return self.norm(x @ self.weights[0] * named["scale"] + named["shift"])


@pytest.mark.parametrize("norm", [False, True])
def test_parts_of_lists_of_parameters_are_the_same_parameters(norm: bool) -> None:
    """norm: writes running statistics, which is traced another way."""
    model = Listed(norm).double()
    joint = check(model, torch.randn(3, 4, dtype=torch.float64)).joint
    ends = zip(joint.outputs, joint.results, strict=True)
    assert all(node is not None for end, node in ends if end.kind == "grad")
    assert list(dict(model.weights.named_parameters())) == ["0", "1", "2"]


class Buffered(nn.Module):
    def __init__(self, assign: bool) -> None:
        super().__init__()
        self.assign = assign
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.assign:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        else:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_buffer_changed_in_place_or_assigned(assign: bool, grad: bool) -> None:
    model = Buffered(assign)
    before = model.mean
    captured = check(model, torch.randn(2, 3, requires_grad=grad))
    assert model.mean is before and not before.any()
    assert [spec.index for spec in captured.joint.outputs if spec.kind == "buffer"] == [0]


def test_a_parameter_that_is_not_trained_changes_as_a_buffer_does() -> None:
    model = Followed()
    before = [p.clone() for p in model.parameters()]
    captured = check(model, torch.randn(4, 6))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    ends = [(captured.joint.inputs[end.index].kind, end.name) for end in captured.joint.outputs]
    assert [end for end in ends if end[1].startswith("slow")] == [
        ("param", "slow.weight"),
        ("param", "slow.bias"),
    ]


def test_a_tensor_attribute_is_an_input_and_a_literal_a_constant() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor([1.0, 2.0, 3.0])
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * self.weight + self.scale + torch.tensor([4.0, 5.0, 6.0])

    captured = check(Scaled(), torch.randn(2, 3))
    assert [(spec.kind, spec.name) for spec in captured.joint.inputs[:3]] == [
        ("param", "weight"),
        ("buffer", "scale"),
        ("constant", "constant 0"),
    ]
    assert captured.joint.constants["constant 0"].tolist() == [4.0, 5.0, 6.0]


def test_order_of_inputs_and_outputs() -> None:
    captured = check(Buffered(True), torch.randn(2, 3, requires_grad=True))
    assert [spec.kind for spec in captured.joint.inputs] == ["buffer", "input", "tangent"]
    assert [spec.kind for spec in captured.joint.outputs] == ["output", "buffer", "grad"]
    assert captured.joint.outputs[-1].index == 1


def test_dropout_is_a_random_op_of_the_graph() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (torch.randn(2, 4),), {})
    assert "aten.native_dropout.default" in {str(node.target) for node in captured.joint.graph.nodes}


def test_model_is_left_as_it_was() -> None:
    class Remembers(Pair):
        def forward(self, x: Tensor, deep: bool = False) -> Tensor:
            self.last = super().forward(x, deep)
            self.calls = getattr(self, "calls", 0) + 1
            return self.last

    model = Remembers()
    state, attributes = tensors_of(model), set(model.__dict__)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    capture(model, (torch.randn(2, 4),), {})
    assert set(model.__dict__) == attributes
    assert all(tensors_of(model)[name] is tensor for name, tensor in state.items())
    weight = model.first.weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(1)))  # refused while weakly referenced
    assert optimizer.param_groups[0]["params"][0] is weight and weight.shape == (1,)


def test_torch_is_left_as_it_was() -> None:
    import torch.nn.functional as F

    attend, fast = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    x = torch.randn(2, 4, requires_grad=True)
    rng = torch.get_rng_state()
    capture(nn.Dropout(0.5), (x,), {})
    assert F.scaled_dot_product_attention is attend
    assert torch.backends.mha.get_fastpath_enabled() is fast
    assert torch.backends.mkldnn.enabled and torch.backends.cudnn.enabled
    assert not torch.compiler.is_compiling() and torch.is_grad_enabled()
    assert not torch.nn.modules.module._global_forward_hooks
    assert fx_traceback.current_meta == {}
    assert torch.equal(torch.get_rng_state(), rng)


def test_module_and_source_of_nodes() -> None:
    captured = capture(Pair(), (torch.randn(2, 4), True), {})
    products = [n for n in captured.joint.graph.nodes if "mm" in str(n.target)]
    assert [(n.meta["phase"], n.meta["module"]) for n in products] == [
        ("forward", "first"), ("forward", "second"),
        ("backward", "second"), ("backward", "second"), ("backward", "first"),
    ]  # fmt: skip
    line = Pair.forward.__code__.co_firstlineno
    assert products[0].meta["source"] == f"test_ends.py:{line + 1}"
    assert products[1].meta["source"] == f"test_ends.py:{line + 2}"
    assert products[2].meta["source"] == f"test_ends.py:{line + 2}"
