"""Networks written by hand: diffusion, graphs."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.row import Row
from benchmarks.zoo_models.tiny import images
from benchmarks.zoo_models.written import mlp, weight, written


def waves(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of times [n]: [n, width]."""
    rates = torch.exp(
        -math.log(1e4) * torch.arange(width // 2, dtype=t.dtype, device=t.device) / (width // 2)
    )
    angles = t[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class _Block(nn.Module):
    """Norm, convolution, time added, norm, convolution, and what came in."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, before), nn.GroupNorm(4, after)])
        self.first, self.second = (
            nn.Conv2d(before, after, 3, padding=1),
            nn.Conv2d(after, after, 3, padding=1),
        )
        self.time, self.skip = nn.Linear(32, after), nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.norms[1](y)))


class DiffusionUNet(nn.Module):
    """Two levels, attention at the lower one."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.enter = mlp(32, 32, 32, act=nn.SiLU), nn.Conv2d(3, 16, 3, padding=1)
        self.down, self.shrink = _Block(16, 16), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.middle, self.norm, self.attend = (
            _Block(32, 32),
            nn.GroupNorm(4, 32),
            nn.MultiheadAttention(32, 4, batch_first=True),
        )
        self.grow, self.up, self.leave = (
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            _Block(32, 16),
            nn.Conv2d(16, 3, 3, padding=1),
        )

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        time = self.time(waves(t, 32))
        high = self.down(self.enter(x), time)
        low = self.middle(self.shrink(high), time)
        flat = self.norm(low).flatten(2).transpose(1, 2)
        low = low + self.attend(flat, flat, flat, need_weights=False)[0].transpose(1, 2).reshape(low.shape)
        return F.mse_loss(self.leave(self.up(torch.cat([high, self.grow(low)], 1), time)), noise)


def _dit(self: Any, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    """Patches, adaptive norms from time and class, and back."""
    tokens = self.patch(x).flatten(2).transpose(1, 2) + self.position
    given = F.silu(waves(t, 32) + self.label(label))
    for norm, shifts, attend, hidden in zip(self.norms, self.shifts, self.attend, self.hidden, strict=True):
        shift, scale, gate, shift2, scale2, gate2 = shifts(given)[:, None].chunk(6, -1)
        y = norm(tokens) * (1 + scale) + shift
        tokens = tokens + gate * attend(y, y, y, need_weights=False)[0]
        tokens = tokens + gate2 * hidden(norm(tokens) * (1 + scale2) + shift2)
    out = self.leave(tokens).unflatten(1, (4, 4)).unflatten(-1, (4, 4, 3))
    return out.permute(0, 5, 1, 3, 2, 4).reshape(x.shape)


def _vae(self: Any, x: Tensor) -> Tensor:
    mean, spread = self.down(x).chunk(2, 1)
    z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
    return F.mse_loss(self.up(z), x) + divergence


def _quantized(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """VQ-VAE: the nearest code, and gradients straight through."""
    z = self.down(x).flatten(2).transpose(1, 2)
    nearest = torch.cdist(z, self.codes.weight[None].expand(len(z), -1, -1)).argmin(-1)
    code = self.codes(nearest)
    passed = z + (code - z).detach()
    loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
    return self.up(passed.transpose(1, 2).reshape(len(x), 8, 8, 8)), loss


_DIFFUSION = [
    Row("U-Net", "diffusion", lambda: (DiffusionUNet(), (images(), torch.rand(4), images()))),
    written("DiT", "diffusion", _dit, lambda: {
        "patch": nn.Conv2d(3, 32, 4, stride=4), "position": weight(16, 32), "label": nn.Embedding(10, 32), "leave": nn.Linear(32, 48),
        "norms": nn.ModuleList(nn.LayerNorm(32, elementwise_affine=False) for _ in range(2)),
        "shifts": nn.ModuleList(nn.Linear(32, 192) for _ in range(2)),
        "attend": nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2)),
        "hidden": nn.ModuleList(mlp(32, 64, 32) for _ in range(2)),
    }, lambda: (images(), torch.rand(4), torch.randint(0, 10, (4,)))),
    written("VAE", "diffusion", _vae, lambda: {
        "down": nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.SiLU(), nn.Conv2d(16, 16, 4, 2, 1)),
        "up": nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)),
    }, lambda: (images(),)),
    written("VQ-VAE", "diffusion", _quantized, lambda: {
        "down": nn.Conv2d(3, 8, 4, 2, 1), "codes": nn.Embedding(16, 8), "up": nn.ConvTranspose2d(8, 3, 4, 2, 1)}, lambda: (images(),)),
    written("score network", "diffusion", lambda self, x, t: self.net(torch.cat([x, waves(t, 16)], -1)) / (t[:, None] + 0.1), lambda: {
        "net": mlp(24, 64, 64, 8, act=nn.SiLU)}, lambda: (torch.randn(16, 8), torch.rand(16))),
    written("flow matching", "diffusion", lambda self, x, e, t: F.mse_loss(
        self.net(torch.cat([torch.lerp(e, x, t[:, None]), waves(t, 16)], -1)), x - e), lambda: {
        "net": mlp(24, 64, 64, 8)}, lambda: (torch.randn(16, 8), torch.randn(16, 8), torch.rand(16))),
    written("generator", "diffusion", lambda self, z: torch.tanh(self.net(z[:, :, None, None])), lambda: {
        "net": nn.Sequential(nn.ConvTranspose2d(16, 32, 4), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1),
                             nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))}, lambda: (torch.randn(8, 16),)),
]  # fmt: skip

_EDGES = lambda: (torch.randn(24, 16), torch.randint(0, 24, (2, 64)))


def _summed(values: Tensor, index: Tensor, count: int) -> Tensor:
    return values.new_zeros(count, *values.shape[1:]).index_add(0, index, values)


def _gcn(self: Any, x: Tensor, edges: Tensor) -> Tensor:
    sources, targets = edges
    degree = _summed(torch.ones_like(targets, dtype=x.dtype), targets, len(x)).clamp(min=1)
    for layer in self.layers:
        x = torch.relu(layer(_summed(x[sources], targets, len(x)) / degree[:, None]) + x)
    return x


def _gat(self: Any, x: Tensor, edges: Tensor) -> Tensor:
    """Scores softmaxed over the edges into each node."""
    sources, targets = edges
    h = self.layer(x).unflatten(-1, (4, 8))
    score = F.leaky_relu((h * self.left).sum(-1)[sources] + (h * self.right).sum(-1)[targets], 0.2)
    most = score.new_full((len(x), 4), -1e9).scatter_reduce(
        0, targets[:, None].expand_as(score), score, "amax"
    )
    score = (score - most[targets]).exp()
    score = score / (_summed(score, targets, len(x))[targets] + 1e-9)
    return _summed(score[..., None] * h[sources], targets, len(x)).flatten(1)


def _sage(self: Any, x: Tensor, edges: Tensor) -> Tensor:
    sources, targets = edges
    mean = x.new_zeros(x.shape).scatter_reduce(
        0, targets[:, None].expand(-1, x.shape[1]), x[sources], "mean", include_self=False
    )
    return F.normalize(self.own(x) + self.near(mean), dim=-1)


def _messages(self: Any, x: Tensor, edges: Tensor, features: Tensor, graph: Tensor) -> Tensor:
    """Messages of edges, a gated update, a mean over each of three graphs."""
    sources, targets = edges
    for _ in range(2):
        made = self.message(torch.cat([x[sources], x[targets], features], -1))
        x = self.update(_summed(made, targets, len(x)), x)
    sizes = torch.bincount(graph, minlength=3).clamp(min=1)
    return self.read(_summed(x, graph, 3) / sizes[:, None])


def _equivariant(self: Any, h: Tensor, at: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """EGNN: messages from distances move the points."""
    sources, targets = edges
    apart = at[sources] - at[targets]
    made = self.message(torch.cat([h[sources], h[targets], apart.square().sum(-1, keepdim=True)], -1))
    moved = at + _summed(apart * self.move(made), targets, len(at)) / len(at)
    return h + self.update(torch.cat([h, _summed(made, targets, len(h))], -1)), moved


def _dense_graph(self: Any, x: Tensor, near: Tensor) -> Tensor:
    near = near + torch.eye(near.shape[-1], dtype=near.dtype)
    scale = near.sum(-1).rsqrt()
    return torch.relu(self.layer(scale[..., None] * near * scale[..., None, :] @ x)).amax(1)


_GRAPHS = [
    written("GCN", "graph", _gcn, lambda: {"layers": nn.ModuleList(nn.Linear(16, 16) for _ in range(2))}, _EDGES),
    written("GAT", "graph", _gat, lambda: {"layer": nn.Linear(16, 32), "left": weight(4, 8), "right": weight(4, 8)}, _EDGES),
    written("GraphSAGE", "graph", _sage, lambda: {"own": nn.Linear(16, 16), "near": nn.Linear(16, 16)}, _EDGES),
    written("MPNN", "graph", _messages, lambda: {"message": mlp(36, 32, 16), "update": nn.GRUCell(16, 16), "read": nn.Linear(16, 4)},
            lambda: (*_EDGES(), torch.randn(64, 4), torch.randint(0, 3, (24,)))),
    written("EGNN", "graph", _equivariant, lambda: {"message": mlp(33, 32, 16), "move": mlp(16, 16, 1), "update": mlp(32, 32, 16)},
            lambda: (torch.randn(24, 16), torch.randn(24, 3), torch.randint(0, 24, (2, 64)))),
    written("dense GCN", "graph", _dense_graph, lambda: {"layer": nn.Linear(16, 32)},
            lambda: (torch.randn(4, 12, 16), torch.rand(4, 12, 12).round())),
]  # fmt: skip

ROWS = [*_DIFFUSION, *_GRAPHS]
