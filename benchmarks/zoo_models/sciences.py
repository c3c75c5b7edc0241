"""Networks written by hand: recommendation and science."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.tiny import images
from benchmarks.zoo_models.written import mlp, weight, written

_IDS = lambda n=16, fields=4: torch.randint(0, 50, (n, fields))


def _dlrm(self: Any, dense: Tensor, ids: Tensor, bags: Tensor) -> Tensor:
    """Embeddings of fields and bags, products of all pairs."""
    vectors = [table(ids[:, i]) for i, table in enumerate(self.tables)]
    vectors += [self.dense(dense), self.bag(bags)]
    stacked = torch.stack(vectors, 1)
    places = torch.tril_indices(stacked.shape[1], stacked.shape[1], -1)
    pairs = (stacked @ stacked.transpose(1, 2))[:, places[0], places[1]]
    return torch.sigmoid(self.top(torch.cat([pairs, vectors[-2]], 1)))


def _factors(self: Any, ids: Tensor, wanted: Tensor) -> Tensor:
    """DeepFM: ids of all fields in one table, by offsets."""
    v = self.table(ids + self.offsets)
    pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1)
    score = pairs + self.first(ids + self.offsets).sum((1, 2)) + self.deep(v.flatten(1)).squeeze(-1)
    return F.binary_cross_entropy_with_logits(score, wanted)


def _towers(self: Any, users: Tensor, items: Tensor) -> Tensor:
    """In-batch negatives."""
    u = F.normalize(self.user(self.users(users)), dim=-1)
    i = F.normalize(self.item(self.items(items)), dim=-1)
    return F.cross_entropy(u @ i.T / 0.07, torch.arange(len(u)))


def _interest(self: Any, history: Tensor, item: Tensor) -> Tensor:
    """DIN: a weight for each item of the history, empty places left out."""
    h, i = self.items(history), self.items(item)[:, None]
    score = self.attend(torch.cat([h, i.expand_as(h), h * i], -1)).squeeze(-1)
    score = score.masked_fill(history == 0, float("-inf")).softmax(-1)
    return self.top(torch.cat([(score[..., None] * h).sum(1), i[:, 0]], -1))


def _next_items(self: Any, ids: Tensor) -> Tensor:
    """SASRec: causal attention over items; positives against drawn negatives."""
    x = self.items(ids) + self.places
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    x = self.norm(x + self.attend(x, x, x, attn_mask=mask, need_weights=False)[0])
    right, wrong = self.items(ids.roll(-1, 1)), self.items(ids.flip(0))
    return F.softplus(((wrong - right) * x).sum(-1)).mean()


def _crossed(self: Any, ids: Tensor) -> Tensor:
    """DCN v2: experts of low rank, gated (MMoE) for two tasks."""
    x = first = self.table(ids).flatten(1)
    for layer in self.cross:
        x = first * layer(x) + x
    made = torch.stack([expert(x) for expert in self.experts], 1)
    return torch.cat(
        [
            (gate(x).softmax(-1)[:, None] @ made).squeeze(1) @ self.heads[i]
            for i, gate in enumerate(self.gates)
        ],
        -1,
    )


_RECOMMENDATION = [
    written("DLRM", "recommendation", _dlrm, lambda: {
        "tables": nn.ModuleList(nn.Embedding(50, 16) for _ in range(4)), "bag": nn.EmbeddingBag(50, 16, mode="sum"), "dense": mlp(8, 32, 16),
        "top": mlp(31, 32, 1)}, lambda: (torch.randn(16, 8), _IDS(), _IDS(16, 6))),
    written("DeepFM", "recommendation", _factors, lambda: {
        "table": nn.Embedding(200, 16), "first": nn.Embedding(200, 1), "offsets": torch.arange(0, 200, 50), "deep": mlp(64, 32, 1)},
        lambda: (_IDS(), torch.rand(16).round())),
    written("two towers", "recommendation", _towers, lambda: {
        "users": nn.Embedding(64, 16), "items": nn.Embedding(64, 16), "user": mlp(16, 32, 16), "item": mlp(16, 32, 16)},
        lambda: (torch.randint(0, 64, (16,)), torch.randint(0, 64, (16,)))),
    written("DIN", "recommendation", _interest, lambda: {
        "items": nn.Embedding(50, 16, padding_idx=0), "attend": mlp(48, 32, 1), "top": mlp(32, 16, 1)},
        lambda: (_IDS(16, 8).clamp(min=1), torch.randint(1, 50, (16,)))),
    written("SASRec", "recommendation", _next_items, lambda: {
        "items": nn.Embedding(50, 16), "places": weight(8, 16), "norm": nn.LayerNorm(16), "attend": nn.MultiheadAttention(16, 2, batch_first=True)},
        lambda: (_IDS(16, 8),)),
    written("DCN, MMoE", "recommendation", _crossed, lambda: {
        "table": nn.Embedding(50, 8), "cross": nn.ModuleList(nn.Linear(32, 32) for _ in range(2)), "heads": weight(2, 16, 1),
        "experts": nn.ModuleList(mlp(32, 32, 16) for _ in range(3)), "gates": nn.ModuleList(nn.Linear(32, 3) for _ in range(2))},
        lambda: (_IDS(),)),
    written("matrix factors", "recommendation", lambda self, u, i, r: F.mse_loss(
        (self.users[u] * self.items[i]).sum(-1) + self.bias[i], r), lambda: {
        "users": weight(64, 16), "items": weight(64, 16), "bias": nn.Parameter(torch.zeros(64))},
        lambda: (torch.randint(0, 64, (32,)), torch.randint(0, 64, (32,)), torch.randn(32))),
]  # fmt: skip


def _fourier(self: Any, x: Tensor) -> Tensor:
    """FNO: products of the lowest frequencies."""
    x = self.enter(x)
    for freq, near in zip(self.freqs, self.near, strict=True):
        low = torch.fft.rfft2(x)
        mixed = torch.zeros_like(low)
        mixed[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", low[:, :, :4, :4], torch.view_as_complex(freq))
        x = F.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + near(x))
    return self.leave(x)


def _physics(self: Any, x: Tensor) -> Tensor:
    """A residual of u'' + u, by gradients within the forward."""
    x = x.detach().requires_grad_()
    u = self.net(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second + u).square().mean()


def _ode(self: Any, x: Tensor) -> Tensor:
    step = 0.25
    for _ in range(3):
        a = self.net(x)
        b = self.net(x + step / 2 * a)
        x = x + step * b
    return x


def _flow(self: Any, x: Tensor) -> Tensor:
    """RealNVP: halves scale and shift each other; minus the log likelihood."""
    volume = x.new_zeros(len(x))
    for i, net in enumerate(self.nets):
        a, b = x.chunk(2, -1) if i % 2 else x.chunk(2, -1)[::-1]
        scale, shift = net(a).chunk(2, -1)
        x, volume = torch.cat([a, b * scale.tanh().exp() + shift], -1), volume + scale.tanh().sum(-1)
    volume = volume + torch.linalg.slogdet(self.mix)[1]
    return ((x @ self.mix).square().sum(-1) / 2 - volume).mean()


def _energy(self: Any, kinds: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """SchNet: filters of distances; forces are gradients within the forward."""
    at = at.detach().requires_grad_()
    apart = (at[:, :, None] - at[:, None]).square().sum(-1).add(1e-6).sqrt()
    filters = self.filter(torch.exp(-10.0 * (apart[..., None] - self.centers).square()))
    h = self.kinds(kinds)
    h = h + self.update((filters * h[:, None]).sum(2))
    energy = self.read(h).sum((1, 2))
    (force,) = torch.autograd.grad(energy.sum(), at, create_graph=True)
    return energy, -force


_SCIENCE = [
    written("FNO", "science", _fourier, lambda: {
        "enter": nn.Conv2d(3, 16, 1), "leave": nn.Conv2d(16, 1, 1), "near": nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(2)),
        "freqs": nn.ParameterList(weight(16, 16, 4, 4, 2) for _ in range(2))}, lambda: (images(),)),
    written("PINN", "science", _physics, lambda: {"net": mlp(1, 32, 32, 1, act=nn.Tanh)}, lambda: (torch.rand(32, 1),)),
    written("neural ODE", "science", _ode, lambda: {"net": mlp(8, 32, 8, act=nn.Tanh)}, lambda: (torch.randn(16, 8),)),
    written("RealNVP", "science", _flow, lambda: {"nets": nn.ModuleList(mlp(4, 32, 8) for _ in range(2)), "mix": weight(8, 8)},
            lambda: (torch.randn(16, 8),)),
    written("SchNet", "science", _energy, lambda: {
        "kinds": nn.Embedding(8, 16), "filter": mlp(8, 16, 16), "centers": torch.linspace(0, 3, 8), "update": mlp(16, 16, 16), "read": nn.Linear(16, 1)},
        lambda: (torch.randint(0, 8, (4, 6)), torch.randn(4, 6, 3))),
    written("DeepONet", "science", lambda self, u, y: torch.einsum("bk,pk->bp", self.branch(u), self.trunk(y)), lambda: {
        "branch": mlp(16, 32, 16), "trunk": mlp(2, 32, 16, act=nn.Tanh)}, lambda: (torch.randn(8, 16), torch.rand(32, 2))),
    written("SIREN", "science", lambda self, x: self.last(torch.sin(30 * self.second(torch.sin(30 * self.first(x))))), lambda: {
        "first": nn.Linear(2, 32), "second": nn.Linear(32, 32), "last": nn.Linear(32, 3)}, lambda: (torch.rand(64, 2),)),
    written("Gaussian process", "science", lambda self, x, y: torch.distributions.MultivariateNormal(
        torch.zeros_like(y), torch.exp(-torch.cdist(self.net(x), self.net(x)).square()) + self.noise.exp() * torch.eye(len(x), dtype=x.dtype),
        validate_args=False).log_prob(y), lambda: {"net": mlp(8, 32, 4), "noise": nn.Parameter(torch.zeros(()))},
        lambda: (torch.randn(16, 8), torch.randn(16))),
    written("protein pairs", "science", lambda self, z: z + self.leave(torch.einsum(
        "bikc,bjkc->bijc", self.left(self.norm(z)).sigmoid(), self.right(self.norm(z)))), lambda: {
        "norm": nn.LayerNorm(16), "left": nn.Linear(16, 16), "right": nn.Linear(16, 16), "leave": nn.Linear(16, 16)},
        lambda: (torch.randn(2, 8, 8, 16),)),
]  # fmt: skip
ROWS = [*_RECOMMENDATION, *_SCIENCE]
