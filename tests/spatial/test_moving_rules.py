"""Rules of ops that move data against the whole op: values and gradients, random shapes, uneven and empty shards, 1-3
split dims.

Each case is one op on one mesh; its seed is in the test id and in the message. `CASES` is small for CI;
`python -m tests.spatial.test_moving_rules 2000` runs as many as one likes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import passes.ops as _operators  # registers circular_pad
from passes.rules.check.trial import Choice, Trial, call_node
from passes.rules.core.rule_registry import rule_for
from tests.spatial.test_window_rules import tensor, uneven, wrong_with

del _operators
aten = torch.ops.aten
CASES = 40

Case = tuple[Any, list[Any]]


def shape(rng: random.Random) -> list[int]:
    """Of 1 to 3 dims, some of length 1; the more the smaller."""
    ndim = rng.choice([1, 2, 2, 3])
    top = {1: 101, 2: 31, 3: 11}[ndim]
    return [rng.choice([1, rng.randint(1, top), rng.randint(1, top), top]) for _ in range(ndim)]


def cat(rng: random.Random) -> Case:
    sizes = shape(rng)
    dim = rng.randrange(len(sizes))
    pieces = [
        [*sizes[:dim], rng.randint(1, 1 + sizes[dim]), *sizes[dim + 1 :]] for _ in range(rng.randint(1, 4))
    ]
    return aten.cat.default, [[tensor(rng, *piece) for piece in pieces], rng.choice([dim, dim - len(sizes)])]


def _cut(rng: random.Random, length: int) -> tuple[int, int, int]:
    """start, end, step of a slice that is not empty, counted from either end."""
    start = rng.randrange(length)
    end = rng.randint(start + 1, length)
    if rng.random() < 0.3:
        start, end = start - length, rng.choice([end, sys.maxsize])
    return start, end, rng.choice([1, 1, 2, 3, 7])


def slice_(rng: random.Random) -> Case:
    sizes = shape(rng)
    dim = rng.randrange(len(sizes))
    return aten.slice.Tensor, [tensor(rng, *sizes), dim, *_cut(rng, sizes[dim])]


def slice_gradient(rng: random.Random) -> Case:
    op, (x, *rest) = slice_(rng)
    return aten.slice_backward.default, [tensor(rng, *op(x, *rest).shape), list(x.shape), *rest]


def split(rng: random.Random) -> Case:
    sizes = shape(rng)
    dim = rng.randrange(len(sizes))
    parts = [n for n in uneven(rng, sizes[dim], rng.randint(1, 4)) if n]
    return aten.split_with_sizes.default, [tensor(rng, *sizes), parts, dim]


def pad(rng: random.Random) -> Case:
    """Amounts that add, cut, and cancel."""
    sizes = shape(rng)
    amounts: list[int] = []
    for length in reversed(sizes[rng.randrange(len(sizes)) :]):
        before = rng.choice([0, rng.randint(1, 12), -rng.randrange(length)])
        least = 1 - length - min(0, before)
        amounts += [before, rng.choice([0, rng.randint(1, 12), least, max(least, -before)])]
    value = rng.choice([0, 0, 2.5, float("-inf")])
    return aten.constant_pad_nd.default, [tensor(rng, *sizes), amounts, value]


def flip(rng: random.Random) -> Case:
    sizes = shape(rng)
    dims = rng.sample(range(len(sizes)), rng.randint(1, len(sizes)))
    return aten.flip.default, [tensor(rng, *sizes), dims]


def roll(rng: random.Random) -> Case:
    """By more than the length, backwards, and twice along one dim."""
    sizes = shape(rng)
    dims = [rng.randrange(len(sizes)) for _ in range(rng.randint(1, len(sizes)))]
    return aten.roll.default, [tensor(rng, *sizes), [rng.randint(-150, 150) for _ in dims], dims]


def circular_pad(rng: random.Random) -> Case:
    sizes = shape(rng)
    padded = sizes[rng.randrange(len(sizes)) :]
    amounts = [rng.choice([0, 1, n, rng.randint(0, n)]) for n in reversed(padded) for _ in range(2)]
    return torch.ops.autoshard.circular_pad.default, [tensor(rng, *sizes), amounts]


def circular_pad_gradient(rng: random.Random) -> Case:
    op, (x, amounts) = circular_pad(rng)
    return torch.ops.autoshard.circular_pad_backward.default, [tensor(rng, *op(x, amounts).shape), amounts]


OPS: Sequence[Callable[[random.Random], Case]] = (
    cat,
    slice_,
    slice_gradient,
    split,
    pad,
    flip,
    roll,
    circular_pad,
    circular_pad_gradient,
)


def trial_of(make: Callable[[random.Random], Case], seed: int) -> Trial | None:
    """A random case on a random mesh, one dim that the op moves along among those split; None if there is none."""
    rng = random.Random(f"{make.__name__} {seed}")
    node = call_node(*make(rng))
    rule = rule_for(node)
    moved = [f for f in rule.splittable if f in rule.moved]
    if not moved:
        return None
    chosen = [rng.choice(moved)]
    others = [f for f in rule.splittable if f != chosen[0]]
    chosen += rng.sample(others, rng.randint(0, len(others)))
    if rng.random() < 0.2:
        chosen.append(chosen[0])  # two axes split one dim
    mesh = [rng.randint(2, 8 if len(chosen) == 1 else 3) for _ in chosen]
    ranks = {f: [n for c, n in zip(chosen, mesh, strict=True) if c == f] for f in chosen}
    alone = {f: counts[0] for f, counts in ranks.items() if len(counts) == 1}
    sizes = {f: uneven(rng, rule.sizes[f], count) for f, count in alone.items() if rng.random() < 0.7}
    choices = [Choice(factor=f) for f in chosen]
    if rule.linear and rng.random() < 0.2:
        choices.append(Choice(linear=rule.linear[0]))
        mesh.append(2)
    return Trial(node, rule, tuple(mesh), tuple(choices), sizes=sizes, rtol=1e-12)


def mismatch(make: Callable[[random.Random], Case], seed: int) -> str | None:
    """What is wrong with one random case; None if nothing is."""
    trial = trial_of(make, seed)
    if trial is None:
        return None
    problem = wrong_with(trial)
    if problem is None:
        return None
    node = trial.node
    shapes = [list(n.meta["val"].shape) for n in node.all_input_nodes]
    splits = [choice.factor for choice in trial.chosen]
    where = f"on {trial.mesh}, split {splits} as {trial.sizes or 'torch does'}"
    return f"seed {seed}: {node.target}{node.args} of {shapes} {where}: {problem}"


@pytest.mark.parametrize("make", OPS, ids=lambda make: make.__name__)
def test_random_cases(make: Callable[[random.Random], Case]) -> None:
    wrong = [problem for seed in range(CASES) if (problem := mismatch(make, seed)) is not None]
    assert not wrong, f"{len(wrong)} of {CASES}\n" + "\n".join(wrong[:5])


if __name__ == "__main__":
    count = int(sys.argv[1])
    for make in OPS:
        found = [problem for seed in range(count) if (problem := mismatch(make, seed)) is not None]
        split_cases = sum(trial_of(make, seed) is not None for seed in range(count))
        print(f"{make.__name__}: {len(found)} of {split_cases} wrong", *found[:3], sep="\n  ", flush=True)
