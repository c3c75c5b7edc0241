"""What a forward leaves behind: attributes, counters, lists, changed arguments; and what it reads."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import MeshSpec, find_plan, verify
from cost_model.errors import CaptureError
from passes.capture import capture


class Cache:
    """As a key/value cache: filled by the forward."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.length = 0


class Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)
        self.calls, self.scale, self.unread = 0, 2.0, 5
        self.log: list[Tensor] = []
        self.parts: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        self.calls += 1
        y = self.mix(x) * self.scale
        self.last = y.mean()
        self.log.append(y.detach())
        self.parts["sum"] = y.sum()
        if cache is not None:
            cache.seen.append(y)
            cache.length += y.shape[0]
        return y


def names(captured: Any) -> list[str]:
    return [type(place).__name__ for place in captured.call.places]


def test_what_a_forward_leaves_is_put_in_its_places() -> None:
    model, x = Leaves(), torch.randn(2, 3)
    captured = capture(model, (x,), {})
    assert names(captured) == ["Incremented", "Assigned", "Appended", "Assigned"]
    assert (model.calls, model.log, model.parts, model.last) == (0, [], {}, None)
    values = [torch.tensor(float(i)) for i in range(captured.call.output_count)]
    for _ in range(2):
        captured.call.unflatten(values, (x,), {})
    assert model.calls == 2 and len(model.log) == 2 and set(model.parts) == {"sum"}
    assert isinstance(model.last, Tensor)


def test_only_what_decides_is_read() -> None:
    captured = capture(Leaves(), (torch.randn(2, 3),), {})
    (module,) = [m for m in captured.reads if isinstance(m, Leaves)]
    assert captured.reads[module] - {"forward"} == {"scale"}


def test_a_sum_of_computed_numbers_is_not_read() -> None:
    """Of losses, say: it makes no new kind of call."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.total = nn.Linear(3, 3), 1.5

        def forward(self, x: Tensor) -> Tensor:
            y = self.mix(x)
            self.total += y.mean().item() / 2
            return y

    model = Sums()
    captured = capture(model, (torch.randn(2, 3),), {})
    assert "Incremented" in names(captured)
    assert not any("total" in read for read in captured.reads.values())
    values = [torch.tensor(3.0) for _ in range(captured.call.output_count)]
    for _ in range(2):
        captured.call.unflatten(values, (torch.randn(2, 3),), {})
    assert model.total == 1.5 + 3 + 3


def test_a_counter_that_is_looked_at_is_an_attribute() -> None:
    class Warm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.step = nn.Linear(3, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            return self.mix(x) * (0.1 if self.step < 3 else 1.0)

    captured = capture(Warm(), (torch.randn(2, 3),), {})
    assert names(captured) == ["Assigned"] and any("step" in read for read in captured.reads.values())


def test_an_argument_that_is_filled() -> None:
    model, x, cache = Leaves(), torch.randn(2, 3), Cache()
    captured = capture(model, (x,), {"cache": cache})
    assert cache.seen == [] and cache.length == 0
    assert names(captured)[-1] == "Argument"
    values = [torch.tensor(float(i)) for i in range(captured.call.output_count)]
    captured.call.unflatten(values, (x,), {"cache": cache})
    assert len(cache.seen) == 1 and cache.length == 2


def test_a_tensor_argument_that_is_changed() -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y[:, 0] = 1
            return x + y

    model, x, y = Changes(), torch.randn(2, 3), torch.randn(2, 3)
    captured = capture(model, (x,), {"y": y})
    assert captured.call.overwritten == (1,) and captured.call.output_count == 2
    told = copy.deepcopy(y)
    result, changed = captured.joint.module(*captured.joint.constants.values(), x, y)[:2]
    assert torch.equal(changed[:, 0], torch.ones(2)) and torch.equal(result, x + changed)
    captured.call.unflatten([x, torch.ones(2, 3)], (x,), {"y": y})
    assert torch.equal(y, torch.ones(2, 3)) and not torch.equal(told, y)


def test_hooks_that_keep_what_they_see() -> None:
    kept: dict[str, Tensor] = {}
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, args, out: kept.update(last=out.detach()))
    captured = capture(model, (torch.randn(2, 3),), {})
    assert kept == {} and names(captured) == ["Assigned"]
    captured.call.places[0].put(((), {}), torch.ones(1))
    assert kept["last"].tolist() == [1.0]


def test_an_object_that_is_exchanged_takes_its_containers_along() -> None:
    class Renews(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = Cache()
            self.cache.inner = Cache()  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Tensor:
            self.cache = Cache()
            return x + 1

    model = Renews()
    captured = capture(model, (torch.randn(2, 3),), {})
    assert set(names(captured)) == {"Assigned"} and str(captured.call.places[0].at) == "cache"  # type: ignore[attr-defined]
    assert model.cache.inner.length == 0  # type: ignore[attr-defined]


_BACKENDS: dict[type, str] = {}


def test_a_dict_by_kind_of_tensor_has_no_other_kinds_in_eager() -> None:
    """As einops keeps its backends: tracing's tensors are of kinds that a call has none of."""

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _BACKENDS.setdefault(type(x), "torch")
            return x + 1

    x = torch.randn(2, 3)
    captured = capture(Looks(), (x,), {})
    assert names(captured) == ["Assigned"]
    (result,) = captured.call.flatten_outputs(Looks()(x), (x,), {})
    assert torch.equal(result, x + 1)


def test_a_model_has_its_own_tensors_in_each_run_of_its_forward() -> None:
    """A write in place has the forward run more than once; what it leaves outside of the model is no hook's."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.places = nn.Linear(3, 3), torch.randn(2, 3)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.mix(x)
            y += self.places
            self.last = y.detach()
            return y

    model, x = Places(), torch.randn(2, 3)
    places = model.places
    captured = capture(model, (x,), {})
    assert names(captured) == ["Assigned"] and model.places is places
    told = (model.mix.weight, model.mix.bias, places, x, torch.ones(2, 3))
    assert all(torch.allclose(out, model.mix(x) + places) for out in captured.joint.module(*told)[:2])


def test_a_list_that_is_emptied_is_refused() -> None:
    class Empties(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = [1, 2]

        def forward(self, x: Tensor) -> Tensor:
            self.log.pop()
            return x.cos()

    model = Empties()
    with pytest.raises(CaptureError, match=r"forward removes items of log(.|\n)*try: "):
        capture(model, (torch.randn(2),), {})
    assert model.log == [1, 2]


def test_an_exchange_of_modules_is_refused() -> None:
    """One call of the model settles them, as the error says. A module that is added is no exchange."""

    class Settles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.net = "new", nn.Linear(3, 3)
            self.made: nn.Module | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.kind == "new":
                self.kind, self.net = "settled", nn.Sequential(self.net)
            self.made = self.made or nn.Tanh()
            return self.made(self.net(x))

    model, x = Settles(), torch.randn(2, 3)
    with pytest.raises(
        CaptureError, match=r"forward exchanges the module net(.|\n)*try: call the model once"
    ):
        capture(model, (x,), {})
    assert model.kind == "new" and isinstance(model.net, nn.Linear) and model.made is None
    model(x)
    capture(model, (x,), {})


class Tied(nn.Module):
    """In each forward, which the optimizer and a checkpoint would not see."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        self.head.weight = self.embed.weight
        return self.head(self.embed(ids))


class Late(nn.Module):
    """A buffer that the first call makes, where there was an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            del self.mask
            self.register_buffer("mask", torch.ones(3, 3).tril())
        return x @ self.mask


def test_a_parameter_that_is_assigned_anew_is_refused() -> None:
    model, ids = Tied(), torch.tensor([1, 2])
    with pytest.raises(CaptureError, match=r"assigns parameter head\.weight anew(.|\n)*in __init__"):
        capture(model, (ids,), {})
    assert model.head.weight is not model.embed.weight
    model.head.weight = model.embed.weight
    capture(model, (ids,), {})


def test_an_attribute_that_becomes_a_buffer_is_refused() -> None:
    """One call of the model makes it, as the error says."""
    model, x = Late(), torch.randn(2, 3)
    with pytest.raises(CaptureError, match=r"makes mask a buffer(.|\n)*try: call the model once"):
        capture(model, (x,), {})
    assert model.mask is None
    model(x)
    capture(model, (x,), {})


class Draws(nn.Linear):
    """Skips itself now and then, by Python's numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


def test_numbers_that_are_drawn_by_python_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    state = random.getstate()
    with caplog.at_level(logging.WARNING, logger="autoshard"):
        capture(nn.Linear(3, 3), (torch.randn(2, 3),), {})
        assert not caplog.records
        capture(Draws(3, 3), (torch.randn(2, 3),), {})
    (said,) = [record.getMessage() for record in caplog.records]
    assert "Python's random numbers" in said and "\n  try: torch.rand" in said
    assert random.getstate() == state


class Follows(nn.Module):
    """A teacher that follows by a moving average, as MoCo writes it; and what is computed, in place of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for own, other in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            other.data = other.data * 0.9 + own.data * 0.1
        y = self.student(x)
        y.data = y.data.clamp(-0.5, 0.5)
        return (y.exp() - self.teacher(x)).square()


def test_data_that_are_exchanged_are_written() -> None:
    """Other shapes are refused."""
    model, x = Follows().double(), torch.randn(4, 3, dtype=torch.float64)
    captured = capture(model, (x,), {})
    written = {end.name for end in captured.joint.outputs if end.kind not in ("output", "grad")}
    assert written == {"teacher.weight", "teacher.bias"}
    plan = find_plan(model, MeshSpec({"dp": 2}), (x,), profile="cpu", refine="off")
    assert verify(model, plan, (x,)).max_error < 1e-12
    model.teacher.bias = nn.Parameter(torch.zeros(1), requires_grad=False)
    with pytest.raises(
        CaptureError, match=r"shape \[3\] in place of the data of a torch.float32 of shape \[1\]"
    ):
        capture(model.float(), (x.float(),), {})
