"""How people write PyTorch by hand: recurrence, attention, experts, convolution."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.row import Row
from benchmarks.zoo_models.tiny import images, tokens
from benchmarks.zoo_models.written import mlp, weight, written

_WORDS = lambda: (tokens(), tokens(most=10))


def _next(self: Any, ids: Tensor) -> Tensor:
    """A recurrent language model, its first result only."""
    return F.cross_entropy(
        self.head(self.layer(self.embed(ids))[0][:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
    )


def _recurrent(name: str, made: Any, width: int = 32) -> Row:
    parts = lambda: {"embed": nn.Embedding(96, 16), "layer": made(), "head": nn.Linear(width, 96)}
    return written(name, "idiom", _next, parts, lambda: (tokens(),))


def _attentive(self: Any, source: Tensor, target: Tensor) -> Tensor:
    """Bahdanau: a decoder that looks at an encoder's states, a step at a time."""
    states, h = self.encode(self.embed(source))
    h, out = h[0], []
    for t in range(target.shape[1]):
        score = self.score(torch.tanh(self.of_states(states) + self.of_own(h)[:, None])).squeeze(-1)
        seen = (score.softmax(-1)[..., None] * states).sum(1)
        h = self.cell(torch.cat([self.embed(target[:, t]), seen], -1), h)
        out.append(self.head(h))
    return F.cross_entropy(
        torch.stack(out, 1).flatten(0, 1), target.flatten(), ignore_index=3, label_smoothing=0.1
    )


def _translated(self: Any, source: Tensor, target: Tensor) -> Tensor:
    causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.position.dtype)
    put = lambda ids: self.embed(ids) * 32**0.5 + self.position[: ids.shape[1]]
    return self.head(self.net(put(source), put(target), tgt_mask=causal, src_key_padding_mask=source == 3))


def _rotated(self: Any, x: Tensor) -> Tensor:
    """Rotary positions by complex numbers, grouped heads, ALiBi beside."""
    q, k, v = self.qkv(x).split([32, 16, 16], -1)
    turn = torch.polar(
        torch.ones(x.shape[1], 4, dtype=x.dtype),
        torch.outer(torch.arange(x.shape[1], dtype=x.dtype), self.rates),
    )
    turned = lambda y: torch.view_as_real(
        torch.view_as_complex(y.unflatten(-1, (-1, 4, 2))) * turn[None, :, None]
    ).flatten(-2)
    q, k, v = turned(q), turned(k).repeat_interleave(2, 2), v.unflatten(-1, (2, 8)).repeat_interleave(2, 2)
    places = torch.arange(x.shape[1])
    bias = (
        -(places[:, None] - places).abs()
        * torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=x.dtype)[:, None, None]
    )
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8) + bias
    score = score.masked_fill(places[:, None] < places, float("-inf"))
    return self.out(torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1), v).flatten(2))


def _local(self: Any, x: Tensor) -> Tensor:
    """Attention to the last three tokens, by unfold."""
    q, k, v = self.qkv(x).chunk(3, -1)
    near = lambda y: F.pad(y, (0, 0, 2, 0)).unfold(1, 3, 1)
    weights = torch.einsum("btd,btdw->btw", q, near(k)).div(32**0.5).softmax(-1)
    return torch.einsum("btw,btdw->btd", weights, near(v))


def _linear_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).chunk(3, -1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    seen = torch.cumsum(k[..., None] * v[..., None, :], 1)
    return torch.einsum("btd,btde->bte", q, seen) / (q * k.cumsum(1)).sum(-1, keepdim=True)


def _chosen_experts(self: Any, x: Tensor) -> Tensor:
    """A loop over experts; rows chosen by a mask and put back."""
    flat = x.flatten(0, 1)
    best, which = self.gate(flat).softmax(-1).topk(2)
    out = torch.zeros_like(flat)
    for i, expert in enumerate(self.experts):
        rows, place = torch.where(which == i)
        out.index_add_(0, rows, expert(flat[rows]) * best[rows, place, None])
    return out.view_as(x)


def _with_capacity(self: Any, x: Tensor) -> Tensor:
    """Switch: one-hot dispatch with a capacity, a balancing loss beside."""
    flat = x.flatten(0, 1)
    chance = self.gate(flat).softmax(-1)
    chosen = F.one_hot(chance.argmax(-1), 4).to(x.dtype)
    place = (chosen.cumsum(0) - 1) * chosen
    sent = chosen * (place < 16)
    dispatch = sent[..., None] * F.one_hot(place.long().clamp(max=15), 16).to(x.dtype)
    taken = torch.einsum("tec,td->ecd", dispatch, flat)
    made = torch.relu(taken @ self.up) @ self.down
    out = torch.einsum("tec,ecd->td", dispatch * (chance * chosen).sum(-1)[:, None, None], made)
    return out.square().mean() + 4 * (chance.mean(0) * chosen.mean(0)).sum()


def _residual(before: int, after: int, stride: int) -> nn.Module:
    body = lambda self, x: F.relu(self.net(x) + self.skip(x))
    from benchmarks.zoo_models.written import Written

    return Written(
        body,
        net=nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
        skip=nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)),
    )  # fmt: skip


def _spatial_transformer(self: Any, x: Tensor) -> Tensor:
    theta = self.where(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.tensor(
        [[1.0, 0, 0], [0, 1, 0]], dtype=x.dtype
    )
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return self.net(F.grid_sample(x, grid, align_corners=False))


_FLAT = lambda: (torch.randn(16, 16),)
_SEEN = lambda: (images(),)
_LONG = lambda: (torch.randn(4, 12, 32),)
_MADE: list[tuple[str, Any, Any, Any]] = [
    ("seq2seq with attention", _attentive, lambda: {
        "embed": nn.Embedding(96, 16), "encode": nn.GRU(16, 32, batch_first=True), "cell": nn.GRUCell(48, 32), "head": nn.Linear(32, 96),
        "of_states": nn.Linear(32, 16), "of_own": nn.Linear(32, 16), "score": nn.Linear(16, 1)}, lambda: (tokens(), tokens(length=5))),
    ("nn.Transformer", _translated, lambda: {
        "embed": nn.Embedding(96, 32), "position": weight(16, 32), "head": nn.Linear(32, 96),
        "net": nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True)}, lambda: (tokens(), tokens(length=8))),
    ("rotary, ALiBi, grouped", _rotated, lambda: {"qkv": nn.Linear(32, 64), "out": nn.Linear(32, 32), "rates": torch.rand(4)}, _LONG),
    ("local attention", _local, lambda: {"qkv": nn.Linear(32, 96)}, _LONG),
    ("linear attention", _linear_attention, lambda: {"qkv": nn.Linear(32, 96)}, _LONG),
    ("experts in a loop", _chosen_experts, lambda: {
        "gate": nn.Linear(32, 4), "experts": nn.ModuleList(mlp(32, 64, 32) for _ in range(4))}, _LONG),
    ("experts with capacity", _with_capacity, lambda: {"gate": nn.Linear(32, 4), "up": weight(4, 32, 64), "down": weight(4, 64, 32)}, _LONG),
    ("residual network", lambda self, x: self.net(x), lambda: {
        "net": nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), _residual(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                             nn.Linear(32, 10))}, _SEEN),
    ("spatial transformer", _spatial_transformer, lambda: {
        "where": nn.Linear(768, 6), "net": nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 10))}, _SEEN),
    ("WaveNet", lambda self, x: self.out(sum(torch.tanh(a(F.pad(x, (2**i, 0)))) * torch.sigmoid(b(F.pad(x, (2**i, 0))))
                                             for i, (a, b) in enumerate(zip(self.a, self.b, strict=True)))), lambda: {
        "a": nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3)), "out": nn.Conv1d(16, 8, 1),
        "b": nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))}, lambda: (torch.randn(4, 8, 32),)),
    ("MLP-Mixer", lambda self, x: self.head((x := (x := x + self.over(self.norm(x).mT).mT) + self.along(self.norm2(x))).mean(1)), lambda: {
        "norm": nn.LayerNorm(32), "norm2": nn.LayerNorm(32), "over": mlp(12, 24, 12), "along": mlp(32, 64, 32), "head": nn.Linear(32, 10)}, _LONG),
    ("3D U-Net", lambda self, x: self.up(torch.cat([F.interpolate(self.low(F.max_pool3d(h := F.relu(self.down(x)), 2)), scale_factor=2.0), h], 1)),
     lambda: {"down": nn.Conv3d(1, 8, 3, padding=1), "low": nn.Conv3d(8, 8, 3, padding=1), "up": nn.Conv3d(16, 2, 1)},
     lambda: (torch.randn(2, 1, 8, 8, 8),)),
    ("super-resolution", lambda self, x: F.l1_loss(F.pixel_shuffle(self.net(x), 2), F.interpolate(x, scale_factor=2, mode="bicubic")), lambda: {
        "net": nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect"), nn.PReLU(16), nn.Conv2d(16, 12, 3, padding=1))}, _SEEN),
    ("depthwise, squeeze", lambda self, x: self.out(F.hardswish(h := self.dw(self.enter(x))) * self.gate(h.mean((2, 3), keepdim=True)).sigmoid()),
     lambda: {"enter": nn.Conv2d(3, 16, 1), "dw": nn.Conv2d(16, 16, 5, padding=2, groups=16), "gate": nn.Conv2d(16, 16, 1), "out": nn.Conv2d(16, 8, 1)},
     _SEEN),
]  # fmt: skip
ROWS = [
    _recurrent("LSTM", lambda: nn.LSTM(16, 32, 2, batch_first=True)),
    _recurrent("two-way GRU", lambda: nn.GRU(16, 16, batch_first=True, bidirectional=True)),
    *(written(name, "idiom", body, parts, inputs) for name, body, parts, inputs in _MADE),
]
