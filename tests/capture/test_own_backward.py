"""Custom functions whose backward runs modules of the model again, and calls of `.backward()` within a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_model.errors import CaptureError
from passes.capture import capture
from tests.capture.running import check


def again(ctx: Any, slopes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What `Coupled` computes of, a leaf; and the gradients of both halves of its result."""
    a, _ = ctx.saved_tensors[0].chunk(2, -1)
    return a.detach().requires_grad_(), *slopes[0].chunk(2, -1)


class Coupled(torch.autograd.Function):
    """A reversible layer: the backward computes the input from the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: nn.Module, *weights: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        ctx.net, y = net, torch.cat([a, b + net(a)], -1)
        ctx.save_for_backward(y.detach())
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        a, of_a, of_b = again(ctx, slopes)
        with torch.enable_grad():
            more, *grads = torch.autograd.grad(ctx.net(a), [a, *ctx.net.parameters()], of_b)
        return torch.cat([of_a + more, of_b], -1), None, *grads


class LeftInGrad(Coupled):
    """The same, which leaves the weights' gradients in `.grad`."""

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        a, of_a, of_b = again(ctx, slopes)
        with torch.enable_grad():
            torch.autograd.backward(ctx.net(a), of_b)
        return torch.cat([of_a + a.grad, of_b], -1), *[None] * (1 + len([*ctx.net.parameters()]))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 3), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Reversible(nn.Module):
    def __init__(self, function: type[torch.autograd.Function] = Coupled, norm: bool = False) -> None:
        super().__init__()
        self.function, self.net, self.norm = function, Scaled(), nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.function.apply(x, self.net, *self.net.parameters()))


@pytest.mark.parametrize("norm", [False, True])
def test_a_backward_that_calls_modules(norm: bool) -> None:
    """norm: writes running statistics, which is traced another way. What the backward reads of a module is guarded."""
    model = Reversible(norm=norm)
    captured = check(model, torch.randn(4, 6))
    assert "scale" in captured.reads[model.net]
    assert model.net.linear.weight is dict(model.named_parameters())["net.linear.weight"]


class Auxiliary(nn.Module):
    """A loss of its own, differentiated at once."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.body, self.side = nn.Linear(6, 6), nn.Linear(6, 1)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        self.side(x).square().mean().backward()
        return self.body(x)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["forward", "custom function"])
def test_gradients_that_no_call_returns(name: str, norm: bool) -> None:
    """Whoever calls `.backward()` would lose what it leaves in `.grad`."""
    model = Auxiliary(norm) if name == "forward" else Reversible(LeftInGrad, norm)
    with pytest.raises(CaptureError, match=r"calls \.backward\(\) itself") as caught:
        check(model, torch.randn(4, 6))
    assert "torch.autograd.grad(loss, tensors)" in str(caught.value)
    assert all(parameter.grad is None for parameter in model.parameters())


class Descending(nn.Module):
    """A step along the gradient of an energy, as the remedy says."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self.energy(z := x.detach().requires_grad_()).square().sum(), z)
        return self.energy(x - 0.1 * slope).sum()


def test_the_remedy() -> None:
    check(Descending(), torch.randn(4, 6))


class Judged(nn.Module):
    """A generator's loss: its judge is not to learn from it. Batch norm writes, so that the trace rewrites writes."""

    def __init__(self, flags: bool) -> None:
        super().__init__()
        self.flags, self.made = flags, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.judge = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.flags:
            values = {name: p.detach() for name, p in self.judge.named_parameters()}
            return torch.func.functional_call(self.judge, values, self.made(x)).square().mean()
        self.judge.requires_grad_(False)
        loss = self.judge(self.made(x)).square().mean()
        self.judge.requires_grad_(True)
        return loss


def test_flags_of_gradients_that_forward_sets() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(CaptureError, match=r"changes requires_grad(.|\n)*functional_call"):
        capture(Judged(True).double(), (x,), {})
    model = Judged(True).double()
    model.made[1] = nn.Identity()
    check(model, x)
    check(Judged(False).double(), x)


class ByOwner(torch.autograd.Function):
    """Its backward reads an attribute as the forward has left it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Any) -> Tensor:
        ctx.owner = owner
        return x * owner.scale

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        return slopes[0] * ctx.owner.scale * len(ctx.owner.seen), None


class Sets(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.mix, self.seen = how, nn.Linear(6, 6), [0]
        if how == "buffer":
            self.register_buffer("scale", torch.ones(6))
        else:
            self.scale: Any = None if how == "none" else 1.0

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().abs().mean(0) + 1
        self.scale = self.scale + 1 if self.how == "count" else mean if self.how == "buffer" else 3.0
        self.seen.append(1)
        return ByOwner.apply(torch.tanh(self.mix(x)), self)  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["number", "none", "count", "buffer"])
def test_a_backward_reads_what_forward_left(how: str) -> None:
    model = Sets(how)
    before = {**vars(model)}
    captured = check(model, torch.randn(4, 6))
    assert vars(model) == before and model.seen == [0]
    assert ("scale" in captured.reads[model]) is (how == "count")
