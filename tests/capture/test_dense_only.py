"""Sparse, nested and quantized tensors: an error that names the tensor or the line, and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_model.errors import CaptureError
from passes.capture import capture


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)


FORMS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse_coo": (lambda: torch.eye(4).to_sparse(), r"{}\.to_dense\(\)"),
    "sparse_csr": (lambda: torch.eye(4).to_sparse_csr(), r"{}\.to_dense\(\)"),
    "nested": (jagged, r"torch\.nested\.to_padded_tensor\({}, 0\.0\), and a mask"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
        r"{}\.dequantize\(\)",
    ),
}


class Applies(nn.Module):
    """A linear layer, and any function of its weight and its argument."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function
        self.held = [torch.eye(4).to_sparse()]

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested tensors.*", "ignore:.*quantize.*")
@pytest.mark.parametrize("form", FORMS)
def test_what_a_model_gets(form: str) -> None:
    make, remedy = FORMS[form]
    module = nn.Linear(4, 4)
    module.register_buffer("table", make())
    for model, args, name in (
        (nn.Sequential(module), (torch.ones(2, 4),), r"0\.table"),
        (
            Applies(lambda m, x: m.linear.weight.sum()),
            ({"a": [torch.ones(2), make()]},),
            r"args\[0\]\['a'\]\[1\]",
        ),
    ):
        with pytest.raises(CaptureError, match=rf"{name} is .*{form}, not.*\n  try: {remedy.format(name)}"):
            capture(model, args, {})


def to_sparse(m: Any, x: Tensor) -> Any:
    return torch.sparse.mm(x.to_sparse(), m.linear.weight).sum()


def to_csr(m: Any, x: Tensor) -> Any:
    return (m.linear(x).to_sparse_csr() @ m.linear.weight).sum()


def coo(m: Any, x: Tensor) -> Any:
    return torch.sparse_coo_tensor(torch.tensor([[0], [1]]), m.linear.weight[0, :1], (4, 4)).to_dense().sum()


def held(m: Any, x: Tensor) -> Any:
    return torch.sparse.mm(m.held[0], m.linear.weight).sum()


def nested(m: Any, x: Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(m.linear(x), torch.tensor([0, 1, 2])).values().sum()


def nested_without_layout(m: Any, x: Tensor) -> Any:
    return torch.nested.nested_tensor([x[0], m.linear(x)[1]]).unbind()[0].sum()


def nested_by_mask(m: Any, x: Tensor) -> Any:
    return torch._nested_tensor_from_mask(m.linear(x)[None], torch.ones(1, 2).bool()).to_padded_tensor(0.0)


def dense(m: Any, x: Tensor) -> Any:
    places = (torch.tensor([0]), torch.tensor([1]))
    return torch.zeros(4, 4).index_put(places, m.linear.weight[0, :1], accumulate=True).sum()


MADE = {
    to_sparse: "to_sparse",
    to_csr: "to_sparse_csr",
    coo: "sparse_coo_tensor",
    held: "_sparse_mm",
    nested: "nested",
    nested_without_layout: "nested",
    nested_by_mask: "nested",
}


@pytest.mark.parametrize("function", MADE, ids=lambda function: function.__name__)
def test_what_a_forward_makes(function: Callable[..., Any]) -> None:
    """`to_sparse_csr` of a traced tensor ends the process."""
    with pytest.raises(CaptureError, match=rf"(?s){MADE[function]}.*hold dense ones\n.*\n  try: ") as caught:
        capture(Applies(function), (torch.ones(2, 4),), {})
    assert f"test_dense_only.py:{function.__code__.co_firstlineno + 1}" in str(caught.value)


def test_the_remedy() -> None:
    capture(Applies(dense), (torch.ones(2, 4),), {})
