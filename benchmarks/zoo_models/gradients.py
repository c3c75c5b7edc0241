"""How people write PyTorch by hand: gradients within a forward, functions of their own, states that follow."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.zoo_models.row import Row
from benchmarks.zoo_models.tiny import images, tokens
from benchmarks.zoo_models.written import mlp, weight, written

_FLAT = lambda: (torch.randn(16, 16),)
_PAIR = lambda: (*_FLAT(), torch.randn(16, 4))


class _Coupled(torch.autograd.Function):
    """A reversible layer: its backward computes the input from the result, and calls the model's modules."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module, *weights: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        a = a + f(b)
        ctx.nets, y = (f, g), torch.cat([a, b + g(a)], -1)
        ctx.save_for_backward(y.detach())
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (y,), (f, g) = ctx.saved_tensors, ctx.nets
        (a, b), (of_a, of_b) = y.chunk(2, -1), slopes[0].chunk(2, -1)
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            made = g(a)
            more, *of_g = torch.autograd.grad(made, [a, *g.parameters()], of_b)
        of_a = of_a + more
        with torch.enable_grad():
            b = (b - made).detach().requires_grad_()
            more, *of_f = torch.autograd.grad(f(b), [b, *f.parameters()], of_a)
        return torch.cat([of_a, of_b + more], -1), None, None, *of_f, *of_g


def _reversible(self: Any, x: Tensor) -> Tensor:
    for f, g in zip(self.f, self.g, strict=True):
        x = _Coupled.apply(x, f, g, *f.parameters(), *g.parameters())
    return self.head(x)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        return -0.3 * slopes[0]


def _adversary(self: Any, x: Tensor, label: Tensor) -> Tensor:
    """DANN: a classifier of domains whose gradient is turned round."""
    h = self.net(x)
    return F.cross_entropy(self.head(h), label) + F.cross_entropy(self.domain(_Turned.apply(h)), label // 2)


def _followed(self: Any, x: Tensor) -> Tensor:
    """BYOL's teacher: parameters that forward moves, and no optimizer."""
    with torch.no_grad():
        for slow, own in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.lerp_(own, 0.1)
        wanted = self.slow(x)
    return F.mse_loss(self.net(x), wanted) + self.net(x).square().mean()


def _queued(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """MoCo: negatives from a queue that each call moves on."""
    q, k = F.normalize(self.net(x), dim=-1), F.normalize(self.slow(y), dim=-1).detach()
    score = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().T], 1) / 0.07
    self.queue.copy_(torch.cat([k, self.queue[: -len(k)]]))
    return F.cross_entropy(score, torch.zeros(len(q), dtype=torch.long))


def _moved_codes(self: Any, x: Tensor) -> Tensor:
    """VQ by moving averages of what each code stands for."""
    z = self.down(x)
    hot = F.one_hot(torch.cdist(z, self.codes).argmin(1), 8).to(x.dtype)
    with torch.no_grad():
        self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.sums.mul_(0.9).add_(hot.T @ z, alpha=0.1)
        self.codes.copy_(self.sums / (self.counts + 1e-5)[:, None])
    near = hot @ self.codes
    return F.mse_loss(self.up(z + (near - z).detach()), x) + 0.25 * F.mse_loss(z, near)


def _adversarial(self: Any, z: Tensor, real: Tensor) -> Tensor:
    """Both sides of WGAN-GP in one loss, the penalty by a gradient within."""
    fake = self.make(z)
    x = (real + fake.detach()).div(2).requires_grad_()
    (slope,) = torch.autograd.grad(self.judge(x).sum(), x, create_graph=True)
    judged = self.judge(fake.detach()).mean() - self.judge(real).mean()
    return judged + 10 * (slope.norm(dim=1) - 1).square().mean() - self.judge(fake).mean()


def _each_alone(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The norm of each sample's gradient, by vmap of grad."""
    weights = dict(self.net.named_parameters())
    loss = lambda given, one, to: F.mse_loss(torch.func.functional_call(self.net, given, (one[None],))[0], to)
    slopes = torch.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
    return torch.stack([slope.flatten(1).square().sum(1) for slope in slopes.values()]).sum(0).sqrt().mean()


def _learned_start(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """MAML: a step of descent, and the loss after it."""
    weights = dict(self.net.named_parameters())
    run = lambda given: F.mse_loss(torch.func.functional_call(self.net, given, (x,)), y)
    slopes = torch.autograd.grad(run(weights), list(weights.values()), create_graph=True)
    return run({name: w - 0.1 * s for (name, w), s in zip(weights.items(), slopes, strict=True)})


def _jacobians(self: Any, x: Tensor) -> Tensor:
    _, along = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
    return torch.vmap(torch.func.jacrev(self.net))(x).square().sum((1, 2)).mean() + along.square().mean()


class _Parametrized(nn.Module):
    """A symmetric weight, made once a call though read twice."""

    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).mT

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 16)
        parametrize.register_parametrization(self.net, "weight", self.Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return torch.tanh(self.net(x)) + self.net(x)


class _Hooked(nn.Module):
    """Features taken by a hook, results changed by another, a gradient by a third."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(1568, 4)
        )
        self.seen: dict[str, Tensor] = {}
        self.net[0].register_forward_hook(lambda module, args, out: self.seen.update(low=out))
        self.net[1].register_forward_hook(lambda module, args, out: out * 1.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.net(x)
        y.register_hook(lambda slope: slope.clamp(-1e-3, 1e-3))
        return y, self.seen["low"].mean((2, 3))


def _fed_back(self: Any, ids: Tensor) -> Tensor:
    """Scheduled sampling: every second row reads what it wrote."""
    h, seen, out = self.start.expand(2, len(ids), -1).contiguous(), ids[:, :1], []
    for place in range(1, 5):
        y, h = self.layer(self.embed(seen), h)
        out.append(self.head(y[:, -1]))
        own = (torch.arange(len(ids)) % 2 == 0)[:, None]
        seen = torch.where(own, out[-1].argmax(-1, keepdim=True), ids[:, place : place + 1])
    return F.cross_entropy(torch.stack(out, 1).flatten(0, 1), ids[:, 1:5].flatten())


_SLOW = lambda: {"net": mlp(16, 32, 8), "slow": mlp(16, 32, 8).requires_grad_(False)}
_MADE: list[tuple[str, Any, Any, Any]] = [
    ("reversible layers", _reversible, lambda: {
        "f": nn.ModuleList(mlp(8, 16, 8) for _ in range(2)), "g": nn.ModuleList(mlp(8, 16, 8) for _ in range(2)), "head": nn.Linear(16, 4)}, _FLAT),
    ("turned gradient", _adversary, lambda: {"net": mlp(16, 32, 16), "head": nn.Linear(16, 4), "domain": nn.Linear(16, 2)},
     lambda: (*_FLAT(), torch.randint(0, 4, (16,)))),
    ("BYOL", _followed, _SLOW, _FLAT),
    ("MoCo", _queued, lambda: _SLOW() | {"queue": torch.randn(32, 8)}, lambda: (*_FLAT(), *_FLAT())),
    ("VQ by averages", _moved_codes, lambda: {
        "down": mlp(16, 32, 8), "up": mlp(8, 32, 16), "codes": torch.randn(8, 8), "counts": torch.ones(8), "sums": torch.randn(8, 8)}, _FLAT),
    ("WGAN-GP", _adversarial, lambda: {"make": mlp(8, 32, 16), "judge": mlp(16, 32, 1)}, lambda: (torch.randn(16, 8), *_FLAT())),
    ("gradients of samples", _each_alone, lambda: {"net": mlp(16, 32, 4)}, _PAIR),
    ("MAML", _learned_start, lambda: {"net": mlp(16, 32, 4)}, _PAIR),
    ("jacobians", _jacobians, lambda: {"net": mlp(16, 32, 16)}, _FLAT),
    ("fed back", _fed_back, lambda: {
        "embed": nn.Embedding(96, 16), "start": weight(1, 1, 32), "layer": nn.GRU(16, 32, 2, batch_first=True), "head": nn.Linear(32, 96)},
     lambda: (tokens(),)),
]  # fmt: skip
ROWS = [
    *(written(name, "idiom", body, parts, inputs) for name, body, parts, inputs in _MADE),
    Row("symmetric weight", "idiom", lambda: (_Parametrized(), _FLAT())),
    Row("hooks", "idiom", lambda: (_Hooked(), (images(),))),
]
