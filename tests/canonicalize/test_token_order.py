"""Rows that a model sorts by expert are computed in the order of their tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.canonicalize import canonicalize
from passes.capture import capture
from tests.canonicalize.graphs import assert_same, ops
from tests.capture.running import tensors_of


def _counted(ids: Tensor) -> Tensor:
    return torch.bincount(ids, minlength=4)


def _one_hot(ids: Tensor) -> Tensor:
    return F.one_hot(ids, 4).sum(0)


def _histc(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=4, min=0, max=3)


def _capped(ids: Tensor) -> Tensor:
    """Not the sizes of the groups where one has more than 8."""
    return _one_hot(ids).clamp(max=8)


class Experts(nn.Module):
    """Two experts of four for each token, as Transformers and others write it."""

    def __init__(
        self,
        count: Callable[[Tensor], Tensor] = _one_hot,
        back: str = "argsort",
        across: bool = False,
        unsorted: bool = False,
    ) -> None:
        super().__init__()
        self.count, self.back, self.across, self.unsorted = count, back, across, unsorted
        self.router = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 8, 6) / 4)
        self.down = nn.Parameter(torch.randn(4, 6, 8) / 4)
        self.bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        weights, experts = self.router(tokens).softmax(-1).topk(2)
        sorted_ids, order = experts.reshape(-1).sort()
        counted = experts.flatten() if self.unsorted else sorted_ids
        ends = self.count(counted).cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(tokens[order // 2], self.up, offs=ends) + self.bias[sorted_ids]
        hidden = hidden.cumsum(0) if self.across else hidden
        y = F.grouped_mm(hidden.relu(), self.down, offs=ends) * weights.reshape(-1)[order, None]
        if self.back == "added":
            out = torch.zeros_like(tokens).index_add(0, order // 2, y)
        else:
            inverse = order.argsort()
            if self.back == "put":
                inverse = torch.empty_like(order)
                inverse[order] = torch.arange(order.shape[0])
            out = y[inverse].view(-1, 2, 8).sum(1)
        return out.view(x.shape)


def _canonical(model: nn.Module) -> tuple[Counter[str], list[tuple[int, ...]]]:
    """The ops of the canonical graph, which computes the same, and the shapes of its products with experts."""
    torch.manual_seed(0)
    x = torch.randn(3, 7, 8, requires_grad=True)
    joint = capture(model, (x,), {}).joint
    canonical = canonicalize(joint)
    state = tensors_of(model)
    values = [
        state[given.name] if given.kind == "param" else x for given in joint.inputs if given.kind != "tangent"
    ]
    assert_same(joint, canonical, [value.detach() for value in values], rtol=1e-5, atol=1e-5)
    products = [tuple(n.meta["val"].shape) for n in canonical.graph.nodes if "routed_mm" in str(n.target)]
    return ops(canonical), products


@pytest.mark.parametrize("count", [_counted, _one_hot, _histc])
@pytest.mark.parametrize("back", ["argsort", "put", "added"])
def test_batch_and_sequence_are_dims_of_the_rows(count: Callable[[Tensor], Tensor], back: str) -> None:
    counted, products = _canonical(Experts(count, back))
    assert counted["sort"] == 0
    assert sorted(products) == [(3, 7, 2, 6), (3, 7, 2, 6), (3, 7, 2, 8), (3, 7, 2, 8)]


@pytest.mark.parametrize("count", [_counted, _one_hot])
def test_groups_are_counted_before_the_sort(count: Callable[[Tensor], Tensor]) -> None:
    """What is element by element of the ids, as `bincount`'s check of them, is computed before they are flat."""
    assert _canonical(Experts(count, "added", unsorted=True))[0]["sort"] == 0


@pytest.mark.parametrize("model", [Experts(_capped), Experts(across=True)], ids=["capped", "across"])
def test_what_depends_on_the_order_stays_sorted(model: nn.Module) -> None:
    """Groups that are cut short, and a sum along the sorted rows."""
    assert _canonical(model)[0]["sort"] > 0


class _Largest(TorchDispatchMode):
    """The most elements that an op computes: a tensor on the meta device has none."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [
            value.numel()
            for value in pytree.tree_leaves(result)
            if type(value) is Tensor and not value.is_meta
        ]
        self.found = max([self.found, *sizes])
        return result


@pytest.mark.parametrize("count", [_one_hot, _histc, _capped])
def test_groups_are_tried_on_few_ids(count: Callable[[Tensor], Tensor]) -> None:
    """A histogram of all as one-hot rows may be 30 GB; what may be a limit of a group is tried on all."""
    x = torch.randn(8, 8192, 8, device="meta", requires_grad=True)
    joint = capture(Experts(count).to("meta"), (x,), {}).joint
    with _Largest() as computed:
        counted = ops(canonicalize(joint))
    capped = count is _capped
    assert (counted["sort"] > 0) == capped
    assert (computed.found > 8 * 8192) == capped
    assert computed.found >= 2 * 4 * 64
