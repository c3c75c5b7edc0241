"""The interval algebra of windows against what the ops really read, on random uneven splits, seeds in the test ids."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from passes.layout.windows import AdaptiveWindow, SlidingWindow, TransposedWindow


def random_spans(rng: random.Random, length: int, parts: int) -> list[tuple[int, int]]:
    """A split of [0, length) into `parts`, empty and single ones included."""
    cuts = sorted(rng.choice([0, length, rng.randint(0, length)]) for _ in range(parts - 1))
    edges = [0, *cuts, length]
    return list(itertools.pairwise(edges))


def sources(y: Tensor, x: Tensor, lo: int, hi: int) -> tuple[int, int]:
    """First and one past the last position of x that y[lo:hi] depends on; (0, 0) if there is none."""
    (grad,) = torch.autograd.grad(y[..., lo:hi].sum(), x, retain_graph=True)
    used = grad.flatten().nonzero().flatten().tolist()
    return (min(used), max(used) + 1) if used else (0, 0)


@pytest.mark.parametrize("seed", range(300))
def test_convolution_reads_its_window_and_needs_no_more(seed: int) -> None:
    rng = random.Random(seed)
    kernel, stride, dilation = rng.randint(1, 9), rng.randint(1, 4), rng.randint(1, 3)
    before, length = rng.randint(0, kernel), rng.randint(1, 101)
    if length + 2 * before < dilation * (kernel - 1) + 1:
        length += dilation * kernel
    x = torch.randn(1, 1, length, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(1, 1, kernel, dtype=torch.float64) + 0.5
    y = F.conv1d(x, weight, stride=stride, padding=before, dilation=dilation)
    window = SlidingWindow(length, kernel, stride, dilation, before)
    for lo, hi in random_spans(rng, y.shape[-1], rng.randint(2, 8)):
        first, last = window.reads(lo, hi)
        if lo == hi:
            assert (first, last) == (0, 0)
            continue
        # The first and the last tap may fall on padding where others do not: then the window holds a little more.
        used = sources(y, x, lo, hi)
        assert used == (0, 0) or (first <= used[0] and used[1] <= last)
        padded = F.pad(x[..., first:last], window.padding(lo, hi))
        part = F.conv1d(padded, weight, stride=stride, dilation=dilation)
        assert torch.allclose(part, y[..., lo:hi], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(300))
def test_transposed_convolution_reads_what_adds_to_it(seed: int) -> None:
    rng = random.Random(seed)
    kernel, stride, dilation = rng.randint(1, 9), rng.randint(1, 4), rng.randint(1, 3)
    before, length = rng.randint(0, dilation * (kernel - 1)), rng.randint(1, 60)
    extra = rng.randint(0, max(stride, dilation) - 1)
    if (length - 1) * stride - 2 * before + dilation * (kernel - 1) + extra + 1 < 1:
        length += 2 * before
    x = torch.randn(1, 1, length, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(1, 1, kernel, dtype=torch.float64) + 0.5
    y = F.conv_transpose1d(x, weight, stride=stride, padding=before, dilation=dilation, output_padding=extra)
    window = TransposedWindow(length, kernel, stride, dilation, before)
    for lo, hi in random_spans(rng, y.shape[-1], rng.randint(2, 8)):
        first, last = window.reads(lo, hi)
        part = torch.zeros(1, 1, hi - lo, dtype=torch.float64)
        if first < last:
            whole = F.conv_transpose1d(x[..., first:last], weight, stride=stride, dilation=dilation)
            start, end = window.reach(first, last)
            assert end - start == whole.shape[-1]
            part = F.pad(whole, (start - lo, hi - end))
        assert torch.allclose(part, y[..., lo:hi], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(100))
def test_adaptive_pooling_reads_its_window(seed: int) -> None:
    rng = random.Random(seed)
    length, results = rng.randint(1, 101), rng.randint(1, 40)
    x = torch.randn(1, 1, length, dtype=torch.float64, requires_grad=True)
    y = F.adaptive_avg_pool1d(x, results)
    window = AdaptiveWindow(length, results)
    for lo, hi in random_spans(rng, results, rng.randint(2, 8)):
        assert window.reads(lo, hi) == (sources(y, x, lo, hi) if lo < hi else (0, 0))


def test_a_window_all_in_the_padding() -> None:
    """Kernel 2, padding 2, length 3: result 0 reads [-2, 0), result 5 reads [3, 5)."""
    window = SlidingWindow(3, 2, before=2)
    assert window.reads(0, 1) == (0, 0) and window.padding(0, 1) == (2, 0)
    assert window.reads(5, 6) == (0, 0) and window.padding(5, 6) == (0, 2)
    assert window.reads(1, 2) == (0, 1) and window.padding(1, 2) == (1, 0)
