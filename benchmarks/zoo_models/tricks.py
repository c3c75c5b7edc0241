"""How people write PyTorch by hand: losses, odd ops and tricks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo_models.tiny import images, masked, tokens
from benchmarks.zoo_models.written import mlp, weight, written

_WORDS = lambda: (tokens(), tokens(most=10))
_FLAT = lambda: (torch.randn(16, 16),)
_SEEN = lambda: (images(),)
_LONG = lambda: (torch.randn(4, 12, 32),)


def _crf(self: Any, ids: Tensor, tags: Tensor) -> Tensor:
    """A linear-chain field: log of all paths less the right one."""
    score = self.emit(self.embed(ids))
    alpha = score[:, 0]
    for t in range(1, ids.shape[1]):
        alpha = torch.logsumexp(alpha[:, :, None] + self.step, 1) + score[:, t]
    right = score.gather(2, tags[..., None]).squeeze(-1).sum(1) + self.step[tags[:, :-1], tags[:, 1:]].sum(1)
    return (alpha.logsumexp(1) - right).mean()


def _contrastive(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(torch.cat([self.net(x), self.net(y)]), dim=-1)
    alike = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(alike, torch.arange(len(z)).roll(len(x)))


def _barlow(self: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = self.norm(self.net(x)), self.norm(self.net(y))
    c = a.T @ b / len(a)
    return (c.diagonal() - 1).square().sum() + 0.01 * (c - torch.diag(c.diagonal())).square().sum()


def _teacher(self: Any, x: Tensor) -> Tensor:
    """A centre that each call moves, distillation, no gradient to the teacher."""
    with torch.no_grad():
        wanted = ((self.teacher(x) - self.center) / 0.04).softmax(-1)
        self.center.mul_(0.9).add_(self.teacher(x).mean(0), alpha=0.1)
    return -(wanted * F.log_softmax(self.student(x) / 0.1, -1)).sum(-1).mean()


def _metric(self: Any, x: Tensor, label: Tensor) -> Tensor:
    """ArcFace."""
    cosine = F.linear(F.normalize(self.net(x)), F.normalize(self.classes)).clamp(-0.999, 0.999)
    hot = F.one_hot(label, 10).to(x.dtype)
    return F.cross_entropy(16 * torch.cos(torch.acos(cosine) + 0.2 * hot), label)


def _fake_int8(self: Any, x: Tensor) -> Tensor:
    scale = self.weight.abs().amax(1, keepdim=True) / 127
    rounded = (self.weight / scale).round().clamp(-128, 127) * scale
    return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


def _set(self: Any, x: Tensor, sizes: Tensor) -> Tensor:
    """Deep sets of sizes of their own: mean and most of the valid ones."""
    valid = (torch.arange(x.shape[1]) < sizes[:, None])[..., None]
    h = self.each(x)
    return self.all(torch.cat([(h * valid).sum(1) / sizes[:, None], h.masked_fill(~valid, -1e9).amax(1)], -1))


def _points(self: Any, x: Tensor) -> Tensor:
    """DGCNN: the four nearest of each point."""
    near = torch.cdist(x, x).topk(4, largest=False).indices
    found = (
        x[:, None].expand(-1, x.shape[1], -1, -1).gather(2, near[..., None].expand(-1, -1, -1, x.shape[-1]))
    )
    return self.head(
        self.edge(torch.cat([found - x[:, :, None], x[:, :, None].expand_as(found)], -1)).amax(2).amax(1)
    )


def _pointer(self: Any, x: Tensor) -> Tensor:
    order = x.norm(dim=-1).argsort(1, descending=True)
    return self.net(x.gather(1, order[..., None].expand_as(x)).flatten(1))


def _hyper(self: Any, x: Tensor, task: Tensor) -> Tensor:
    made = self.make(task)
    w, b = made[:, :128].view(-1, 16, 8), made[:, 128:]
    return torch.bmm(w, x[..., None]).squeeze(-1) + b


def _kept(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = x + checkpoint(layer, x, use_reentrant=False)
    return x.square().mean()


def _written_in_place(self: Any, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), 24)
    out[:, :8] = self.a(x)
    out[:, 8:16] += self.b(x).sigmoid_()
    out[:, 16:].copy_(x[:, :8])
    out[x[:, 0] > 0] *= 2
    return self.c(out)


def _ensemble(self: Any, x: Tensor) -> Tensor:
    """Members by vmap."""
    return torch.vmap(lambda w, b: torch.tanh(x @ w + b))(self.w, self.b).mean(0)


def _deep_equilibrium(self: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    with torch.no_grad():
        for _ in range(4):
            z = torch.tanh(self.net(z) + x)
    return torch.tanh(self.net(z) + x)


def _shrunk(self: Any, x: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(self.net(x), full_matrices=False)
    return (u * F.softshrink(s, 0.1)) @ v


def _in_dict(self: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    h = self.net(batch["x"]) * batch["scale"][:, None]
    return {"h": h, "parts": (h.mean(), [h.std(0), h.var(unbiased=False)])}


def _scan(a: Tensor, b: Tensor) -> Tensor:
    h, found = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        found.append(h)
    return torch.stack(found, 1)


_MADE: list[tuple[str, Any, Any, Any]] = [
    ("CRF tagger", _crf, lambda: {"embed": nn.Embedding(96, 16), "emit": nn.Linear(16, 10), "step": weight(10, 10)}, _WORDS),
    ("CTC", lambda self, x, y: F.ctc_loss(self.net(x).log_softmax(-1).transpose(0, 1), y, torch.full((4,), 12), torch.full((4,), 4)), lambda: {
        "net": mlp(32, 64, 16)}, lambda: (*_LONG(), torch.randint(1, 16, (4, 4)))),
    ("SimCLR", _contrastive, lambda: {"net": mlp(16, 32, 16)}, lambda: (*_FLAT(), *_FLAT())),
    ("Barlow twins", _barlow, lambda: {"net": mlp(16, 32, 16), "norm": nn.BatchNorm1d(16, affine=False)}, lambda: (*_FLAT(), *_FLAT())),
    ("DINO's centre", _teacher, lambda: {"student": mlp(16, 32, 16), "teacher": mlp(16, 32, 16).requires_grad_(False), "center": torch.zeros(16)}, _FLAT),
    ("ArcFace", _metric, lambda: {"net": mlp(16, 32, 16), "classes": weight(10, 16)}, lambda: (*_FLAT(), torch.randint(0, 10, (16,)))),
    ("triplets", lambda self, a, p, n: F.triplet_margin_loss(self.net(a), self.net(p), self.net(n)), lambda: {"net": mlp(16, 32, 8)},
     lambda: (*_FLAT(), *_FLAT(), *_FLAT())),
    ("int8 in training", _fake_int8, lambda: {"weight": weight(32, 16), "bias": nn.Parameter(torch.zeros(32))}, _FLAT),
    ("LoRA", lambda self, x: self.base(x) + x @ self.a @ self.b, lambda: {
        "base": nn.Linear(16, 32).requires_grad_(False), "a": weight(16, 4), "b": weight(4, 32)}, _FLAT),
    ("deep sets", _set, lambda: {"each": mlp(32, 32, 32), "all": nn.Linear(64, 4)}, lambda: (*_LONG(), torch.tensor([3, 12, 7, 1]))),
    ("DGCNN", _points, lambda: {"edge": mlp(6, 32, 32), "head": nn.Linear(32, 4)}, lambda: (torch.randn(4, 16, 3),)),
    ("sorted rows", _pointer, lambda: {"net": nn.Linear(384, 16)}, _LONG),
    ("hypernetwork", _hyper, lambda: {"make": mlp(4, 32, 144)}, lambda: (torch.randn(16, 8), torch.randn(16, 4))),
    ("checkpoints", _kept, lambda: {"layers": nn.ModuleList(mlp(16, 32, 16) for _ in range(2))}, _FLAT),
    ("in place", _written_in_place, lambda: {"a": nn.Linear(16, 8), "b": nn.Linear(16, 8), "c": nn.Linear(24, 8)}, _FLAT),
    ("ensemble by vmap", _ensemble, lambda: {"w": weight(4, 16, 32), "b": weight(4, 32)}, _FLAT),
    ("equilibrium", _deep_equilibrium, lambda: {"net": nn.Linear(16, 16)}, _FLAT),
    ("low rank by SVD", _shrunk, lambda: {"net": nn.Linear(16, 8)}, _FLAT),
    ("dicts and lists", _in_dict, lambda: {"net": mlp(16, 32, 16)}, lambda: ({"x": torch.randn(16, 16), "scale": torch.rand(16)},)),
    ("spectral norm", lambda self, x: self.net(x), lambda: {
        "net": nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 32)), nn.LeakyReLU(), parametrizations.weight_norm(nn.Linear(32, 8)))}, _FLAT),
    ("orthogonal weights", lambda self, x: self.net(x), lambda: {"net": parametrizations.orthogonal(nn.Linear(16, 16))}, _FLAT),
    ("bilinear, maxout", lambda self, x: self.b(x, self.a(x).unflatten(-1, (16, 2)).amax(-1)), lambda: {
        "a": nn.Linear(16, 32), "b": nn.Bilinear(16, 16, 8)}, _FLAT),
    ("highway", lambda self, x: (g := self.gate(x).sigmoid()) * torch.relu(self.net(x)) + (1 - g) * x, lambda: {
        "gate": nn.Linear(16, 16), "net": nn.Linear(16, 16)}, _FLAT),
    ("Gumbel choice", lambda self, x: F.gumbel_softmax(self.net(x), hard=True) @ self.codes, lambda: {
        "net": nn.Linear(16, 8), "codes": weight(8, 16)}, _FLAT),
    ("policy gradient", lambda self, x, a, r: -(torch.distributions.Categorical(logits=self.net(x)).log_prob(a) * (r - r.mean()) / r.std()).mean(),
     lambda: {"net": mlp(16, 32, 4)}, lambda: (*_FLAT(), torch.randint(0, 4, (16,)), torch.rand(16))),
    ("dueling values", lambda self, x, a, y: F.smooth_l1_loss((self.v(x) + (q := self.a(x)) - q.mean(1, keepdim=True)).gather(1, a[:, None])[:, 0], y),
     lambda: {"v": mlp(16, 32, 1), "a": mlp(16, 32, 4)}, lambda: (*_FLAT(), torch.randint(0, 4, (16,)), torch.rand(16))),
    ("mixture density", lambda self, x, y: -torch.logsumexp(self.pi(x).log_softmax(-1) - 0.5 * (y[:, None] - self.mu(x)).square(), -1).mean(),
     lambda: {"pi": nn.Linear(16, 4), "mu": nn.Linear(16, 4)}, lambda: (*_FLAT(), torch.randn(16))),
    ("text by bags", lambda self, ids, starts: self.head(self.bag(ids, starts)), lambda: {
        "bag": nn.EmbeddingBag(96, 16, mode="mean"), "head": nn.Linear(16, 4)}, lambda: (tokens(1, 40)[0], torch.arange(0, 40, 5))),
    ("state space scan", lambda self, x: self.out(_scan(torch.sigmoid(self.a(x)), self.b(x))), lambda: {
        "a": nn.Linear(32, 16), "b": nn.Linear(32, 16), "out": nn.Linear(16, 32)}, _LONG),
    ("global norm", lambda self, x: (h := self.net(x)) / (h.norm() + 1e-6) + h.cumsum(0) / 16 - h.median(0).values, lambda: {"net": mlp(16, 32, 8)}, _FLAT),
    ("fold and unfold", lambda self, x: F.fold(self.net(F.unfold(x, 4, stride=2).mT).mT, (16, 16), 4, stride=2), lambda: {"net": nn.Linear(48, 48)}, _SEEN),
    ("packed GRU", lambda self, x, n: nn.utils.rnn.pad_packed_sequence(self.net(nn.utils.rnn.pack_padded_sequence(
        x, n, batch_first=True, enforce_sorted=False))[0], batch_first=True)[0], lambda: {"net": nn.GRU(32, 16, batch_first=True)},
     lambda: (*_LONG(), torch.tensor([12, 5, 7, 3]))),
    ("masked pooling", lambda self, ids, mask: self.head((self.embed(ids) * (m := mask[..., None])).sum(1) / m.sum(1)), lambda: {
        "embed": nn.Embedding(96, 16), "head": nn.Linear(16, 4)}, lambda: (ids := tokens(), masked(ids))),
]  # fmt: skip
ROWS = [written(name, "idiom", body, parts, inputs) for name, body, parts, inputs in _MADE]
