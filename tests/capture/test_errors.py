"""Every refusal names the line of the user's code, and leaves the model as it was."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_model.errors import CaptureError
from passes.capture import capture
from tests.capture.running import tensors_of

OUTSIDE = nn.Parameter(torch.ones(3))


class Runs(nn.Module):
    """A linear, then any function of (module, hidden)."""

    count: Tensor

    def __init__(self, rest: Callable[[Runs, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))
        self.rest = rest

    def forward(self, x: Tensor) -> Any:
        return self.rest(self, self.linear(x))


def loop(_: Runs, h: Tensor) -> Tensor:
    while h.sum() > 0:
        h = h - 1
    return h


def item(_: Runs, h: Tensor) -> Tensor:
    return h * math.sqrt(h.max().item())


def as_list(_: Runs, h: Tensor) -> Tensor:
    return h * h[0].tolist()[0]


def boolean_index(_: Runs, h: Tensor) -> Tensor:
    return h[h > 0]


def numpy(_: Runs, h: Tensor) -> Tensor:
    return h * float(h.detach().numpy().sum())


def wrong_shape(_: Runs, h: Tensor) -> Tensor:
    return h @ torch.ones(7, 2)


def changes_parameter(m: Runs, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.linear.weight.clamp_(-1, 1)
    return h


def max_norm(m: Runs, h: Tensor) -> Tensor:
    return F.embedding(h.detach().long().clamp(0, 1), m.linear.weight, max_norm=1.0)


def changes_buffer_with_gradient(m: Runs, h: Tensor) -> Tensor:
    m.count.add_(h.sum())
    return h


def stray_parameter(_: Runs, h: Tensor) -> Tensor:
    return h * OUTSIDE


def raises(_: Runs, h: Tensor) -> Tensor:
    raise KeyError("vocabulary")


def reseeds(_: Runs, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        return h + torch.randn(3)


DATA, SHAPE = "the value of a tensor decides", "the shape of a result depends"
REFUSED = [
    (loop, 1, DATA),
    (item, 1, DATA),
    (as_list, 1, DATA),
    (boolean_index, 1, SHAPE),
    (numpy, 1, "NumPy reads the values of a tensor"),
    (wrong_shape, 1, "RuntimeError"),
    (changes_parameter, 2, "parameter linear.weight"),
    (max_norm, 1, "in place (max_norm)"),
    (changes_buffer_with_gradient, None, "buffer count"),
    (stray_parameter, 1, "neither its parameter"),
    (raises, 1, "KeyError: 'vocabulary'"),
    (reseeds, 2, "it calls torch.manual_seed"),
]


@pytest.mark.parametrize(("rest", "offset", "reason"), REFUSED, ids=[r[0].__name__ for r in REFUSED])
def test_refusal_names_the_line(rest: Callable[..., Any], offset: int | None, reason: str) -> None:
    model = Runs(rest)
    state = tensors_of(model)
    with pytest.raises(CaptureError) as caught:
        capture(model, (torch.randn(2, 3),), {})
    text = str(caught.value)
    assert text.startswith("cannot capture Runs: ") and reason in text and "\n  try: " in text
    assert offset is None or f"test_errors.py:{rest.__code__.co_firstlineno + offset}" in text
    assert all(tensors_of(model)[name] is tensor for name, tensor in state.items())
    assert not torch.compiler.is_compiling() and not torch.nn.modules.module._global_forward_hooks
    model.rest = lambda _, h: h
    capture(model, (torch.randn(2, 3),), {})


def test_a_seed_of_no_choice_is_none() -> None:
    """Reformer keeps what `torch.seed()` gives, to draw the same again in its own backward."""

    def rest(_: Runs, h: Tensor) -> Tensor:
        torch.manual_seed(torch.seed())
        return h + torch.randn(3)

    assert capture(Runs(rest), (torch.randn(2, 3),), {}).joint.outputs


def test_the_whole_message() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Runs(loop), (torch.randn(2, 3),), {})
    line = loop.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        "cannot capture Runs: the value of a tensor decides what runs next (`if`, `.item()`, `.tolist()`, `int()`, ...)"
        f"\n  at {__file__}:{line}, in loop: while h.sum() > 0:"
        "\n  try: torch.where, masks, an argument that is a Python number, or do it outside of forward"
    )


def test_wrong_arguments() -> None:
    with pytest.raises(
        CaptureError, match=r"missing 1 required positional argument: 'x'(.|\n)*at .*test_errors.py"
    ):
        capture(Runs(loop), (), {})


def test_no_tensor_returned() -> None:
    with pytest.raises(CaptureError, match="its forward returns no tensor"):
        capture(Runs(lambda m, h: None), (torch.randn(2, 3),), {})


def test_lazy_parameter() -> None:
    with pytest.raises(CaptureError, match="weight is a lazy parameter"):
        capture(nn.LazyLinear(3), (torch.randn(2, 3),), {})


def test_attention_is_put_back_after_a_failure() -> None:
    attend = F.scaled_dot_product_attention
    with pytest.raises(CaptureError):
        capture(Runs(raises), (torch.randn(2, 3),), {})
    assert F.scaled_dot_product_attention is attend


def test_a_wrong_width_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError, match=r"\[4, 7\] X \[8, 8\]") as caught:
        capture(Wide(), (torch.randn(4, 7),), {})
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    text = traceback.format_exception(caught.value.__cause__)
    assert any("self.mix(x)" in line for line in text) and len("".join(text).splitlines()) < 10
    assert not logging.getLogger("torch._subclasses.fake_tensor").filters


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)
