"""Rules of windows against the whole op: values and gradients, random shapes, uneven and empty shards, 1-3 split dims.

Each case is one op on one mesh; its seed is in the test id and in the message. `CASES` is small for CI;
`python -m tests.spatial.test_window_rules 2000` runs as many as one likes.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from passes.rules.check.trial import Choice, Trial, call_node, choices
from passes.rules.core.rule_registry import rule_for

aten = torch.ops.aten
CASES = 80

Case = tuple[Any, list[Any]]


def tensor(rng: random.Random, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def lengths(rng: random.Random, space: int) -> list[int]:
    top = {1: 101, 2: 23, 3: 9}[space]
    return [rng.randint(1, top) for _ in range(space)]


def geometry(rng: random.Random, sizes: list[int], limit: int) -> tuple[list[int], ...]:
    """kernel, stride, padding, dilation per dim, such that a window fits; sizes grow if they must."""
    found: list[list[int]] = [[], [], [], []]
    for d in range(len(sizes)):
        kernel, stride, dilation = rng.randint(1, limit), rng.randint(1, 4), rng.randint(1, 3)
        padding = rng.randint(0, kernel)
        sizes[d] = max(sizes[d], dilation * (kernel - 1) + 1 - 2 * padding, 1)
        for values, number in zip(found, (kernel, stride, padding, dilation), strict=True):
            values.append(number)
    return tuple(found)


def convolution_arguments(rng: random.Random, transposed: bool) -> list[Any]:
    space = rng.choice([1, 1, 2, 2, 3])
    sizes = lengths(rng, space)
    kernel, stride, padding, dilation = geometry(rng, sizes, 9 if space == 1 else 4)
    groups, inner, outer = rng.choice([(1, 1, 2), (1, 2, 1), (2, 1, 1), (3, 1, 1)])
    extra = [0] * space
    if transposed:
        padding = [min(p, d * (k - 1)) for p, d, k in zip(padding, dilation, kernel, strict=True)]
        extra = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
    elif rng.random() < 0.2:
        stride, sizes = [1] * space, [max(2, n) for n in sizes]
        padding = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]  # "same"
    batch = rng.choice([1, 1, 2])
    channels = (groups * inner, groups * outer)
    weight = (channels[0], outer) if transposed else (channels[1], inner)
    x, w = tensor(rng, batch, channels[0], *sizes), tensor(rng, *weight, *kernel)
    bias = tensor(rng, channels[1]) if rng.random() < 0.5 else None
    arguments = [x, w, bias, stride, padding, dilation, transposed, extra, groups]
    if transposed and any(n < 1 for n in aten.convolution.default(*list(arguments)).shape[2:]):
        raise AssertionError("an output of no size")
    return arguments


def convolution(rng: random.Random) -> Case:
    return aten.convolution.default, convolution_arguments(rng, False)


def transposed_convolution(rng: random.Random) -> Case:
    while True:
        try:
            return aten.convolution.default, convolution_arguments(rng, True)
        except RuntimeError:  # torch refuses an output of no size
            continue


def _gradient(case: Case, rng: random.Random) -> Case:
    op, (x, weight, bias, *rest) = case
    grad = tensor(rng, *op(x, weight, bias, *rest).shape)
    sizes = None if bias is None else list(bias.shape)
    mask = rng.choice([[True, True, bias is not None], [True, False, False], [False, True, False]])
    return aten.convolution_backward.default, [grad, x, weight, sizes, *rest, mask]


def convolution_gradient(rng: random.Random) -> Case:
    return _gradient(convolution(rng), rng)


def input_gradient(rng: random.Random) -> Case:
    """Half of them split by the input's positions."""
    op, arguments = _gradient(rng.choice([convolution, transposed_convolution])(rng), rng)
    return op, [*arguments[:-1], [True, False, False]]


def transposed_convolution_gradient(rng: random.Random) -> Case:
    return _gradient(transposed_convolution(rng), rng)


def pooling_arguments(rng: random.Random) -> tuple[int, torch.Tensor, list[list[int]], list[int], bool]:
    space = rng.choice([2, 2, 3])
    sizes = lengths(rng, space)
    kernel, stride, _, dilation = geometry(rng, sizes, 4)
    padding = [rng.randint(0, k // 2) for k in kernel]
    # A window that lies in the padding altogether has no maximum, and torch gives it any index.
    dilation = [d if n > d * (k - 1) else 1 for n, d, k in zip(sizes, dilation, kernel, strict=True)]
    sizes = [
        max(n, d * (k - 1) + 1 - 2 * p) for n, d, k, p in zip(sizes, dilation, kernel, padding, strict=True)
    ]
    return (
        space,
        tensor(rng, rng.randint(1, 2), 1, *sizes),
        [kernel, stride, padding],
        dilation,
        rng.random() < 0.5,
    )


def max_pool(rng: random.Random) -> Case:
    space, x, window, dilation, ceil = pooling_arguments(rng)
    op = getattr(aten, f"max_pool{space}d_with_indices").default
    return op, [x, *window, dilation, ceil]


def max_pool_gradient(rng: random.Random) -> Case:
    op, (x, *rest) = max_pool(rng)
    y, indices = op(x, *rest)
    backward = getattr(aten, str(op).split(".")[1] + "_backward").default
    return backward, [tensor(rng, *y.shape), x, *rest, indices]


def average_pool(rng: random.Random) -> Case:
    space, x, window, _, ceil = pooling_arguments(rng)
    kernel, _, _padding = window
    x = tensor(rng, *x.shape[:2], *(max(n, k) for n, k in zip(x.shape[2:], kernel, strict=True)))
    divisor = rng.choice([None, None, 3])
    return getattr(aten, f"avg_pool{space}d").default, [x, *window, ceil, rng.random() < 0.5, divisor]


def average_pool_gradient(rng: random.Random) -> Case:
    op, (x, *rest) = average_pool(rng)
    backward = getattr(aten, str(op).split(".")[1] + "_backward").default
    return backward, [tensor(rng, *op(x, *rest).shape), x, *rest]


def _resizing(rng: random.Random) -> tuple[str, torch.Tensor, list[Any]]:
    space = rng.choice([1, 2, 3])
    kinds = {1: "nearest linear", 2: "nearest bilinear", 3: "nearest trilinear"}[space].split()
    kind = rng.choice(kinds)
    sizes = lengths(rng, space)
    scales = [rng.choice([None, 2.0, 0.5, 1.7, 3.0]) for _ in sizes]
    outs = [max(1, int(n * s)) if s else rng.randint(1, 2 * n) for n, s in zip(sizes, scales, strict=True)]
    if rng.random() < 0.5:
        scales = [None] * space
    corners = [] if kind == "nearest" else [rng.random() < 0.5]
    x = tensor(rng, rng.randint(1, 2), 2, *sizes)
    return f"upsample_{kind}{space}d", x, [outs, *corners, *scales]


def resize(rng: random.Random) -> Case:
    name, x, rest = _resizing(rng)
    return getattr(aten, name).default, [x, *rest]


def resize_gradient(rng: random.Random) -> Case:
    name, x, (outs, *rest) = _resizing(rng)
    grad = tensor(rng, *x.shape[:2], *outs)
    return getattr(aten, f"{name}_backward").default, [grad, outs, list(x.shape), *rest]


def edge_pad(rng: random.Random) -> Case:
    space, kind = rng.choice([1, 2, 3]), rng.choice(["reflection", "replication"])
    sizes = lengths(rng, space)
    most = [n - 1 if kind == "reflection" else 5 for n in sizes]
    padding = [rng.randint(0, min(m, 12)) for m in reversed(most) for _ in range(2)]
    return getattr(aten, f"{kind}_pad{space}d").default, [tensor(rng, rng.randint(1, 2), 2, *sizes), padding]


def edge_pad_gradient(rng: random.Random) -> Case:
    op, (x, padding) = edge_pad(rng)
    backward = getattr(aten, str(op).split(".")[1] + "_backward").default
    return backward, [tensor(rng, *op(x, padding).shape), x, padding]


OPS: Sequence[Callable[[random.Random], Case]] = (
    convolution,
    convolution_gradient,
    input_gradient,
    transposed_convolution,
    transposed_convolution_gradient,
    max_pool,
    max_pool_gradient,
    average_pool,
    average_pool_gradient,
    resize,
    resize_gradient,
    edge_pad,
    edge_pad_gradient,
)


def uneven(rng: random.Random, length: int, parts: int) -> list[int]:
    """Random sizes, with empty and single ones; the first is not empty: it does what is done once."""
    cuts = sorted(
        rng.choice([1, length, rng.randint(1, length), rng.randint(1, length)]) for _ in range(parts - 1)
    )
    edges = [0, *cuts, length]
    return [hi - lo for lo, hi in itertools.pairwise(edges)]


def wrong_with(trial: Trial) -> str | None:
    """`mismatch` of the trial, or the error that it ends in."""
    try:
        return trial.mismatch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def mismatch(make: Callable[[random.Random], Case], seed: int) -> str | None:
    """What is wrong with one random case; None if nothing is. Space is split, sometimes beside batch or channels."""
    rng = random.Random(f"{make.__name__} {seed}")
    op, args = make(rng)
    node = call_node(op, args)
    rule = rng.choice(rule_for(node).ways)
    legal = [choice.factor for (choice,) in choices(rule, 1) if choice.factor is not None]
    space = [f for f in legal if f.startswith(("y", "x"))]
    if not space:
        return None
    others = [f for f in legal if f not in space]
    chosen = rng.sample(space, rng.randint(1, len(space)))
    if others and rng.random() < 0.3:
        chosen.append(rng.choice(others))
    mesh = [rng.randint(2, 8 if len(chosen) == 1 else 3) for _ in chosen]
    sizes = {
        factor: uneven(rng, rule.sizes[factor], ranks)
        for factor, ranks in zip(chosen, mesh, strict=True)
        if factor in space and rng.random() < 0.7
    }
    trial = Trial(node, rule, tuple(mesh), tuple(Choice(factor=f) for f in chosen), sizes=sizes, rtol=1e-9)
    problem = wrong_with(trial)
    if problem is None:
        return None
    shapes = [list(a.shape) if isinstance(a, torch.Tensor) else a for a in args]
    return f"seed {seed}: {op}{shapes} on {mesh}, split {chosen} as {sizes or 'torch does'}: {problem}"


@pytest.mark.parametrize("make", OPS, ids=lambda make: make.__name__)
def test_random_cases(make: Callable[[random.Random], Case]) -> None:
    wrong = [problem for seed in range(CASES) if (problem := mismatch(make, seed)) is not None]
    assert not wrong, f"{len(wrong)} of {CASES}\n" + "\n".join(wrong[:5])


if __name__ == "__main__":
    count = int(sys.argv[1])
    for make in OPS:
        found = [problem for seed in range(count) if (problem := mismatch(make, seed)) is not None]
        print(f"{make.__name__}: {len(found)} of {count} wrong", *found[:3], sep="\n  ", flush=True)
