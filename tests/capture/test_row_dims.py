"""Chosen rows as a sequence, turned and in another shape, what is done over them, and rows one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.running import check
from tests.capture.test_rows import Model, call, check_refused


def _turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions, as Transformers computes them."""
    angles = (
        torch.ones(1, 2, 1).expand(positions.shape[0], -1, 1) @ positions[:, None, :].float()
    ).transpose(1, 2)
    turn = torch.cat((angles, angles), dim=-1)[:, None]
    half = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)
    return x * turn.cos() + half * turn.sin()


def _block(m: Model, x: Tensor, positions: Tensor) -> tuple[Tensor]:
    """Two heads of queries and one of keys."""
    batch, length, width = x.shape
    q = m.experts[0](F.layer_norm(x, (width,))).view(batch, length, 2, 4).transpose(1, 2)
    k, v = m.experts[1](x).view(batch, length, 2, 4).permute(2, 0, 1, 3)
    shared = [one[:, None].expand(batch, 2, one.shape[1], 4) for one in (k, v)]
    y = F.scaled_dot_product_attention(
        _turned(q, positions), _turned(shared[0], positions), shared[1], is_causal=True
    )
    return (x + m.experts[2](y.transpose(1, 2).contiguous().reshape(batch, length, width)),)


def mixture_of_depths(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """A block of the tokens with a weight above a threshold."""
    weights = m.head(h)[..., 0]
    chosen = weights > weights.mean(1, keepdim=True)
    places, out = torch.arange(3).expand(4, -1), torch.zeros_like(h)
    for i in range(4):
        keep = chosen[i]
        tokens = h[i][chosen[i]]
        if tokens.size(0) > 0:
            made = _block(m, tokens.unsqueeze(0), places[i][keep].unsqueeze(0))
            out[i][keep] = made[0] * weights[i][keep].unsqueeze(-1)
    return out + h * (~chosen).unsqueeze(-1)


def encoded(m: Any, h: Tensor, y: Tensor) -> Tensor:
    """By a layer of torch's own."""
    keep = m.head(h).argmax(-1) != 2
    made = [m.layer(h[i, keep[i]].unsqueeze(0)).squeeze(0) for i in range(4)]
    return torch.cat([one.sum(0) for one in made])


class Encoder(Model):
    def __init__(self) -> None:
        super().__init__(encoded)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def test_a_layer_of_torchs() -> None:
    check(Encoder(), *call())


def pooled(m: Model, h: Tensor, y: Tensor) -> Any:
    """Queries that are always there, and what rows say over all of them. Of no row, too."""
    flat, keep = h.reshape(-1, 8), m.head(h).argmax(-1).reshape(-1)
    rows, none = flat[keep != 2], flat[keep > 9]
    seen = F.scaled_dot_product_attention(m.head.weight[None, :2], rows[None], m.experts[1](rows)[None])
    shares = m.experts[2](rows)[:, :1].softmax(0)
    spread = (
        (rows * torch.arange(8.0)).std(0)
        + rows.var(0, unbiased=False)
        + rows.var(1, keepdim=True).sum()
        + rows.std()
    )
    ends = [
        *rows.max(0),
        *rows[None].max(1, keepdim=True),
        rows.softmax(0, torch.float64).sum(0),
        *rows.min(dim=0),
        rows.max(),
        rows[:, 3].argmin(),
        rows.argmax(1).sum(),
    ]
    logs = rows.log_softmax(0).sum(0) + torch.logsumexp(rows, 0) + rows.logsumexp((0, 1))
    return seen, (shares * rows).sum(0), spread, *ends, logs, none.softmax(0).sum() + h.sum()


def pairs(m: Model, h: Tensor, y: Tensor) -> Any:
    """Attention by hand, with masks of places and of pairs."""
    found = []
    for x, keep in zip(h.transpose(0, 1), (m.head(h).argmax(-1) != 2).t(), strict=True):
        rows, places = x[keep], torch.arange(4)[keep]
        q, k, v = (layer(rows) for layer in m.experts)
        scores = q @ k.transpose(-1, -2) / 8**0.5 + (places[:, None] - places).abs() * m.token[0]
        causal = places.unsqueeze(1) >= places.unsqueeze(0)
        one = F.dropout(scores.masked_fill(~causal, float("-inf")).softmax(-1), 0.0) @ v
        heads = [part.unflatten(-1, (2, 4)).transpose(0, 1) for part in (q, k, v)]
        two = torch.softmax(heads[0] @ heads[1].mT, dim=2, dtype=torch.float64).to(x.dtype) @ heads[2]
        more = torch.full((4, 4), float("-inf")).triu(1)[keep][:, keep]
        three = [
            F.scaled_dot_product_attention(*heads, attn_mask=mask)
            for mask in (more.unsqueeze(0), causal, more[None])
        ]
        memory = F.elu(k).t() @ v
        out = torch.zeros_like(x)
        out[keep] = one + rows @ memory
        found.append(out)
        found += [(two.transpose(0, 1).flatten(1) * rows).sum(0), sum(part.sum((0, 1)) for part in three)]
    return found


def moved(m: Model, h: Tensor, y: Tensor) -> Any:
    rows = h[m.head(h).argmax(-1) != 2]
    back = rows.t().unsqueeze(0).transpose(1, 2).squeeze(0)
    parts = rows.view(rows.shape[0], 2, -1).permute(1, 0, 2)
    stacked = torch.stack([parts, parts * 2], 1)[:, :, :, None]
    one = (
        rows[None].flatten(0, 1)
        + rows[:, None].expand(-1, 3, -1).sum(1)
        + rows.unflatten(1, (4, 2)).flatten(1)
    )
    two = (
        rows[None, :, :4].chunk(2, -1)[1].repeat(2, 1, 1).mean(-1).sum(1)
        + parts.amax((1, 2))
        + parts.sum((0, 1, 2))
    )
    return (
        (back * rows).sum(0),
        stacked.mean((1, 3)).square().sum(1),
        (one * rows).sum(0),
        two,
        parts[1].sum(0),
    )


def products(m: Model, h: Tensor, y: Tensor) -> Any:
    """By einsum and torch's other names, of rows, of rows and all rows, and summed over them."""
    keep = m.head(h)[..., 0] > 0
    rows, weights = h[keep], torch.stack([layer.weight for layer in m.experts])  # type: ignore[misc]
    own = weights.repeat(4, 1, 1).unflatten(0, (4, 3))[keep]
    alike = torch.einsum("nd, md -> nm", F.normalize(rows, dim=-1), F.normalize(rows.detach(), dim=-1))
    found = (
        torch.einsum("nd,edf->enf", rows, weights).tanh().sum(1),
        torch.einsum("nd,ndf->nf", rows, own).square().mean(0),
        torch.einsum("nd,nf->df", rows, rows.exp()),
        torch.bmm(rows.unsqueeze(1), own).squeeze(1).sum(0),
        torch.addmm(m.token, rows.mm(weights[0]), weights[1], beta=2, alpha=0.5).square().mean(0),
        torch.cdist(rows, weights[0]).amin(1).mean(),
        F.group_norm(rows, 2).tanh().sum(0) + F.prelu(rows, m.token[:1]).prod(0),
        rows.cumprod(0).sum(),
    )
    return (
        *found,
        F.cross_entropy(alike * 2, torch.arange(len(rows))),
        (alike.logsumexp(1) - alike.diag()).mean() + alike.amax(-1, keepdim=True).sum(),
        (rows[torch.randperm(len(rows))] * rows.mean(0)).square().sum()
        + (rows * torch.rand(len(rows), 1) * 0).sum(),
        torch.zeros(len(keep) * 2, dtype=h.dtype).scatter(0, torch.where(keep)[0], rows[:, 1]),
    )


def as_written_in_python(m: Model, h: Tensor, y: Tensor) -> Any:
    """Functions of torch that are written in Python; those of a batch; weights of attention."""
    keep = m.head(h)[..., 0] > 0
    rows, weights = h[keep], torch.stack([layer.weight for layer in m.experts])  # type: ignore[misc]
    joined, bias = weights.flatten(0, 1), weights.new_zeros(24)
    attend: Any = F.multi_head_attention_forward
    attended, seen = attend(
        *[rows.unsqueeze(1)] * 3, 8, 2, joined, bias, None, None, False, 0.0, weights[0], None
    )
    lines = rows.view(len(rows), 2, 4)
    pooled = F.max_pool1d(F.conv1d(lines, weights[0, :, :6].view(8, 2, 3)), 2)
    return (
        F.gaussian_nll_loss(rows, rows.sin(), torch.ones_like(rows)),
        pooled.sum(0),
        attended.squeeze(1).sum(0),
        seen.amax(-1).sum(),
    )


def made_by_number(m: Model, h: Tensor, y: Tensor) -> Any:
    """Of as many as there are rows; the largest of them; and their values in other places."""
    keep = m.head(h)[..., 0] > 0
    rows = h[keep]
    n = rows.shape[0]
    zeros, ones = torch.zeros(n, 8, dtype=rows.dtype), rows.new_ones((n, 1))
    classes = F.cross_entropy(rows, torch.full((len(rows),), 2))
    numbers = torch.arange(n)[:, None] * rows + torch.eye(n) @ rows
    value, place = rows.sum(-1).topk(2)
    flat, where = h.reshape(-1, 8), torch.argwhere(keep.reshape(-1))[:, 0]
    put = torch.zeros_like(flat).index_put((where,), rows, accumulate=True)
    return (
        ((rows + zeros) * ones + m.token.expand(n, -1)).square().mean(0),
        *(classes, numbers.sum(0), value, rows[place], put, rows.sum(-1).topk(1, largest=False)[0]),
        h.masked_scatter(keep.unsqueeze(-1), rows * 2)
        + torch.ones_like(h).masked_scatter_(keep[..., None], -rows),
    )


def seen_as_rows(m: Model, h: Tensor, y: Tensor) -> Any:
    """What a mask along the first dims selects, as rows of the last."""
    keep = m.head(h)[..., 0] > 0
    some = torch.masked_select(m.head(h), keep.unsqueeze(-1)).view(-1, 5)
    loss = F.cross_entropy(some, torch.masked_select(y.clamp(0), keep))
    lone = h.masked_select(m.head(h)[..., :1] > 0).reshape(-1, 2, 4)
    few = h.masked_select((h > 0)[..., :1]).view(-1, 8).sum(0) * h[h > 0].sum()
    return loss, lone.exp().mean((0, 1)), few, some.softmax(0).amax(0)


def one_after_another(m: Model, h: Tensor, y: Tensor) -> Any:
    """Rows of two masks, and others, as one list; what is not there may be 0 times what is."""
    first, second = (torch.where(m.head(h).argmax(-1).reshape(-1) % 2 == e)[0] for e in range(2))
    flat = h.reshape(-1, 8)
    made = torch.cat([m.experts[0](flat[first]), torch.zeros_like(flat[second]) + m.token])
    out = torch.empty_like(flat)
    out[torch.cat([first, second])] = made
    counts = m.head(h).argmax(-1).reshape(-1).bincount(minlength=5).tolist()
    later = torch.cat([m.experts[1](part) for part in flat.split(counts)[1:]])
    wide = torch.cat([flat[first], flat[first] * 2], -1)
    return out, later.square().mean(), torch.cat([flat[second], h[0], m.token[None]]).std(0), wide.sum(0)


EXACT = [
    mixture_of_depths,
    pooled,
    pairs,
    moved,
    products,
    as_written_in_python,
    made_by_number,
    seen_as_rows,
    one_after_another,
]


@pytest.mark.parametrize("rest", EXACT, ids=lambda rest: rest.__name__)
def test_values_and_gradients_are_torchs(rest: Callable[..., Any]) -> None:
    check(Model(rest), *call())


def with_a_mask(m: Model, h: Tensor, y: Tensor) -> Tensor:
    rows = h[0][m.head(h[0])[:, 0] > 0][None]
    return F.scaled_dot_product_attention(rows, rows, rows, attn_mask=torch.ones(1, 1)).sum()


def joined_with_a_dim(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return h[m.head(h)[..., 0] > 0].view(-1).sum() + h[m.head(h)[..., 0] > 0][None].view(-1, 4).sum()


def mixed(m: Model, h: Tensor, y: Tensor) -> Tensor:
    rows = h[m.head(h)[..., 0] > 0]
    return (rows * torch.ones(3, 8)).sum()


def part_of_a_sequence(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return h[m.head(h)[..., 0] > 0][None][:, 1:].sum()


def product_of_all(m: Model, h: Tensor, y: Tensor) -> Tensor:
    rows = h[m.head(h)[..., 0] > 0]
    return (rows @ rows.t()).sum()


REFUSED = [
    (with_a_mask, 2, "attention with a mask of them"),
    (joined_with_a_dim, 1, "what reshape makes"),
    (mixed, 2, "mul of them and of a tensor"),
    (part_of_a_sequence, 1, "taken by their number"),
    (product_of_all, 2, "what sum makes"),
]


@pytest.mark.parametrize(("rest", "offset", "text"), REFUSED, ids=[r[0].__name__ for r in REFUSED])
def test_what_is_not_known_is_an_error_at_the_line(rest: Callable[..., Any], offset: int, text: str) -> None:
    check_refused(rest, offset, text, "test_row_dims.py")
