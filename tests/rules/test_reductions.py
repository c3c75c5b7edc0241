"""Reductions, and ops that need a dim whole."""

from __future__ import annotations

import pytest
import torch

from tests.rules.registered import Draw, aten, check

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op", [aten.sum.dim_IntList, aten.amax.default, aten.amin.default])
def test_dims(op: object, seed: int) -> None:
    draw = Draw(seed)
    x = draw.floats(*draw.sizes(3))
    for dims in ([1], [-1, 0], [0, 1, 2]):
        check(op, x, dims, draw.pick(True, False))  # type: ignore[arg-type]


@pytest.mark.parametrize("op", [aten.sum.default, aten.max.default, aten.min.default, aten.amax.default,
                                aten.prod.default])  # fmt: skip
def test_everything(op: object) -> None:
    check(op, Draw(0).floats(4, 3))  # type: ignore[arg-type]
    check(op, Draw(0).floats(2, 1))  # type: ignore[arg-type]


def test_dtypes() -> None:
    draw = Draw(1)
    check(aten.sum.dim_IntList, draw.ints(9, 4, 3), [0])
    assert not check(aten.sum.dim_IntList, draw.bools(4, 3), [0]).linear
    check(aten.sum.dim_IntList, draw.floats(4, 3), [0], dtype=torch.float32, rtol=1e-5)
    check(aten.sum.dim_IntList, draw.floats(4, 3), None)
    for dtype in (torch.int64, torch.int32, torch.bool, torch.float32):
        check(aten.amax.default, draw.ints(9, 4, 3, low=-9).to(dtype), [0])
        check(aten.amin.default, draw.ints(9, 4, 3, low=-9).to(dtype), [0])


@pytest.mark.parametrize("op", ["any", "all"])
def test_bools(op: str) -> None:
    packet = getattr(aten, op)
    for seed in SEEDS:
        x = Draw(seed).bools(4, 2)
        check(packet.default, x)
        check(packet.dim, x, 0)
        check(packet.dims, x, [1], True)


@pytest.mark.parametrize("op", [aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim,
                                aten.prod.dim_int])  # fmt: skip
def test_reduced_whole(op: object) -> None:
    rule = check(op, Draw(2).floats(4, 3, 2), 1)  # type: ignore[arg-type]
    assert rule.splittable == ("d0", "d2")


@pytest.mark.parametrize("op", [aten.argmax.default, aten.argmin.default])
def test_position_among_all(op: object) -> None:
    assert check(op, Draw(2).floats(4, 3)).splittable == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "rest"),
    [(aten.cumsum.default, ()), (aten.cumprod.default, ()), (aten.logcumsumexp.default, ()),
     (aten.cummax.default, ()), (aten.cummin.default, ()), (aten.sort.default, (True,))],
)  # fmt: skip
def test_whole_dim(op: object, rest: tuple[object, ...]) -> None:
    for dim in (0, -1):
        rule = check(op, Draw(3).floats(4, 3, 2), dim, *rest)  # type: ignore[arg-type]
        assert len(rule.splittable) == 2


def test_histogram() -> None:
    x = Draw(0).floats(4, 3)
    assert check(aten.histc.default, x, 5, -1, 1).splittable == ("d0", "d1")
    assert check(aten.histc.default, x, 5).splittable == ()


def test_order() -> None:
    draw = Draw(5)
    check(aten.topk.default, draw.floats(4, 5), 2)
    check(aten.topk.default, draw.floats(4, 5), 1, 0)
    check(aten.sort.stable, draw.floats(4, 5), stable=True, dim=0)
    check(aten.flip.default, draw.floats(4, 3, 2), [0, 2])
