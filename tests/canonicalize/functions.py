"""Functions that between them use what capture takes apart and the passes rewrite."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.canonicalize.graphs import Function, ramp


def cross_entropy(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((x @ w).view(-1, 7), y.view(-1), ignore_index=2, label_smoothing=0.1)


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (y.view(2, 6, 4, 4).transpose(1, 2) for y in (x @ w.t()).split(16, -1))
    scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
    return (scores @ v).transpose(1, 2).reshape(2, 6, 16)


def kl(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")


def written_slices(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.slice_scatter(y, 1, 1, 3) + x.select_scatter(y[:, 0], 1, -1)


def small_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    outer = torch.outer(x, y)
    return outer @ y + x.dot(x) + torch.addmv(x, outer, y)


LABELS = torch.arange(10).reshape(2, 5) % 7

FUNCTIONS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "cross entropy": (cross_entropy, (ramp(2, 5, 4), ramp(4, 7), LABELS)),
    "cross entropy of a batch of one": (cross_entropy, (ramp(1, 5, 4), ramp(4, 7), LABELS[:1])),
    "attention": (attention, (ramp(2, 6, 16), ramp(48, 16))),
    "einsum": (lambda x, w: torch.einsum("bsk,khd->bhsd", x, w), (ramp(2, 6, 8), ramp(8, 3, 4))),
    "einsum over two": (lambda x, w: torch.einsum("bhsd,hde->bse", x, w), (ramp(2, 3, 5, 4), ramp(3, 4, 7))),
    "mse": (F.mse_loss, (ramp(3, 4), ramp(3, 4) + 0.3)),
    "smooth losses": (lambda x, y: F.smooth_l1_loss(x, y) + F.huber_loss(x, y), (ramp(3, 4), ramp(3, 4) + 0.3)),
    "binary cross entropy": (
        lambda x, y: F.binary_cross_entropy_with_logits(x.view(-1), y.view(-1)),
        (ramp(2, 5), (ramp(2, 5) > 0).float()),
    ),
    "kl": (kl, (ramp(3, 4), ramp(4, 3).t() + 0.1)),
    "glu": (lambda x, w: F.glu((x.view(-1, 6) @ w).view(2, 5, 8), -1), (ramp(2, 5, 6), ramp(6, 8))),
    "layer norm": (lambda x, w: F.layer_norm(x, (4,), w, w + 1), (ramp(2, 3, 4), ramp(4))),
    "rms norm": (lambda x, w: F.rms_norm(x, (8,), w), (ramp(2, 3, 8), ramp(8))),
    "group norm": (lambda x, w: F.group_norm(x, 2, w, w + 1), (ramp(2, 4, 3, 3), ramp(4))),
    "instance norm": (lambda x, w: F.instance_norm(x, weight=w, bias=w + 1), (ramp(2, 4, 3, 3), ramp(4))),
    "variance": (lambda x: x.var(1) + x.std(1) + x.mean(1) + x.var(), (ramp(4, 6),)),
    "log sum exp": (lambda x: x.view(-1, 3).logsumexp(1).view(2, 4), (ramp(2, 4, 3),)),
    "roll": (lambda x: torch.roll(x, (1, -2), (1, 2)) + x.roll(3), (ramp(2, 4, 5),)),
    "rolled flattened": (lambda x: x.view(2, 12, 3).roll((1, 1), (2, 0)).sin().flip(1), (ramp(2, 4, 3, 3),)),
    "pixels shuffled": (lambda x: F.pixel_shuffle(x, 2) * 2, (ramp(2, 8, 3, 5),)),
    "pixels put back": (lambda x: F.pixel_unshuffle(x, 3) * 2, (ramp(2, 2, 6, 3),)),
    "channels shuffled": (lambda x: F.channel_shuffle(x, 3) * 2, (ramp(2, 6, 2, 3),)),
    "repeat": (lambda x: x.repeat(2, 1, 3), (ramp(2, 3),)),
    "written slices": (written_slices, (ramp(2, 4), ramp(2, 2))),
    "triangle": (lambda x: x.masked_fill(torch.ones(3, 3).tril() == 0, -1e9).softmax(-1), (ramp(2, 3, 3),)),
    "unbind": (lambda x: torch.stack([y * i for i, y in enumerate(x.unbind(1))], 0), (ramp(2, 3),)),
    "small products": (small_products, (ramp(3), ramp(4))),
    "bias": (lambda x, w, b: torch.baddbmm(b, x, w, beta=2, alpha=3), (ramp(2, 3, 4), ramp(2, 4, 5), ramp(5))),
}  # fmt: skip
