"""Numbers that a forward reads and only keeps: known after the call, errors where anything looks at them."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import MeshSpec, find_plan, verify
from autoshard.runtime.call_program import Checks, Otherwise
from cost_model.errors import CaptureError
from passes.capture import Captured, capture
from tests.capture.running import run_graph, tensors_of

Rest = Callable[[Any, Tensor, Tensor], Any]


class Logs(nn.Module):
    """A linear layer, and any function of (the module, what it gives, the input)."""

    def __init__(self, rest: Rest) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(3))
        self.rest = rest
        self.log: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=2)
        self.metrics: dict[str, Any] = {}
        self.last: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.rest(self, self.linear(x), x)


def everywhere(m: Any, h: Tensor, x: Tensor) -> Any:
    """Also a value that is changed after it was read, one that follows from the input, lists, and one in two places."""
    m.log.append(h.square().mean().item())
    m.log.append((x > 0).sum().item())
    m.recent.append([h.max().item(), {"n": (h > 9).any().item()}])
    m.metrics["rows"] = h.mean(1).tolist()
    m.last = m.steps.item()
    m.steps.add_(1)
    number = m.metrics["least"] = h.min().item()
    return h, {"least": number if isinstance(number, float) else None}


def beside_questions(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """On one line are a number that is kept, and one that is used and follows from the input."""
    m.log.append(h.mean().item())
    m.log.append((h > 0).any().item())
    if (h.abs() > 99).any().item():
        raise ValueError("exploded")
    if x.max() > 99:
        raise ValueError("too large")
    count = (x < 99).sum().item(); m.log.append(h.max().item())  # fmt: skip # noqa: E702
    return h * torch.full((4,), count)


def called(captured: Captured, model: nn.Module, x: Tensor) -> Any:
    """What a call of the graph returns; it leaves what it leaves."""
    found = run_graph(captured, tensors_of(model), [x], [torch.ones(2, 4).double()])
    outputs = [found["output", f"output {i}"] for i in range(captured.call.output_count)]
    return captured.call.unflatten(outputs, (x,), {})


@pytest.mark.parametrize("rest", [everywhere, beside_questions], ids=lambda rest: rest.__name__)
def test_kept_numbers_are_those_of_the_call(rest: Rest) -> None:
    """Python numbers, the same as in eager mode, in the same places; after two calls, of another input than traced."""
    torch.manual_seed(0)
    eager, model = Logs(rest).double(), Logs(rest).double()
    model.load_state_dict(eager.state_dict())
    captured = capture(model, (torch.randn(2, 4).double(),), {})
    for _ in range(2):
        x = torch.randn(2, 4).double()
        steps = model.steps.clone()
        wanted, got = eager(x), called(captured, model, x)
        model.steps.copy_(steps + (rest is everywhere))
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for name in ("log", "recent", "metrics", "last"):
        torch.testing.assert_close(getattr(model, name), getattr(eager, name), rtol=1e-12, atol=1e-12)
    assert [type(number) for number in model.log[:2]] == [type(number) for number in eager.log[:2]]


def test_gradients_and_plans() -> None:
    model, x = Logs(everywhere).double(), torch.randn(8, 4).double()
    plan = find_plan(model, MeshSpec({"dp": 2}), (x,), profile="cpu", refine="off")
    report = verify(model, plan, (x,))
    assert report.ok and report.max_error < 1e-12, report
    assert not model.log and model.last is None


def to_torch(m: Any, h: Tensor, x: Tensor) -> Any:
    return h + torch.full((4,), h.max().item())


def read_later(m: Any, h: Tensor, x: Tensor) -> Any:
    m.last = h.max().item()
    return h * round(m.last)


def compared(m: Any, h: Tensor, x: Tensor) -> Any:
    m.last = h.max().item()
    if m.last > h.min().item() and m.last != 0 and m.last:
        h = h * 2
    return h if (h[0, 0] > h[0, 1]).item() else -h


def caught(m: Any, h: Tensor, x: Tensor) -> Any:
    try:
        return h * math.sqrt(h.max().item())
    except Exception:
        return h


def counted(m: Any, h: Tensor, x: Tensor) -> Any:
    return h, len(h.max(0).values.tolist())


USES = {to_torch: 1, read_later: 2, caught: 2, counted: 1}


def computed(m: Any, h: Tensor, x: Tensor) -> Any:
    scale, rows = h.abs().max().item() / 127, max((h > 0).sum().item(), 1)
    low, high = -h.std().item(), 2 * h.std().item() + 0.1
    m.last = high - low / rows
    scale = scale + (rows // 3 + rows % 7) ** 2 / 100
    h = torch.round(h / scale) * scale + (rows - 1.5) * h.clamp(low, high)
    h = torch.where(h > high, low, h) + (low < h) * abs(low) + h.abs() ** high
    h[0] = high
    return h.sum() / (rows + 257) + h.add(+high).mul_(low).lerp(h, high), m.last


def test_a_number_is_computed_with() -> None:
    """As Python does, beside tensors as torch does, in every dtype."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model, x = Logs(lambda m, h, x: computed(m, x, x)).to(dtype), torch.randn(6, 4).to(dtype)
        wanted, kept = model(x)
        captured = capture(model, (x,), {})
        found = run_graph(captured, tensors_of(model), [x], [torch.ones_like(wanted)])
        outputs: Any = [found["output", f"output {i}"] for i in range(captured.call.output_count)]
        torch.testing.assert_close(outputs[0], wanted, rtol=1e-6, atol=0)
        assert any(
            one.dtype == torch.float64 and not one.dim() and math.isclose(one.item(), kept) for one in outputs
        )


def test_a_number_is_an_index_and_a_size() -> None:
    """Where it follows from the input; of what is computed, an error with a remedy that is right."""

    def rest(m: Any, h: Tensor, x: Tensor) -> Tensor:
        i = (x > 0).sum().clamp(1, 1).item()
        return (
            h[i]
            + h.select(0, i)
            + h.narrow(0, i, 1).sum()
            + h.topk(i)[0]
            + h.roll(i, 1)[0, i]
            + h.to(x.dtype) * i
            + torch.zeros(i, 4)
            + h[0].expand(i, 4)
            + torch.cat([h.tensor_split(i + 1)[0]] * i)
            + F.group_norm(h, i) * np.float64(i)
        )

    model, x = Logs(rest).double(), torch.randn(2, 4).double()
    with torch.no_grad():
        torch.testing.assert_close(called(capture(model, (x,), {}), model, x), model(x))
    computed: Rest = lambda m, h, x: h[h[:, 0].argmax().item()]
    with pytest.raises(CaptureError, match=r"x\.index_select\(0, i\)\.squeeze\(0\) for x\[i\]"):
        capture(Logs(computed).double(), (x,), {})
    told: Rest = lambda m, h, x: h.index_select(0, h[:, 0].argmax()).squeeze(0)
    other = Logs(told).double()
    with torch.no_grad():
        assert torch.equal(called(capture(other, (x,), {}), other, x), other(x))


def test_a_number_that_may_be_zero_divides_a_number() -> None:
    """As in Python it is an error, at the call."""
    divided = Logs(lambda m, h, x: h * (1 / x.sum().item()))
    captured = capture(divided, (torch.ones(2, 4),), {})
    assert any(isinstance(check.error, ZeroDivisionError) for _, check in captured.call.checks)


def test_a_number_is_compared() -> None:
    """For inputs of which the program is that of the other side, its check says so."""
    torch.manual_seed(0)
    model = Logs(compared).double()
    captured, others = capture(model, (torch.randn(2, 4).double(),), {}), 0
    for _ in range(8):
        x = torch.randn(2, 4).double()
        wanted = model(x)
        found = run_graph(captured, tensors_of(model), [x], [torch.ones(2, 4).double()])
        outputs: Any = [found["output", f"output {i}"] for i in range(captured.call.output_count)]
        try:
            Checks(captured.call)(outputs, later=False)
        except Otherwise as otherwise:
            captured, others = capture(model, (x,), {}, answers=otherwise.answers), others + 1
            continue
        torch.testing.assert_close(outputs[0], wanted, rtol=1e-12, atol=1e-12)
    assert 0 < others < 8


@pytest.mark.parametrize("rest", USES, ids=lambda rest: rest.__name__)
def test_what_looks_at_a_number(rest: Rest) -> None:
    with pytest.raises(CaptureError, match="the value of a tensor decides what runs next") as error:
        capture(Logs(rest), (torch.randn(2, 4),), {})
    assert f"test_awaited.py:{rest.__code__.co_firstlineno + USES[rest]}" in str(error.value)


def printed(m: Any, h: Tensor, x: Tensor) -> Any:
    print(f"{h.mean().item()}")
    return h


def logged(m: Any, h: Tensor, x: Tensor) -> Any:
    logging.getLogger("tests").warning("mean %s", h.mean().item())
    return h


def test_a_number_at_once() -> None:
    """`float(x)` has to be one: Python takes no stand-in."""
    with pytest.raises(CaptureError, match=r"only kept, x.item\(\) for float\(x\)"):
        capture(Logs(lambda m, h, x: (h, float(h.detach().mean()))), (torch.randn(2, 4),), {})


@pytest.mark.parametrize("rest", [printed, logged], ids=lambda rest: rest.__name__)
def test_the_text_of_a_number(rest: Rest, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed, nor what logging makes of the error."""
    handler = logging.StreamHandler()
    logging.getLogger("tests").addHandler(handler)
    try:
        with pytest.raises(
            CaptureError, match=r"the text of a number .*\n.*\n  try: keep the number"
        ) as error:
            capture(Logs(rest), (torch.randn(2, 4),), {})
    finally:
        logging.getLogger("tests").removeHandler(handler)
    assert f"test_awaited.py:{rest.__code__.co_firstlineno + 1}" in str(error.value)
    assert "".join(capsys.readouterr()) == ""
