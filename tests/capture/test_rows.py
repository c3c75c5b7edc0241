"""Rows that a mask chooses: what a graph of fixed shape computes is what torch does, or an error at the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import MeshSpec, find_plan, verify
from cost_model.errors import CaptureError
from passes.capture import capture
from tests.capture.running import check


class Model(nn.Module):
    """A linear, then any function of (module, hidden [4, 3, 8], labels [4, 3] from -1 to 4)."""

    def __init__(self, rest: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.token = nn.Parameter(torch.randn(8))
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.rest = rest

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.rest(self, self.first(x), labels)


def token(m: Model, h: Tensor, y: Tensor) -> Tensor:
    h = h.clone()
    h[y < 0] = m.token
    h[y == 3, :4] = m.token[:4]
    h[:, y[0] == 0] = m.token
    return h


def class_loss(m: Model, h: Tensor, y: Tensor) -> Tensor:
    keep, z = y >= 0, m.head(h)
    loss = F.cross_entropy(m.head(h[keep]), y[keep]) + F.cross_entropy(
        z[y != -1], y[y != -1], label_smoothing=0.1
    )
    flat, labels = z.view(-1, 5), y.view(-1)
    return loss + F.nll_loss(F.log_softmax(flat[labels > 0], -1), labels[labels > 0], reduction="sum")


def selected(m: Model, h: Tensor, y: Tensor) -> Tensor:
    some = torch.masked_select(h, (y > 0).unsqueeze(-1))
    return h.masked_select(h > 0).mean() + h[h > 0.1].log().sum() + some.sum()


def counted(m: Model, h: Tensor, y: Tensor) -> Tensor:
    keep = y > 0
    d = h[keep] - m.token
    mse = F.mse_loss(h[keep], h[keep].detach() * 2)
    return mse + d.norm(dim=-1).mean() + (d**2).sum() / d.shape[0] + d.sum() / d.numel()


def nothing_chosen(m: Model, h: Tensor, y: Tensor) -> Tensor:
    return m.head(h[y > 9]).sum() + h.sum()


def infinite_elsewhere(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """Neither values nor gradients of the rows that are left out reach anything."""
    keep = y > 0
    x = torch.where(keep.unsqueeze(-1), h, float("nan"))
    roots = ((x[keep] - m.token).square().sum(-1)).sqrt().mean()
    return F.softplus(m.experts[0](x[keep])).sqrt().mean() + roots


def in_place(m: Model, h: Tensor, y: Tensor) -> Tensor:
    z = m.experts[0](h[y > 0])
    z += m.token
    z = F.dropout(F.relu(z * 1, inplace=True) * 2, 0.0, True, True)
    out = torch.zeros_like(h)
    out[y > 0] = z
    out[y > 0] += h[y > 0] * 2
    return out


def experts(m: Model, h: Tensor, y: Tensor) -> Tensor:
    z, routed = h.reshape(-1, 8), y.reshape(-1)
    weight, out = torch.softmax(m.head(z), -1), torch.zeros_like(z)
    for e, layer in enumerate(m.experts):
        (i,) = torch.where(routed == e)
        out.index_add_(0, i, layer(z[i]) * weight[i, e, None])
        j = (routed == e).nonzero().squeeze(-1)
        out = out.index_add(0, j, F.gelu(layer(z[j])))
    return out


def experts_hit(m: Model, h: Tensor, y: Tensor) -> Tensor:
    z, weights = h.reshape(-1, 8), torch.stack([layer.weight for layer in m.experts])  # type: ignore[misc]
    out = torch.zeros_like(z)
    routed = F.one_hot(y.reshape(-1) + 1, 6).permute(1, 0)
    for e in torch.greater(routed.sum(-1), 0).nonzero():
        e = e[0]
        if e >= 3:
            continue
        (i,) = torch.where(routed[e])
        out.index_add_(0, i, F.linear(z[i], weights[e]))
    for e in routed[:3].sum(-1).gt(0).nonzero().flatten():
        (i,) = torch.where(routed[e])
        out.index_add_(0, i, m.experts[e](z[None, i].reshape(-1, z.shape[-1])))  # pyright: ignore
    return out


def their_number(m: Model, h: Tensor, y: Tensor) -> Any:
    """What is not done row by row takes as many rows as this call has."""
    rows, (i, j) = h[y > 0], torch.where(y < 0)
    out = torch.zeros_like(h)
    out[torch.arange(len(i)), 0] = h[i, j]
    out[1, y[1] > 0] = torch.cat([rows[:1], m.token.unsqueeze(0)])
    ends = torch.cat([torch.sort(rows, 0)[0], out.reshape(-1, 8), h[:, y[0] > 0].flatten(0, 1)])
    return (
        ends,
        rows * len(rows),
        (h[y > 0] * h[y > 1].repeat(2, 1)[:7]).sum(),
        rows[rows[:, 0] > 0].shape[0] * h,
        h[None, i, j] * 2,
        h[None, i, j].flatten(0, 1).sum(0),
    )


def written(m: Model, h: Tensor, y: Tensor) -> Any:
    """Rows that have been counted are written like others."""
    rows, others, more = h[y > 0], h[y > 1] * 2, h[y > 2] + 1
    rows[0].zero_()
    others.diagonal().mul_(2)
    others[1:3] = m.token
    others += 1
    more[1] += 1
    return rows, others.sum(), rows[:, 0].exp().mean(), more


def values_in_places(m: Model, h: Tensor, y: Tensor) -> Tensor:
    """As many as there are places, of which a call that has others is told."""
    h, keep = h.clone(), h.detach().sum(-1) > -1e6
    h[keep] = m.first.weight[:, :1].T.repeat(12, 1) * torch.arange(12).unsqueeze(-1)
    h.transpose(0, 2)[:, 1, y[:, 0] >= 0] = m.first.weight[:, :3]
    return h


def mask_changed(m: Model, h: Tensor, y: Tensor) -> Tensor:
    keep = y > 0
    old = h.detach()[keep]
    keep[0] = False
    return old.sum() + h[keep.clone()].sum()


def sizes(m: Model, h: Tensor, y: Tensor) -> Any:
    """Results whose sizes are values of the call."""
    times = y[:, 0].clamp(0)
    repeated = (
        h.repeat_interleave(times, 0),
        torch.repeat_interleave(times),
        h[1, :, 0].repeat_interleave(y[3] + 1),
    )
    values, inverse = torch.unique_consecutive(y.reshape(-1), return_inverse=True)
    pair = torch.tensor([y.max() - 1, 2]), torch.tensor([[h.detach()[0, 0, 0]], [1.0]], dtype=torch.float64)
    return *repeated, values, inverse, y.unique(), *pair, h * int(np.asarray(y).max())


def lengths(m: Model, h: Tensor, y: Tensor) -> Any:
    """`len()`, as Python's own, of rows that only the weights say."""
    flat, high = h.reshape(-1, 8), m.head(h)[..., 0].reshape(-1)
    out, some = torch.zeros_like(flat), h[m.head(h)[..., 0] > 0]
    for keep in (high > high.mean(), high <= high.mean()):
        if len(flat[keep]) == 0 or not len(torch.where(keep)[0]):
            continue
        rows = flat[keep]
        out[keep] = rows * (len(rows) / len(flat))
    counts = h.new_tensor([len(h[h > 0]), 2])
    return out, some.sum() / max(len(some), 1), h * len(h[h > 0]), counts


def written_at_rows(m: Model, h: Tensor, y: Tensor) -> Any:
    """As Mixtral's and DeepSeek's own code adds what an expert makes of its rows, and others write it."""
    flat, kinds = h.reshape(-1, 8), y.reshape(-1)
    out, copied, added, summed = (torch.zeros_like(flat) for _ in range(4))
    for e, expert in enumerate(m.experts):
        rows, _ = torch.where(y.reshape(-1, 1) == e)
        out[rows] += expert(flat[rows]) * flat[rows, 0, None]
        places = (kinds == e).nonzero().squeeze(-1)
        copied.index_copy_(0, places, expert(flat.index_select(0, places)))
        wide = places.unsqueeze(-1).expand(-1, 8)
        added = added.scatter_add(0, wide, expert(flat.gather(0, places.view(-1, 1).repeat(1, 8))))
        summed[kinds == e] = expert(flat[kinds == e]).to(summed.dtype).mul_(2)
    grid = torch.zeros_like(h)
    i, j = torch.where(y > 0)
    grid[i, j] = m.token
    grid[y.view(-1).view(4, 3) == 3] += h[y == 3]
    return out, copied, added, summed, grid


def written_at_other_places(m: Model, h: Tensor, y: Tensor) -> Any:
    """Of several for one place the last counts; places that are computed."""
    rows, columns = torch.where(y >= 0)
    last, first = (torch.zeros(4, 8) for _ in range(2))
    last[rows] = h.detach()[rows, columns]
    order, keep = y.reshape(-1).argsort(stable=True), y.reshape(-1) > 0
    moved = torch.zeros_like(h).reshape(-1, 8)
    moved[order[keep] - 12] = h.reshape(-1, 8)[keep]
    first[torch.where(y.T == 4)[1]] = 1.0
    return last * h.sum(), moved, first * h.sum()


def codes_replaced(m: Model, h: Tensor, y: Tensor) -> Any:
    """As codes of a VQ-VAE that few use become rows of the batch: as many as a mask counts, where it chooses."""
    flat, codes = h.reshape(-1, 8), m.token * torch.arange(5.0)[:, None]
    dead = F.one_hot(m.head(flat).argmax(-1), 5).sum(0) < 3
    sampled = flat[: dead.sum().item()].to(codes.double())
    codes = codes.double()
    codes[dead] = sampled
    return codes * sampled.new_full((5, 1), 2.0)


def parts_of_computed_lengths(m: Model, h: Tensor, y: Tensor) -> Any:
    """Rows sorted by an expert that is computed, in parts as long as there are of each."""
    tokens = h.reshape(-1, 8)
    weights, chosen = m.head(tokens)[:, :3].softmax(-1).topk(2)
    ids = chosen.reshape(-1)
    order, counts = ids.argsort(stable=True), torch.bincount(ids, minlength=3)
    rows, lengths = tokens[order // 2], counts.tolist()
    parts = rows[: sum(lengths)].split(lengths)
    split = torch.cat([expert(part) for expert, part in zip(m.experts, parts, strict=True)])
    sliced, outputs, added, start = torch.empty_like(split), [], torch.zeros_like(tokens), 0
    for count, expert in zip(lengths, m.experts, strict=True):
        end = start + count
        if count == 0:
            continue
        outputs.append(expert(rows[start:end]))
        start = end
    sliced[order] = torch.cat(outputs)
    ends = counts.cumsum(0)
    for e, expert in enumerate(m.experts):
        first, last = 0 if e == 0 else ends[e - 1].item(), ends[e].item()
        if first == last:
            continue
        here = order[first:last]
        added.index_add_(0, here // 2, expert(tokens[here // 2]) * weights.reshape(-1)[here, None])
    return split, sliced.view(-1, 2, 8).sum(1), added


EXACT = [
    token, class_loss, selected, counted, nothing_chosen, infinite_elsewhere, in_place, experts, experts_hit,
    their_number, written, values_in_places, mask_changed, sizes, lengths, written_at_rows,
    written_at_other_places, codes_replaced, parts_of_computed_lengths,
]  # fmt: skip


def call() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 3, 6), torch.tensor([[0, -1, 2], [3, 4, -1], [1, 1, 2], [-1, 0, 3]])


@pytest.mark.parametrize("rest", EXACT, ids=lambda rest: rest.__name__)
def test_values_and_gradients_are_torchs(rest: Callable[..., Tensor]) -> None:
    check(Model(rest), *call())


def small(m: Model, h: Tensor, y: Tensor) -> Tensor:
    h = h.clone()
    h[y < 0] = m.token
    ends = torch.cat([h[y > 0], m.token.unsqueeze(0)])
    return F.cross_entropy(m.head(h[y >= 0]), y[y >= 0]) + ends.square().sum()


def counted(m: Model, h: Tensor, y: Tensor) -> Any:
    chosen = h[y > 0]
    return chosen.sum(), {"rows": chosen.shape[0], "several": [chosen.shape[0] > 1]}


@pytest.mark.parametrize(
    "rest", [small, counted, pytest.param(parts_of_computed_lengths, marks=pytest.mark.slow)]
)
def test_plans_compute_the_same(rest: Callable[..., Any]) -> None:
    model, given = Model(rest), call()
    plan = find_plan(model, MeshSpec({"x": 2}), given, profile="cpu", refine="off", backend="eager")
    assert verify(model, plan, given).ok


def returned(m: Model, h: Tensor, y: Tensor) -> Any:
    return h[h > 0]


def running(m: Model, h: Tensor, y: Tensor) -> Any:
    return torch.cummax(h[h.sum(-1) > 0], 0)[0].sum()


def array(m: Model, h: Tensor, y: Tensor) -> Any:
    return h * float(h.detach().numpy().sum())


def shared(m: Model, h: Tensor, y: Tensor) -> Any:
    rows = h[y > 0]
    part = rows[:, :2]
    rows[0].zero_()
    return part


def part_by_number(m: Model, h: Tensor, y: Tensor) -> Any:
    rows = h[m.head(h)[..., 0] > 0]
    rows[:2].mul_(3)
    return rows.sum()


def shared_in_place(m: Model, h: Tensor, y: Tensor) -> Any:
    rows = h[y > 0]
    part = rows[:, :2]
    rows.erfinv_()
    return part.sum()


def two_masks(m: Model, h: Tensor, y: Tensor) -> Any:
    return (h[h > 0] * h[h < 1]).sum()


def in_one_batch(m: Model, h: Tensor, y: Tensor) -> Any:
    return h[:, 0][None, torch.where(m.head(h)[:, 0, 0] > 0)[0]][:, 0].sum()


def count_in_loop(m: Model, h: Tensor, y: Tensor) -> Any:
    count = 0
    for _ in (y.sum(-1) > 0).nonzero():
        count += 1
    return h * count


def write_in_loop(m: Model, h: Tensor, y: Tensor) -> Any:
    h = h + 0
    for e in (y.sum(-1) > 0).nonzero().flatten():
        h[e] = 1
    return h


def left_loop(m: Model, h: Tensor, y: Tensor) -> Any:
    for _ in (y.sum(-1) > 0).nonzero():
        break
    return h


def part_of_the_parts(m: Model, h: Tensor, y: Tensor) -> Any:
    rows, counts = h.reshape(-1, 8), m.head(h).argmax(-1).reshape(-1).bincount(minlength=5).tolist()
    return torch.cat([m.experts[0](part) for part in rows.split(counts)[1:]])


def as_many_as_counted(m: Model, h: Tensor, y: Tensor) -> Any:
    counts = m.head(h).argmax(-1).reshape(-1).bincount(minlength=5).tolist()
    return h.sum() + torch.arange(counts[0]).sum()


def more_than_so_many(m: Model, h: Tensor, y: Tensor) -> Any:
    counts = m.head(h).argmax(-1).reshape(-1).bincount(minlength=5).tolist()
    return h * 2 if counts[0] > 3 else h


REFUSED = [
    (returned, 1, "rows that a mask chooses are returned"),
    (running, 1, "what cummax makes of the rows"),
    (array, 1, "the value of a tensor decides"),
    (shared, 1, "share memory"),
    (shared_in_place, 3, "what erfinv_ makes"),
    (part_by_number, 2, "what mul_ makes"),
    (two_masks, 1, "one mask for both"),
    (in_one_batch, 1, "taken by their number"),
    (count_in_loop, 2, "the body of a loop"),
    (write_in_loop, 3, "the body of a loop"),
    (left_loop, 1, "left by break"),
    (part_of_the_parts, 2, "rows that a mask chooses are returned"),
    (as_many_as_counted, 2, "the value of a tensor decides"),
    (more_than_so_many, 2, "the value of a tensor decides"),
]


def check_refused(rest: Callable[..., Any], offset: int, text: str, file: str) -> None:
    """At the line so far behind the first of `rest`."""
    with pytest.raises(CaptureError, match=r"\n  try: ") as caught:
        capture(Model(rest), call(), {})
    assert text in str(caught.value)
    assert f"{file}:{rest.__code__.co_firstlineno + offset}, in {rest.__name__}" in str(caught.value)


@pytest.mark.parametrize(("rest", "offset", "text"), REFUSED, ids=[r[0].__name__ for r in REFUSED])
def test_what_is_not_known_is_an_error_at_the_line(rest: Callable[..., Any], offset: int, text: str) -> None:
    check_refused(rest, offset, text, "test_rows.py")
