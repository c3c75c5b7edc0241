"""What changes in a model after its first call, what its forward leaves behind, and kinds of call, on two ranks."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import ShardingError
from tests.api.programs import parallel
from tests.models import Followed
from tests.ranks import RankPool

LINE = (("x", 2),)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.stack = nn.Sequential(nn.Linear(6, 6))
        self.drop = nn.Dropout(0.0)
        self.temperature, self.depth, self.calls = 1.0, 1, 0
        self.shift = torch.ones(6)
        self.kept: list[Tensor] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor, *, more: Tensor | None = None, double: bool = False) -> Any:
        self.calls += 1
        y = self.inner(x) * self.temperature
        for _ in range(self.depth):
            y = self.stack(y)
        y = self.drop(y) + self.shift
        self.last = y.mean()
        self.kept.append(y.sum())
        if more is not None:
            y = y + more
        return {"loss": y.square().mean() * (2 if double else 1), "y": y}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Pair:
    """A parallel model and the same model alone: every change is made to both."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.alone = copy.deepcopy(model)
        self.both = (parallel(model, LINE, backend="eager", **settings), self.alone)

    def change(self, change: Callable[[Any], Any]) -> None:
        for model in self.both:
            torch.manual_seed(3)
            change(model)

    def check(self, *args: Any, **kwargs: Any) -> None:
        ours, theirs = (self.step(model, *args, **kwargs) for model in self.both)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)

    def step(self, model: Any, *args: Any, **kwargs: Any) -> list[Any]:
        model.zero_grad()
        out = model(*args, **kwargs)
        out["loss"].backward()
        left = [model.calls, len(model.kept), whole(model.kept[-1]), whole(model.last)]
        gradients = [whole(p.grad) for p in model.parameters() if p.grad is not None]
        return [whole(out["loss"]), whole(out["y"]), *left, *gradients]


def changes(rank: int) -> int:
    torch.manual_seed(0)
    pair, x = Pair(Net()), torch.randn(4, 6)
    pair.check(x)
    pair.check(x)
    dispatcher = pair.both[0].forward
    assert sum(map(len, dispatcher.executables.values())) == 1
    edits: list[Callable[[Any], Any]] = [
        lambda m: setattr(m, "temperature", 3.0),
        lambda m: setattr(m, "depth", 2),
        lambda m: setattr(m, "shift", torch.full((6,), 2.0)),
        lambda m: m.shift.mul_(2),
        lambda m: m.stack.append(nn.Linear(6, 6)),
        lambda m: setattr(m, "inner", nn.Linear(6, 6)),
        lambda m: m.stack[0].register_forward_hook(lambda module, args, out: out * 2),
        lambda m: m.inner.weight.register_hook(lambda gradient: gradient * 2),
        lambda m: m.stack[0].register_full_backward_hook(lambda module, into, out: (into[0] * 3,)),
        lambda m: setattr(m, "temperature", 1.0),
        lambda m: m.stack[0].weight.requires_grad_(False),
    ]
    for edit in edits:
        pair.change(edit)
        pair.check(x)
    assert all(isinstance(p, DTensor) for p in pair.both[0].parameters())
    programs = sum(map(len, dispatcher.executables.values()))
    pair.change(lambda m: setattr(m, "unread", 5))
    pair.check(x)
    assert sum(map(len, dispatcher.executables.values())) == programs
    return programs


@pytest.mark.slow
def test_what_changes_after_the_first_call(ranks: RankPool) -> None:
    counts = ranks.run(changes, world=2)
    assert len(set(counts)) == 1


def kinds(rank: int) -> None:
    torch.manual_seed(0)
    pair, x, y = Pair(Net()), torch.randn(4, 6), torch.randn(4, 6)
    pair.check(x)
    pair.check(x, more=y)
    pair.check(x, more=x)  # one tensor twice, later two
    pair.check(x, more=y.clone())
    pair.check(x, double=True)
    pair.check(x=x)
    pair.check(torch.randn(7, 6))
    assert list(inspect.signature(pair.both[0].forward).parameters) == ["x", "more", "double"]
    for model in pair.both:
        model.eval()
    with torch.no_grad():
        ours, theirs = (model(x) for model in pair.both)
    torch.testing.assert_close(ours, theirs)
    with torch.inference_mode():
        ours, theirs = (model(x) for model in pair.both)
    torch.testing.assert_close(ours["y"].clone(), theirs["y"].clone())


def test_any_kind_of_call(ranks: RankPool) -> None:
    ranks.run(kinds, world=2)


class Remade(nn.Module):
    """A weight that each call makes anew, and leaves in an attribute with its gradient, as `weight_norm` does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.slow = nn.Linear(6, 6), nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.made = self.net.weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        self.made = self.net.weight / self.net.weight.norm()
        return F.linear(self.slow(x), self.made, self.net.bias).square().mean()


def followed(rank: int, kind: type[nn.Module]) -> list[bool]:
    torch.manual_seed(0)
    alone: Any = kind()
    x = torch.randn(4, 6)
    both = parallel(copy.deepcopy(alone), LINE, backend="eager"), alone
    for _ in range(3):
        losses = [model(x) for model in both]
        for model, loss in zip(both, losses, strict=True):
            loss.backward()
            with torch.no_grad():
                for parameter in model.net.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            model.zero_grad()
        torch.testing.assert_close(whole(losses[0]), losses[1])
    ours, theirs = both
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.detach()), wanted.detach())
    return [p.placements[0].is_shard() for p in ours.slow.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", [Followed, Remade])
def test_what_each_call_changes(ranks: RankPool, model: type[nn.Module]) -> None:
    """A teacher's parameters are split, and change in forward alone."""
    assert any(ranks.run(followed, model, world=2)[0])


def unread(rank: int, backend: str) -> None:
    """As a metric beside the layers keeps its last value."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 6))
    net.last = torch.ones(3)
    model, x = parallel(copy.deepcopy(net), LINE, backend=backend), torch.randn(4, 6)
    for last in (net.last, None, torch.ones(5)):
        model.last = last
        torch.testing.assert_close(whole(model(x)), net(x))
    del model.last
    torch.testing.assert_close(whole(model(x)), net(x))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_attribute_that_no_call_reads_may_go(ranks: RankPool, backend: str) -> None:
    ranks.run(unread, backend, world=2)


def twice(rank: int) -> list[str]:
    model = Pair(Net()).both[0]
    loss = model(torch.randn(4, 6))["loss"]
    said: list[str] = []
    for double in (
        lambda: torch.autograd.grad(loss, model.inner.weight, create_graph=True),
        lambda: loss.backward(create_graph=True),
    ):
        with pytest.raises(ShardingError, match="create_graph=True") as caught:
            double()
        said.append(str(caught.value))
    return said


@pytest.mark.filterwarnings("ignore:Using backward")
def _changed_before_the_backward(rank: int) -> str:
    model = parallel(Net(), LINE)
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model(x)["loss"].backward()
    loss = model(x)["loss"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    with pytest.raises(ShardingError, match="weight was changed in place after the forward") as raised:
        loss.backward()
    model(x)["loss"].backward()
    return str(raised.value)


def test_a_parameter_changed_before_the_backward_is_refused(ranks: RankPool) -> None:
    """torch sees that of plain ones, and not of DTensors."""
    first, second = ranks.run(_changed_before_the_backward, world=2)
    assert first == second and "\n  try: backward() first" in first


class Anchored(nn.Module):
    """Is drawn to weights of before, in attributes that it has not yet. One is of its class."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)
        self.old: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).tanh()).square().mean()
        for name in ("anchor", "mask"):
            if hasattr(self, name):
                y = y + (self.up.weight - getattr(self, name)).square().sum()
        return y * self.scale + sum(
            (p - q).square().sum() for p, q in zip(self.parameters(), self.old, strict=False)
        )


def _anchored(rank: int) -> None:
    torch.manual_seed(0)
    pair, x = Pair(Anchored()), torch.randn(4, 6)
    edits: list[Callable[[Any], Any]] = [
        lambda m: m.register_buffer("anchor", m.up.weight.detach().clone() * 2),
        lambda m: setattr(m, "mask", torch.ones_like(m.up.weight, requires_grad=False)),
        lambda m: setattr(Anchored, "scale", Anchored.scale + 1),
        lambda m: m.old.extend(p.detach().clone() + 1 for p in m.parameters()),
        lambda m: m.anchor.copy_(m.up.weight.detach() * 3),
    ]
    for edit in (lambda m: None, *edits):
        pair.change(edit)
        ours, theirs = (model(x) for model in pair.both)
        torch.testing.assert_close(ours, theirs)
        for model in pair.both:
            model.zero_grad()
        ours.backward()
        theirs.backward()
        for p, q in zip(*(model.parameters() for model in pair.both), strict=True):
            torch.testing.assert_close(None if p.grad is None else whole(p.grad), q.grad)
    parallel_one: Any = pair.both[0]
    parallel_one.register_buffer("anchor", parallel_one.up.weight.detach())
    with pytest.raises(ShardingError, match=r"shares memory with parameter up\.weight"):
        parallel_one(x)


def test_tensors_made_of_parameters_are_whole_in_a_model(ranks: RankPool) -> None:
    ranks.run(_anchored, world=2)


def test_a_backward_of_the_backward_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(twice, world=2):
        assert all("torch.autograd.grad(..., create_graph=True)" in text for text in said)


class Penalized(nn.Module):
    """The gradient penalty in the forward, as the error says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)
        self.calls, self.kept, self.last = 0, [torch.zeros(())], torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = self.down(self.up(x).tanh())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return {"loss": y.mean() + (slope.norm(dim=1) - 1).square().mean(), "y": y}


def penalized(rank: int) -> None:
    torch.manual_seed(0)
    Pair(Penalized()).check(torch.randn(4, 6))


def test_a_gradient_penalty_in_the_forward(ranks: RankPool) -> None:
    ranks.run(penalized, world=2)


class Wide(nn.Module):
    """A loss beside outputs of 2 MiB and of a few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 512)

    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        return y.square().mean(), y, y[0, :4]


def wide(rank: int) -> None:
    torch.manual_seed(0)
    model = Wide()
    alone, x = copy.deepcopy(model), torch.randn(1024, 8)
    ours = parallel(model, LINE, backend="eager")
    loss, y, few = ours(x)
    wanted = alone(x)
    assert isinstance(y, DTensor) and not isinstance(few, DTensor) and not isinstance(loss, DTensor)
    for a, b in zip((loss, y, few), wanted, strict=True):
        torch.testing.assert_close(whole(a), b)
    (loss + whole(y).mean()).backward()
    (wanted[0] + wanted[1].mean()).backward()
    torch.testing.assert_close(whole(ours.up.weight.grad), alone.up.weight.grad)
    with torch.no_grad():
        assert not isinstance(ours(x)[1], DTensor)


def test_large_outputs_beside_a_loss_are_not_gathered(ranks: RankPool) -> None:
    ranks.run(wide, world=2)


def keeps_changing(rank: int) -> str:
    logging.getLogger("autoshard").setLevel(logging.WARNING)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autoshard").addHandler(handler)
    pair, x = Pair(Net()), torch.randn(4, 6)
    for number in range(10):
        pair.change(lambda m, number=number: setattr(m, "temperature", float(number)))
        pair.check(x)
    logging.getLogger("autoshard").removeHandler(handler)
    return "\n".join(records)


def test_an_attribute_that_changes_at_every_call_is_named(ranks: RankPool) -> None:
    for said in ranks.run(keeps_changing, world=2):
        assert "the model keeps changing: temperature is" in said and "register_buffer" in said
