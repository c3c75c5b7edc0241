"""Rows that a mask chose, sorted, by their numbers and in parts, and written: as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.running import check
from tests.capture.test_rows import Model, call


def dispatched(m: Model, h: Tensor, y: Tensor) -> Any:
    """As davidmrau's mixture of experts: sorted by the expert, and added up."""
    tokens = h.reshape(-1, 8)
    top, chosen = m.head(tokens)[:, :3].softmax(-1).topk(2)
    gates = torch.zeros_like(tokens[:, :3]).scatter(1, chosen, top)
    ids, order = torch.nonzero(gates).sort(0)
    expert = ids.split(1, dim=1)[1]
    rows = torch.nonzero(gates)[order[:, 1], 0]
    sizes = (gates > 0).sum(0).tolist()
    kept = torch.gather(gates[rows.flatten()], 1, expert)
    outputs = [e(part) for e, part in zip(m.experts, tokens[rows].squeeze(1).split(sizes), strict=True)]
    added = torch.zeros(tokens.shape[0], outputs[-1].size(1)).index_add(0, rows, torch.cat(outputs).mul(kept))
    return added, sum(part.mean() for part in kept.split(sizes))


def chosen_in_order(m: Model, h: Tensor, y: Tensor) -> Any:
    """Sorted rows, back in their order, and by their numbers."""
    rows = h[m.head(h).argmax(-1) > 1]
    values, order = rows.sort(0, descending=True)
    back = rows[rows[:, 0].argsort()][rows[:, 0].argsort().argsort()]
    last = rows[-2:].sum(0) + rows[1:-1].square().sum(0) + rows[:3][order[-1:, 0] * 0].sum(0)
    same = (rows[:, 1][order[:, 1]] == values[:, 1]).sum()
    among = torch.where(rows[:, 0] > 0)[0]
    ends = rows.amax(0) + rows.amin() + (rows.cumsum(0) * rows).sum(0) + rows[among].sum(0)
    first = torch.zeros_like(h[0]).index_add(0, among[:1], rows[among[:1]])
    return (values[:, :1] * rows).sum(0), (back * rows).sum(0), last, same, ends, first


def written_by_length(m: Model, h: Tensor, y: Tensor) -> Any:
    """As DeepSeek's own code takes the lengths, by numpy; and parts that are written."""
    tokens, ids = h.reshape(-1, 8) * 1, (m.head(h).argmax(-1).reshape(-1) + torch.arange(12)) % 3
    counts = ids.bincount(minlength=3)
    ends, order = counts.cpu().numpy().cumsum(0), ids.argsort(stable=True)
    added, moved, rows = torch.zeros(12, 8), torch.zeros_like(tokens), tokens[order]
    for e, end in enumerate(ends):
        start = 0 if e == 0 else ends[e - 1]
        if start == end:
            continue
        here = order[start:end]
        each = m.experts[e](tokens[here]).to(tokens.dtype)
        with torch.no_grad():
            added.scatter_reduce_(0, here.view(-1, 1).repeat(1, 8), each, reduce="sum")
        moved[start:end] = each
        moved[start:end] += 1.0
    start, first = 0, rows[: counts.tolist()[0]]
    for e, count in enumerate(counts.tolist()):
        rows[start : start + count].mul_(e + 1.0)
        start += count
    return added, moved, rows, first.square().sum()


def written_views(m: Model, h: Tensor, y: Tensor) -> Any:
    """What is written to a view of chosen rows is in them, and in the rows of which they are a part."""
    keep = m.head(h)[..., 0] > 0
    rows, ones = m.head(h)[keep], h[keep] + 1
    rows.T.mul_(2)
    rows[:, 1:3] = ones[:, :2]
    rows[:, 0] = 0.5
    rows.unsqueeze(1).flatten(0, 1)[:, 3].exp_()
    ones.narrow(1, 4, 4).add_(rows[:, :4]).relu_()
    kinds = m.head(h).argmax(-1).reshape(-1)
    whole, end = h.reshape(-1, 8)[kinds.argsort()], 0
    for count in kinds.bincount(minlength=5).tolist():
        part, end = whole[end : end + count], end + count
        part.mT.mul_(3)
        part[:, 2:4].neg_()
        part[:, 4] = part[:, 5]
    return rows.sum(0), ones.sum(0), whole


def written_over(m: Model, h: Tensor, y: Tensor) -> Any:
    """Rows that are filled, and those of which a mask says that they are written."""
    rows = h[m.head(h)[..., 0] > 0]
    made = torch.empty_like(rows)
    made.copy_(rows).T.add_(1)
    made[made[:, 0] > 1] *= 3.0
    made[made > 4] = 0.5
    made[:, 7].zero_()
    made[..., 6].fill_(2.0)
    made[:, :2].copy_(rows[:, 1:2])
    return made.square().sum(0)


@pytest.mark.parametrize(
    "rest",
    [dispatched, chosen_in_order, written_by_length, written_views, written_over],
    ids=lambda rest: rest.__name__,
)
def test_values_and_gradients_are_torchs(rest: Callable[..., Any]) -> None:
    check(Model(rest), *call())
