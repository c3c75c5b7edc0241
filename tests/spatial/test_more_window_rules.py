"""More rules of windows against the whole op: adaptive pooling, cubic and antialiased resizing, patches.

As `test_window_rules`; `python -m tests.spatial.test_more_window_rules 2000` runs as many cases as one likes.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from passes.rules.check.trial import Choice, Trial, call_node
from passes.rules.core.rule_registry import rule_for
from tests.spatial.test_window_rules import Case, geometry, lengths, mismatch, tensor

aten = torch.ops.aten
CASES = 25


def adaptive_arguments(rng: random.Random) -> tuple[int, torch.Tensor, list[int]]:
    """Some lengths divide, some do not; inputs per result, and results per input."""
    space = rng.choice([2, 2, 3])
    sizes = [rng.randint(1, 101), *lengths(rng, space)[1:]]
    outs = [rng.randint(1, min(n + 3, 40)) for n in sizes]
    sizes = [m * rng.randint(1, 6) if rng.random() < 0.4 else n for n, m in zip(sizes, outs, strict=True)]
    lead = rng.choice([[2], [1, 2], [2, 1]])
    return space, tensor(rng, *lead, *sizes), outs


def adaptive_average(rng: random.Random) -> Case:
    space, x, outs = adaptive_arguments(rng)
    return getattr(aten, f"_adaptive_avg_pool{space}d").default, [x, outs]


def adaptive_average_gradient(rng: random.Random) -> Case:
    space, x, outs = adaptive_arguments(rng)
    grad = tensor(rng, *x.shape[:-space], *outs)
    return getattr(aten, f"_adaptive_avg_pool{space}d_backward").default, [grad, x]


def adaptive_max(rng: random.Random) -> Case:
    """Some inputs are integers, whose maxima are ties: which one it is is part of the result."""
    space, x, outs = adaptive_arguments(rng)
    x = (2 * x).round() if rng.random() < 0.5 else x
    return getattr(aten, f"adaptive_max_pool{space}d").default, [x, outs]


def adaptive_max_gradient(rng: random.Random) -> Case:
    op, (x, outs) = adaptive_max(rng)
    y, indices = op(x, outs)
    backward = getattr(aten, str(op).split(".")[1] + "_backward").default
    return backward, [tensor(rng, *y.shape), x, indices]


def _resizing(rng: random.Random, kinds: str) -> tuple[str, torch.Tensor, list[Any]]:
    sizes = [rng.randint(1, 60), rng.randint(1, 23)]
    scales = [rng.choice([None, 2.0, 0.5, 0.3, 1.7, 3.0]) for _ in sizes]
    outs = [max(1, int(n * s)) if s else rng.randint(1, 2 * n) for n, s in zip(sizes, scales, strict=True)]
    if rng.random() < 0.5:
        scales = [None, None]
    x = tensor(rng, rng.randint(1, 2), 2, *sizes)
    return rng.choice(kinds.split()), x, [outs, rng.random() < 0.5, *scales]


def _resized(rng: random.Random, kinds: str) -> Case:
    name, x, rest = _resizing(rng, kinds)
    return getattr(aten, name).default, [x, *rest]


def _resized_gradient(rng: random.Random, kinds: str) -> Case:
    name, x, (outs, *rest) = _resizing(rng, kinds)
    grad = tensor(rng, *x.shape[:2], *outs)
    return getattr(aten, f"{name}_backward").default, [grad, outs, list(x.shape), *rest]


def _nearest_exact(rng: random.Random) -> tuple[str, torch.Tensor, list[Any]]:
    space = rng.choice([1, 1, 2, 3])
    sizes = lengths(rng, space)
    scales = [rng.choice([None, 2.0, 0.5, 0.3, 1.7, 3.0]) for _ in sizes]
    outs = [max(1, int(n * s)) if s else rng.randint(1, 2 * n) for n, s in zip(sizes, scales, strict=True)]
    if rng.random() < 0.5:
        scales = [None] * space
    x = tensor(rng, rng.randint(1, 2), 2, *sizes)
    return f"_upsample_nearest_exact{space}d", x, [outs, *scales]


def nearest_exact_resize(rng: random.Random) -> Case:
    name, x, rest = _nearest_exact(rng)
    return getattr(aten, name).default, [x, *rest]


def nearest_exact_resize_gradient(rng: random.Random) -> Case:
    name, x, (outs, *rest) = _nearest_exact(rng)
    grad = tensor(rng, *x.shape[:2], *outs)
    return getattr(aten, f"{name}_backward").default, [grad, outs, list(x.shape), *rest]


ANTIALIASED = "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"


def cubic_resize(rng: random.Random) -> Case:
    return _resized(rng, "upsample_bicubic2d")


def cubic_resize_gradient(rng: random.Random) -> Case:
    return _resized_gradient(rng, "upsample_bicubic2d")


def antialiased_resize(rng: random.Random) -> Case:
    """Not to one column: for that torch's kernel on CPUs is wrong (2.13.0: its own backward is not its transpose)."""
    while True:
        op, (x, outs, *rest) = _resized(rng, ANTIALIASED)
        if outs[1] > 1:
            return op, [x, outs, *rest]


def antialiased_resize_gradient(rng: random.Random) -> Case:
    return _resized_gradient(rng, ANTIALIASED)


def _patch_arguments(rng: random.Random) -> tuple[torch.Tensor, list[list[int]], list[int]]:
    """A plane; kernel, dilation, padding and stride; and how many patches there are each way."""
    sizes = [rng.randint(1, 60), rng.choice([rng.randint(1, 4), rng.randint(1, 30)])]
    kernel, stride, padding, dilation = geometry(rng, sizes, 5)
    window = [kernel, dilation, padding, stride]
    counts = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in zip(sizes, *window, strict=True)]
    return tensor(rng, *rng.choice([[2], [1, 2], [2, 3]]), *sizes), window, counts


def patches(rng: random.Random) -> Case:
    x, window, _ = _patch_arguments(rng)
    return aten.im2col.default, [x, *window]


def patches_back(rng: random.Random) -> Case:
    x, window, counts = _patch_arguments(rng)
    channels = x.shape[-3] * math.prod(window[0])
    columns = tensor(rng, *x.shape[:-3], channels, math.prod(counts))
    return aten.col2im.default, [columns, list(x.shape[-2:]), *window]


def windows_along(rng: random.Random) -> Case:
    sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    dim, length = rng.randrange(len(sizes)), rng.randint(1, 101)
    sizes[dim] = length
    size, step = rng.randint(1, min(length, 12)), rng.randint(1, 9)
    return aten.unfold.default, [tensor(rng, *sizes), rng.choice([dim, dim - len(sizes)]), size, step]


def windows_along_back(rng: random.Random) -> Case:
    op, (x, *window) = windows_along(rng)
    return aten.unfold_backward.default, [tensor(rng, *op(x, *window).shape), list(x.shape), *window]


OPS: Sequence[Callable[[random.Random], Case]] = (
    adaptive_average,
    adaptive_average_gradient,
    adaptive_max,
    adaptive_max_gradient,
    cubic_resize,
    cubic_resize_gradient,
    nearest_exact_resize,
    nearest_exact_resize_gradient,
    antialiased_resize,
    antialiased_resize_gradient,
    patches,
    patches_back,
    windows_along,
    windows_along_back,
)


@pytest.mark.parametrize("make", OPS, ids=lambda make: make.__name__)
def test_random_cases(make: Callable[[random.Random], Case]) -> None:
    wrong = [problem for seed in range(CASES) if (problem := mismatch(make, seed)) is not None]
    assert not wrong, f"{len(wrong)} of {CASES}\n" + "\n".join(wrong[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("other", [1, 40])
@pytest.mark.parametrize("space", [1, 2, 3])
def test_ties_of_nearest_neighbours(space: int, other: int, dtype: torch.dtype) -> None:
    """Where a place is a whole number but for rounding: torch rounds in one kernel not as in another.

    Not 2 -> 41 in float32: there its kernel on CPUs fuses multiply and add (2.13.0: its own backward does not).
    """
    for kind, pairs in (
        ("upsample_nearest", [(2, 98), (4, 82)]),
        ("_upsample_nearest_exact", [(2, 49), (4, 98), *([(2, 41)] if dtype == torch.float64 else [])]),
    ):
        for length, results in pairs:
            others = [other] if space == 2 else [2] * (space - 1)
            x = torch.randn(1, 1, *others, length, generator=torch.Generator().manual_seed(0), dtype=dtype)
            node = call_node(getattr(aten, f"{kind}{space}d").default, [x, [*others, results]])
            split = Choice(factor=f"y{space - 1}")
            problem = Trial(node, rule_for(node), (3,), (split,)).mismatch()
            assert problem is None, (kind, length, results, problem)


if __name__ == "__main__":
    count, names = int(sys.argv[1]), sys.argv[2:]
    for make in OPS:
        if names and make.__name__ not in names:
            continue
        found = [problem for seed in range(count) if (problem := mismatch(make, seed)) is not None]
        print(f"{make.__name__}: {len(found)} of {count} wrong", *found[:3], sep="\n  ", flush=True)
