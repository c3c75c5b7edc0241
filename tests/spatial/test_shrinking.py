"""Rules of windows against the whole op, drawn by hypothesis: what fails is shrunk to a small case.

`test_window_rules` draws more cases a second; this one says more about the one that fails. A longer run:

    python -m tests.spatial.test_shrinking 2000
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from passes.rules.check.trial import Choice, Trial, call_node
from passes.rules.core.rule_registry import rule_for

aten = torch.ops.aten
EXAMPLES = 25


@dataclass(frozen=True)
class Dim:
    """One dim of space: its length, and the window that slides over it."""

    length: int
    kernel: int
    stride: int
    padding: int
    dilation: int


@dataclass(frozen=True)
class Drawn:
    """An op, and how the first of its dims of space is split: one size per rank."""

    op: str
    dims: tuple[Dim, ...]
    sizes: tuple[int, ...]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _columns(dims: Sequence[Dim]) -> list[list[int]]:
    return [[getattr(d, name) for d in dims] for name in ("kernel", "stride", "padding", "dilation")]


def convolution(dims: Sequence[Dim]) -> tuple[Any, list[Any]]:
    kernel, stride, padding, dilation = _columns(dims)
    x, weight = numbers(0, 1, 1, *(d.length for d in dims)), numbers(1, 1, 1, *kernel)
    return aten.convolution.default, [x, weight, None, stride, padding, dilation, False, [0] * len(dims), 1]


def transposed_convolution(dims: Sequence[Dim]) -> tuple[Any, list[Any]]:
    op, args = convolution(dims)
    args[4] = [min(d.padding, d.dilation * (d.kernel - 1)) for d in dims]
    args[6] = True
    return op, args


def max_pool(dims: Sequence[Dim]) -> tuple[Any, list[Any]]:
    kernel, stride, _, dilation = _columns(dims)
    padding = [min(d.padding, d.kernel // 2) for d in dims]
    # A window altogether in the padding has no maximum.
    assume(all(d.length > d.dilation * (d.kernel - 1) for d in dims))
    x = numbers(0, 1, 1, *(d.length for d in dims))
    return aten.max_pool2d_with_indices.default, [x, kernel, stride, padding, dilation, False]


def average_pool(dims: Sequence[Dim]) -> tuple[Any, list[Any]]:
    kernel, stride, _, _ = _columns(dims)
    padding = [min(d.padding, d.kernel // 2) for d in dims]
    x = numbers(0, 1, 1, *(d.length for d in dims))
    return aten.avg_pool2d.default, [x, kernel, stride, padding, False, True, None]


def _convolution_gradient(case: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
    op, (x, weight, _, *rest) = case
    grad = numbers(2, *op(x, weight, None, *rest).shape)
    return aten.convolution_backward.default, [grad, x, weight, None, *rest, [True, True, False]]


def _pool_gradient(case: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
    op, (x, *rest) = case
    found = op(x, *rest)
    results = found if isinstance(found, tuple) else (found,)
    backward = getattr(aten, str(op).split(".")[1] + "_backward").default
    return backward, [numbers(2, *results[0].shape), x, *rest, *results[1:]]


OPS: dict[str, Callable[[Sequence[Dim]], tuple[Any, list[Any]]]] = {
    "convolution": convolution,
    "convolution's gradient": lambda dims: _convolution_gradient(convolution(dims)),
    "transposed convolution": transposed_convolution,
    "transposed convolution's gradient": lambda dims: _convolution_gradient(transposed_convolution(dims)),
    "max pool": max_pool,
    "max pool's gradient": lambda dims: _pool_gradient(max_pool(dims)),
    "average pool": average_pool,
    "average pool's gradient": lambda dims: _pool_gradient(average_pool(dims)),
}


@st.composite
def windows(draw: st.DrawFn, longest: int = 101, widest: int = 9) -> Dim:
    kernel, stride, dilation = draw(st.tuples(st.integers(1, widest), st.integers(1, 4), st.integers(1, 3)))
    padding = draw(st.integers(0, kernel))
    least = max(1, dilation * (kernel - 1) + 1 - 2 * padding)
    return Dim(draw(st.integers(least, max(least, longest))), kernel, stride, padding, dilation)


@st.composite
def cases(draw: st.DrawFn, op: str) -> tuple[Drawn, Trial]:
    """Two dims of space, the first split over 2 to 8 ranks; any of these but the first may hold nothing."""
    dims = (draw(windows()), draw(windows(longest=7, widest=3)))
    try:
        node = call_node(*OPS[op](dims))
    except RuntimeError:  # torch refuses the arguments, such as an output of no size
        assume(False)
        raise
    rule = rule_for(node)
    assume("y0" in rule.splittable)
    length, ranks = rule.sizes["y0"], draw(st.integers(2, 8))
    cuts = sorted(draw(st.lists(st.integers(1, length), min_size=ranks - 1, max_size=ranks - 1)))
    sizes = tuple(hi - lo for lo, hi in zip([0, *cuts], [*cuts, length], strict=True))
    trial = Trial(node, rule, (ranks,), (Choice(factor="y0"),), sizes={"y0": sizes})
    return Drawn(op, dims, sizes), trial


def check(case: tuple[Drawn, Trial]) -> None:
    drawn, trial = case
    problem = trial.mismatch()
    assert problem is None, f"{drawn}: {problem}"


def search(op: str, examples: int) -> None:
    """Raises AssertionError with the smallest case found in which `op` differs."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    @given(cases(op))
    def drawn(case: tuple[Drawn, Trial]) -> None:
        check(case)

    drawn()


@pytest.mark.parametrize("op", OPS)
def test_drawn_cases(op: str) -> None:
    search(op, EXAMPLES)


if __name__ == "__main__":
    for name in OPS:
        search(name, int(sys.argv[1]))
        print(f"{name}: none of {sys.argv[1]} differs", flush=True)
