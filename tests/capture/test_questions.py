"""What a forward asks of values: checks that only raise, branches of which a call takes one side, numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from autoshard import MeshSpec, find_plan, verify
from autoshard.runtime.call_program import Checks, Otherwise
from cost_model.errors import CaptureError
from passes.capture import capture, trace
from passes.capture.questions import Answers
from passes.simulate.reference import graph_values, reference_inputs
from tests.capture.running import check

Rest = Callable[[Any, Tensor, Tensor], Tensor]


class Asks(nn.Module):
    """A linear layer, and any function of (the module, what it gives, the input)."""

    limit: Tensor

    def __init__(self, rest: Rest) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("limit", torch.tensor(9.0))
        self.rest = rest

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self, self.linear(x), x)


def of_an_input(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if x.max() >= m.limit:
        raise ValueError("too large")
    return h


def asserted(m: Any, h: Tensor, x: Tensor) -> Tensor:
    assert torch.isfinite(h).all(), "not finite"
    return h


def of_what_is_computed(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if not (h.abs() < 100).all():
        raise ValueError("exploded")
    return h


def torch_checks(m: Any, h: Tensor, x: Tensor) -> Tensor:
    torch._check_tensor_all(h < 100)
    return h


def distribution(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return Normal(h, h.exp(), validate_args=True).log_prob(x)


def clamped(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if torch.isinf(h).any() or torch.isnan(h).any():
        h = h.clamp(-1, 1)
    return h * 2


def clamped_first(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        return h.clamp(-1, 1)
    return h * 2


def two_sides_of_an_input(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h if (x > 0).any() else -h


def a_number(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * int((x > 0).sum()) + x[0].gt(0).tolist().count(True)


def valid(h: Tensor) -> Tensor:
    """As torch's own constraints on matrices do it."""
    small = h < 100
    return h.abs() < 1000 if small.all() else small


def asked_again(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if not valid(h).all():
        raise ValueError("exploded")
    return h


def equal(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h if torch.equal(x, x.clone()) else -h


def in_a_checkpoint(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return checkpoint(lambda h: asserted(m, h.sin(), x).cos(), h, use_reentrant=False)


def within_torch(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """A size that is a tensor, read by torch's own parser."""
    return torch.nn.functional.pad(h, (0, (m.limit > 0).sum()))


def with_text(m: Any, h: Tensor, x: Tensor) -> Tensor:
    assert h.norm() < 1e6, f"too large: {h.norm().item():.3f}"
    return h


def any_row(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """Some number is above the mean, and none above the largest, by which nothing is chosen."""
    above = h > h.mean()
    if not above.any():
        return h
    if (h >= h.max()).sum() * 3 < 1:
        raise ValueError("no largest")
    return h.masked_fill(above, 0.0) if above.sum() >= 1 else -h


ACCEPTED = [
    of_an_input, asserted, of_what_is_computed, asked_again, torch_checks, distribution, clamped, clamped_first, equal,
    two_sides_of_an_input, with_text, any_row, a_number, in_a_checkpoint, within_torch,
]  # fmt: skip


@pytest.mark.parametrize("rest", ACCEPTED, ids=lambda rest: rest.__name__)
def test_the_side_that_the_call_takes(rest: Rest) -> None:
    check(Asks(rest), torch.randn(2, 4))


def error_at(rest: Rest, offset: int) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(Asks(rest), (torch.full((2, 4), 20.0),), {})
    assert f"test_questions.py:{rest.__code__.co_firstlineno + offset}" in str(caught.value)
    return str(caught.value)


def test_a_call_that_fails_fails_in_capture() -> None:
    assert "ValueError: too large" in error_at(of_an_input, 2)


def test_what_only_the_trace_finds_is_said() -> None:
    """What answers a question runs the forward without its backward, and without the sizes of storages."""

    def beyond(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return of_an_input(m, torch.as_strided(h * 1, [3, 3], [4, 1]), x)

    with pytest.raises(CaptureError, match="as_strided"):
        capture(Asks(beyond), (torch.zeros(2, 4),), {})


def test_what_raises_is_kept_beside_the_answer() -> None:
    captured = capture(Asks(distribution), (torch.randn(2, 4),), {})
    errors = [str(found.error) for _, found in captured.call.checks]
    assert "parameter loc" in errors[0] and "value argument" in errors[2]
    assert all(found.answer.item() for _, found in captured.call.checks)


def test_questions_about_one_value_have_one_answer() -> None:
    """A false first one makes the second, which is about the same value then, false, and the forward raise."""
    captured = capture(Asks(asked_again), (torch.randn(2, 4),), {})
    assert [str(found.error) for _, found in captured.call.checks] == ["exploded", "exploded"]


def both_sides(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h if h.sum() > 0 else -h


def of_a_mask_that_chooses_nothing(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h if (h > 0).any() else -h


def of_more_than_one_row(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h.masked_fill(h > 0, 0.0) if (h > 0).sum() > 1 else h


def a_computed_number(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * math.sqrt(h.max().item())


def endless(m: Any, h: Tensor, x: Tensor) -> Tensor:
    while h.sum() > 0:
        h = h - 1
    return h


def until_a_mask_is_empty(m: Any, h: Tensor, x: Tensor) -> Tensor:
    while True:
        if not (h > 0).any():
            return h
        h = torch.where(h > 0, h - 1, h)


def of_a_number(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * int(h.max()) if h.sum() > 0 else h


@pytest.mark.parametrize(
    ("rest", "line"), [(a_computed_number, 1), (endless, 1), (until_a_mask_is_empty, 2), (of_a_number, 1)]
)
def test_what_no_number_of_programs_tells(rest: Rest, line: int) -> None:
    assert "the value of a tensor decides what runs next" in error_at(rest, line)


def in_steps(m: Any, h: Tensor, x: Tensor) -> Tensor:
    steps = 0
    while h.abs().max() > 0.25 and steps < 5:
        h, steps = h / 2, steps + 1
    return h


TWO_SIDES = [both_sides, of_a_mask_that_chooses_nothing, of_more_than_one_row, in_steps]


@pytest.mark.parametrize("rest", TWO_SIDES, ids=lambda rest: rest.__name__)
@pytest.mark.parametrize("scale", [-30.0, 0.1, 30.0])
def test_each_side_is_a_program_of_its_own(rest: Rest, scale: float) -> None:
    """As a call finds the one that is its own: the answers of one that is not tell more of those that hold."""
    torch.manual_seed(0)
    model, x = Asks(rest), scale * torch.eye(4)[:2]
    wanted, answers, programs = model(x), Answers(), 0
    while True:
        programs += 1
        captured = capture(model, (x,), {}, answers=answers)
        values = reference_inputs(captured.joint, model, [x], seed=0)
        results = dict(zip(captured.joint.outputs, graph_values(captured.joint, values)[0], strict=True))
        outputs = {
            end.index: value for end, value in results.items() if value is not None and end.kind == "output"
        }
        try:
            Checks(captured.call)([outputs[i] for i in sorted(outputs)], later=False)
            break
        except Otherwise as otherwise:
            answers = otherwise.answers
    assert torch.equal(outputs[0], wanted) and programs <= 3


def warned(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if h.norm() > 1e6:
        warnings.warn("large", stacklevel=1)
        h = h.clamp(-1, 1)
    return h


def test_a_side_that_is_not_taken_warns_of_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture(Asks(warned), (torch.randn(2, 4),), {})
        assert not [one for one in caught if str(one.message) == "large"]
        capture(Asks(warned), (torch.randn(2, 4),), {}, answers=Answers((torch.tensor(True),)))
    assert [one for one in caught if str(one.message) == "large"]


def widest(m: Any, h: Tensor, x: Tensor) -> Tensor:
    chosen = h.argmax(-1)
    return h[:, :3] * nn.functional.one_hot(chosen, max(int(chosen.max()) + 1, 3))[..., :3]


def as_many_as_chosen(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * nn.functional.one_hot(h.argmax(-1))


def clamped_classes(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h[:, :3] * nn.functional.one_hot(h.argmax(-1).clamp(max=3), 4)[..., :3]


@pytest.mark.parametrize(("rest", "line"), [(widest, 2), (as_many_as_chosen, 1)])
def test_the_advice_about_classes_works(rest: Rest, line: int) -> None:
    """One row of the four chooses class 3, which is none."""
    assert "one_hot(i.clamp(max=n), n + 1)[..., :n]" in error_at(rest, line)
    x = torch.eye(4)
    assert torch.equal(clamped_classes(None, x, x), widest(None, x, x))
    check(Asks(clamped_classes), x)


def many(m: Any, h: Tensor, x: Tensor) -> Tensor:
    for i in range(8):
        h = h * int(x[0, 0] * i)
    return h


def test_a_question_takes_no_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    monkeypatch.setattr(trace, "_fakes", lambda *args, old=trace._fakes: runs.append(0) or old(*args))
    assert len(capture(Asks(many), (torch.randn(2, 4),), {}).call.checks) == 8
    assert len(runs) < 6


def test_sides_without_values() -> None:
    """On `meta` there is nothing to go by but that a check does not raise."""
    model, x = Asks(of_an_input).to("meta"), torch.empty(2, 4, device="meta")
    ((_, found),) = capture(model, (x,), {}).call.checks
    assert not found.answer and str(found.error) == "too large"


def test_a_model_that_asks_nothing() -> None:
    assert not capture(Asks(lambda m, h, x: h), (torch.randn(2, 4),), {}).call.checks


@pytest.mark.parametrize("rest", [of_an_input, distribution, clamped], ids=lambda rest: rest.__name__)
def test_on_a_mesh(rest: Rest) -> None:
    model, x = Asks(rest), torch.randn(8, 4)
    plan = find_plan(model, MeshSpec({"dp": 2, "tp": 2}), (x,), profile="cpu", refine="off")
    report = verify(model, plan, (x,))
    assert report.ok and not plan.fallbacks, report
