"""View-like ops: common factors of two shapes, and the local shapes that follow."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard import MeshSpec, find_plan, verify
from passes.rules.check.trial import call_node
from passes.rules.core.rule_registry import rule_for
from passes.rules.plain.views import common_factors
from tests.profiles import slow_compute
from tests.rules.registered import Draw, aten, check

SEEDS = range(3)
SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((6, 4), (24,), "a b -> (a b)"),
        ((24,), (6, 4), "(a b) -> a b"),
        ((2, 3, 4), (6, 4), "a b c -> (a b) c"),
        ((2, 3, 4), (2, 12), "a b c -> a (b c)"),
        ((4, 6), (2, 12), "(a b) c -> a (b c)"),
        ((1, 6), (6, 1), "1 a -> a 1"),
        ((6, 4), (4, 6), "(a w) w -> (a w) w"),
        ((2, 3, 5), (3, 2, 5), "w w a -> w w a"),
        ((), (1,), " -> 1"),
        ((7,), (7,), "a -> a"),
        ((8, 12, 6), (2, 4, 3, 4, 2, 3), "(a b) (c d) (e f) -> a b c d e f"),
    ],
)
def test_common_factors(source: tuple[int, ...], target: tuple[int, ...], expected: str) -> None:
    left, right, sizes, whole = common_factors(source, target)
    letters: dict[str, str] = {}

    def show(dims: list[tuple[str, ...]]) -> str:
        words: list[str] = []
        for dim in dims:
            names = ["w" if f in whole else letters.setdefault(f, "abcdefgh"[len(letters)]) for f in dim]
            words.append("1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})")
        return " ".join(words)

    assert f"{show(left)} -> {show(right)}" == expected
    for dims, shape in ((left, source), (right, target)):
        assert [math.prod(sizes[f] for f in dim) for dim in dims] == list(shape)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.randoms(use_true_random=False))
def test_any_regrouping(source: list[int], random: object) -> None:
    primes = [p for n in source for p in {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3]}[n]]
    random.shuffle(primes)  # type: ignore[attr-defined]
    target: list[int] = []
    while primes:
        take = random.randint(1, 2)  # type: ignore[attr-defined]
        target.append(math.prod(primes[:take]))
        primes = primes[take:]
    check(aten.reshape.default, torch.randn(source, dtype=torch.float64), target)


def test_every_head_can_be_split() -> None:
    """b s (h d) -> b s h d and back: a model's attention."""
    x = torch.ones(2, 3, 8)
    rule = rule_for(call_node(aten.reshape.default, (x, [2, 3, 4, 2])))
    assert rule.operands == ((("f0",), ("f1",), ("f2", "f3")),)
    assert rule.results == ((("f0",), ("f1",), ("f2",), ("f3",)),)


def test_local_view_of_a_transposed_shard() -> None:
    """A view that is legal globally must be possible on a shard in any memory order."""
    rule = check(aten.reshape.default, torch.randn(4, 3, 2, dtype=torch.float64), [12, 2])
    assert rule.localize is not None


@pytest.mark.parametrize("seed", SEEDS)
def test_reordering(seed: int) -> None:
    draw = Draw(seed)
    x = draw.floats(*draw.sizes(3))
    check(aten.permute.default, x, [2, 0, -2])
    check(aten.reshape.default, x, [-1])
    check(aten.reshape.default, x, [x.shape[0], x.shape[1] * x.shape[2]])


@pytest.mark.parametrize("seed", SEEDS)
def test_squeeze(seed: int) -> None:
    """A local dim of size 1 whose global size is larger must stay."""
    draw = Draw(seed)
    shape = [draw.pick(1, 2, 3) for _ in range(4)]
    x = draw.floats(*shape)
    check(aten.reshape.default, x, list(x.squeeze().shape))
    check(aten.reshape.default, x, list(x.squeeze((0, 2)).shape))


@pytest.mark.parametrize("seed", SEEDS)
def test_expand(seed: int) -> None:
    draw = Draw(seed)
    shape = draw.sizes(3)
    source = [draw.pick(n, 1) for n in shape]
    check(aten.expand.default, draw.floats(*source), shape)
    check(
        aten.expand.default, draw.floats(*source[1:]), [shape[0], *[-1 if n > 1 else n for n in source[1:]]]
    )
    check(aten.expand.default, draw.floats(), [4])


def test_complex() -> None:
    draw = Draw(0)
    check(aten.view_as_complex.default, draw.floats(4, 3, 2))
    check(aten.view_as_real.default, torch.view_as_complex(draw.floats(4, 3, 2)))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.complex128])
def test_the_same_bytes(dtype: torch.dtype) -> None:
    rule = check(aten.view.dtype, Draw(0).floats(4, 3, 2), dtype)
    assert rule.splittable[:2] == ("d0", "d1")
    assert ("d2" in rule.splittable) == (dtype == torch.int64)  # of as many bytes


class Bytes(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.randn(2, 4)), read

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.weight, self.read(x.transpose(0, 2).contiguous())


@pytest.mark.parametrize(
    "read",
    [torch.view_as_complex, lambda x: x.view(torch.int16), lambda x: x.view(torch.int64)],
    ids=["complex", "int16", "int64"],
)
def test_the_bytes_of_a_tensor_whose_dims_are_turned(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Strides mean nothing in a graph, but these ops need their operand in order."""
    model, x = Bytes(read), torch.randn(2, 4, 2)
    plan = find_plan(model, MeshSpec({"a": 2}), (x,), profile=slow_compute(1e3))
    assert verify(model, plan, (x,)).ok
