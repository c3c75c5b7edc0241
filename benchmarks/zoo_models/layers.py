"""How people write PyTorch by hand: layers of recent papers, and losses with places computed from values."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.tiny import images, tokens
from benchmarks.zoo_models.written import mlp, weight, written

_LONG = lambda: (torch.randn(4, 12, 32),)


def _latent_attention(self: Any, x: Tensor) -> Tensor:
    """MLA: queries and keys from narrow latents, rotary parts beside."""
    heads = lambda y: y.unflatten(-1, (4, -1)).transpose(1, 2)
    q, (latent, k_turned) = heads(self.q_up(self.q_norm(self.q_down(x)))), self.kv_down(x).split([16, 4], -1)
    k, v = heads(self.kv_up(self.kv_norm(latent))).chunk(2, -1)
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), torch.tensor([1.0, 0.01], dtype=x.dtype))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned = lambda y: y * cos + torch.cat([-y[..., 2:], y[..., :2]], -1) * sin
    k = torch.cat([k, turned(k_turned[:, None]).expand(-1, 4, -1, -1)], -1)
    q = torch.cat([q[..., :8], turned(q[..., 8:])], -1)
    return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _depths(self: Any, x: Tensor) -> Tensor:
    """A mixture of depths: the block is for the best half of the tokens."""
    weights, at = self.router(x).squeeze(-1).topk(x.shape[1] // 2, 1)
    at, order = at.sort(1)
    at = at[..., None].expand(-1, -1, x.shape[-1])
    return x.scatter_add(1, at, self.block(x.gather(1, at)) * weights.gather(1, order)[..., None].sigmoid())


def _packed(self: Any, ids: Tensor, places: Tensor) -> Tensor:
    """Documents in one row, told apart by their positions; none looks at another, or predicts its first word."""
    document = (places == 0).cumsum(1)
    x = self.embed(ids) + self.places(places)
    q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    mask = (document[:, :, None] == document[:, None]).tril()[:, None]
    out = self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
    wanted = ids.roll(-1, 1).masked_fill(places.roll(-1, 1) == 0, -100)
    return F.cross_entropy(out.flatten(0, 1), wanted.flatten())


def _delta_rule(self: Any, x: Tensor) -> Tensor:
    """RWKV-7: a state that decays, forgets along a key and learns a value."""
    mixed = x + (F.pad(x, (0, 0, 1, -1)) - x) * self.mix[:, None, None]
    r, w, k, v, a = (
        layer(one).unflatten(-1, (4, 8, 1)) for layer, one in zip(self.layers, mixed, strict=True)
    )
    w, a, key = torch.exp(-0.6 * w.sigmoid()), a.sigmoid(), F.normalize(k, dim=3)
    state, out = x.new_zeros(len(x), 4, 8, 8), []
    for t in range(x.shape[1]):
        state = state * w[:, t].mT - (state @ key[:, t]) @ (key * a)[:, t].mT + v[:, t] @ k[:, t].mT
        out.append((state @ r[:, t]).flatten(1))
    return self.out(torch.stack(out, 1))


def _gated(self: Any, x: Tensor) -> Tensor:
    """Gated linear attention in pieces of four tokens."""
    pieces = lambda y: y.unflatten(1, (3, 4)).unflatten(-1, (4, 8)).transpose(2, 3)
    q, k, v = map(pieces, self.qkv(x).chunk(3, -1))
    decay = F.logsigmoid(pieces(self.gate(x))).cumsum(3)
    state, out = x.new_zeros(len(x), 4, 8, 8), []
    for c in range(3):
        now = q[:, c] * decay[:, c].exp()
        near = (now @ (k[:, c] * (-decay[:, c]).exp()).mT).tril() @ v[:, c]
        out.append(now @ state + near)
        last = decay[:, c, :, -1:]
        state = state * last.exp().mT + (k[:, c] * (last - decay[:, c]).exp()).mT @ v[:, c]
    return self.out(torch.stack(out, 1).transpose(2, 3).flatten(3).flatten(1, 2))


def _long_filters(self: Any, x: Tensor) -> Tensor:
    """Hyena with S4D's filters: powers of complex numbers, convolved by FFT."""
    q, k, v = self.qkv(x).mT.chunk(3, 1)
    length = x.shape[1]
    rates = torch.complex(-self.real.exp(), self.turn)[..., None] * torch.arange(length, dtype=x.dtype)
    filters = torch.einsum("dn,dnt->dt", torch.view_as_complex(self.scale), rates.exp()).real
    spectrum = torch.fft.rfft(k * v, n=2 * length) * torch.fft.rfft(filters, n=2 * length)
    return self.out((q * torch.fft.irfft(spectrum, n=2 * length)[..., :length]).mT)


def _sorted_experts(self: Any, x: Tensor) -> Tensor:
    """Rows sorted by expert, each at its place in its expert's part of a buffer."""
    flat = x.flatten(0, 1)
    weights, expert = self.gate(flat).softmax(-1).topk(2)
    order, expert = expert.flatten().argsort(stable=True), expert.flatten()
    counts = torch.bincount(expert, minlength=4)
    slot = torch.arange(len(order)) - (counts.cumsum(0) - counts)[expert[order]]
    places = expert[order], slot
    held = flat.new_zeros(4, len(order), 32).index_put(places, flat[order // 2])
    made = torch.bmm(F.silu(torch.bmm(held, self.up)), self.down)[places] * weights.flatten()[order, None]
    return torch.zeros_like(flat).index_add(0, order // 2, made).view_as(x)


def _relative(self: Any, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Transformer-XL: relative places by a shift, and a memory."""
    seen = torch.cat([memory, x], 1)
    (b, t, _), length = x.shape, seen.shape[1]
    q, (k, v) = self.q(x).unflatten(-1, (4, 8)), self.kv(seen).unflatten(-1, (2, 4, 8)).unbind(2)
    by_place = torch.einsum("bqhd,khd->bhqk", q + self.places, self.r(self.waves).unflatten(-1, (4, 8)))
    by_place = F.pad(by_place, (1, 0)).view(b, 4, length + 1, t)[:, :, 1:].view(b, 4, t, length)
    score = (torch.einsum("bqhd,bkhd->bhqk", q + self.words, k) + by_place) / 8**0.5
    later = torch.ones(t, length, dtype=torch.bool).triu(1 + length - t)
    out = torch.einsum("bhqk,bkhd->bqhd", score.masked_fill(later, float("-inf")).softmax(-1), v)
    return self.out(out.flatten(2)), seen[:, -t:].detach()


def _splines(self: Any, x: Tensor) -> Tensor:
    """KAN: B-splines by their recursion."""
    g, x = self.grid, x[..., None]
    basis = ((x >= g[:-1]) & (x < g[1:])).to(x.dtype)
    for k in range(1, 4):
        rising, falling = x - g[: -k - 1], g[k + 1 :] - x
        basis = (
            rising / (g[k:-1] - g[: -k - 1]) * basis[..., :-1]
            + falling / (g[k + 1 :] - g[1:-k]) * basis[..., 1:]
        )
    return F.linear(F.silu(x[..., 0]), self.base) + torch.einsum("bik,oik->bo", basis, self.knots)


def _transport(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Sinkhorn's distance of two sets."""
    cost = torch.cdist(self.net(x), self.net(y)).square()
    f, g = cost.new_zeros(len(x), 1), cost.new_zeros(len(y))
    for _ in range(5):
        f = -0.1 * torch.logsumexp((g - cost) / 0.1 - math.log(len(y)), 1, keepdim=True)
        g = -0.1 * torch.logsumexp((f - cost) / 0.1 - math.log(len(x)), 0)
    return (torch.exp((f + g - cost) / 0.1) * cost).mean()


def _spectral(self: Any, x: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """A graph's filters: by eigenvectors of its Laplacian, and by Chebyshev's polynomials of it."""
    near = (near + near.mT) / 2
    laplacian = torch.diag_embed(near.sum(-1)) - near
    rates, vectors = torch.linalg.eigh(laplacian)
    vectors = vectors.abs()  # their signs are anybody's choice
    before, now = x, laplacian @ x / 12
    out = before @ self.terms[0] + now @ self.terms[1]
    for term in self.terms[2:]:
        before, now = now, 2 * laplacian @ now / 12 - before
        out = out + now @ term
    return (vectors @ (vectors.mT @ x * self.net(rates[..., None]))).mean(1), out


def _hash_grid(self: Any, x: Tensor) -> Tensor:
    """Instant NGP: corners of cells by a hash of their places, at two sizes."""
    corners = torch.tensor([[i & 1, i >> 1 & 1, i >> 2] for i in range(8)])
    found = []
    for table, size in zip(self.tables, (4, 8), strict=True):
        low = (x * size).floor()
        at = low.long()[:, None] + corners
        hashed = (at[..., 0] ^ at[..., 1] * 2654435761 ^ at[..., 2] * 805459861) % len(table)
        share = (x * size - low)[:, None]
        found.append(
            (torch.where(corners.bool(), share, 1 - share).prod(-1, keepdim=True) * table[hashed]).sum(1)
        )
    return self.net(torch.cat(found, -1))


def _boxes(self: Any, x: Tensor, box: Tensor, label: Tensor) -> Tensor:
    """YOLO: the cell that a box's centre is in answers for it."""
    made, rows = self.net(x).permute(0, 2, 3, 1), torch.arange(len(x))
    column, line = (box[:, :2] * 4).long().unbind(1)
    wanted = torch.zeros(made.shape[:3], dtype=x.dtype)
    wanted[rows, line, column] = 1.0
    found = made[rows, line, column]
    centre, size = (torch.stack([column, line], 1) + found[:, :2].sigmoid()) / 4, found[:, 2:4].exp() * 0.1
    low, high = (
        f(centre + s * size / 2, box[:, :2] + s * box[:, 2:] / 2)
        for f, s in ((torch.maximum, -1), (torch.minimum, 1))
    )
    shared = (high - low).clamp(min=0).prod(-1)
    overlap = shared / (size.prod(-1) + box[:, 2:].prod(-1) - shared + 1e-7)
    return (
        (1 - overlap).mean()
        + F.binary_cross_entropy_with_logits(made[..., 4], wanted)
        + F.cross_entropy(found[:, 5:], label)
    )


_PLACES = lambda: torch.cat([torch.arange(5), torch.arange(4), torch.arange(3)]).repeat(4, 1)
_MADE: list[tuple[str, str, Any, Any, Any]] = [
    ("latent attention", "idiom", _latent_attention, lambda: {
        "q_down": nn.Linear(32, 16), "q_norm": nn.RMSNorm(16), "q_up": nn.Linear(16, 48), "kv_down": nn.Linear(32, 20), "kv_norm": nn.RMSNorm(16),
        "kv_up": nn.Linear(16, 64), "out": nn.Linear(32, 32)}, _LONG),
    ("mixture of depths", "idiom", _depths, lambda: {"router": nn.Linear(32, 1), "block": mlp(32, 64, 32)}, _LONG),
    ("packed documents", "idiom", _packed, lambda: {
        "embed": nn.Embedding(96, 32), "places": nn.Embedding(16, 32), "qkv": nn.Linear(32, 96), "head": nn.Linear(32, 96)},
     lambda: (tokens(), _PLACES())),
    ("delta rule", "idiom", _delta_rule, lambda: {
        "mix": weight(5, 32), "layers": nn.ModuleList(nn.Linear(32, 32) for _ in range(5)), "out": nn.Linear(32, 32)}, _LONG),
    ("gated linear attention", "idiom", _gated, lambda: {"qkv": nn.Linear(32, 96), "gate": nn.Linear(32, 32), "out": nn.Linear(32, 32)}, _LONG),
    ("long filters", "idiom", _long_filters, lambda: {
        "qkv": nn.Linear(32, 96), "real": weight(32, 4), "turn": weight(32, 4), "scale": weight(32, 4, 2), "out": nn.Linear(32, 32)}, _LONG),
    ("sorted experts", "idiom", _sorted_experts, lambda: {"gate": nn.Linear(32, 4), "up": weight(4, 32, 64), "down": weight(4, 64, 32)}, _LONG),
    ("relative places, memory", "idiom", _relative, lambda: {
        "q": nn.Linear(32, 32), "kv": nn.Linear(32, 64), "r": nn.Linear(32, 32), "waves": torch.randn(20, 32), "words": weight(4, 8),
        "places": weight(4, 8), "out": nn.Linear(32, 32)}, lambda: (*_LONG(), torch.randn(4, 8, 32))),
    ("splines", "idiom", _splines, lambda: {"grid": torch.linspace(-2, 2, 10), "base": weight(8, 16), "knots": weight(8, 16, 6)},
     lambda: (torch.randn(16, 16),)),
    ("optimal transport", "idiom", _transport, lambda: {"net": mlp(16, 32, 4)}, lambda: (torch.randn(16, 16), torch.randn(12, 16))),
    ("spectral filters", "graph", _spectral, lambda: {"net": mlp(1, 16, 16), "terms": nn.ParameterList(weight(16, 8) for _ in range(4))},
     lambda: (torch.randn(4, 12, 16), torch.rand(4, 12, 12))),
    ("hash grid", "science", _hash_grid, lambda: {"tables": nn.ParameterList(weight(64, 4) for _ in range(2)), "net": mlp(8, 32, 3)},
     lambda: (torch.rand(32, 3),)),
    ("YOLO", "detection", _boxes, lambda: {"net": nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, 8, 3, 2, 1))},
     lambda: (images(), torch.rand(4, 4) * 0.9, torch.randint(0, 3, (4,)))),
]  # fmt: skip
ROWS = [written(name, kind, body, parts, inputs) for name, kind, body, parts, inputs in _MADE]
