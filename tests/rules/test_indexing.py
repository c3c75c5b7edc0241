"""Reading and writing rows by index, with the indexed dim split too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rules.registered import Draw, aten, check

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_embedding(seed: int) -> None:
    draw = Draw(seed)
    v, d = draw.size(2, 4, 5), draw.size()
    index = draw.ints(v, *draw.sizes(draw.pick(0, 1, 2)))
    check(aten.embedding.default, draw.floats(v, d), index)
    check(aten.embedding.default, draw.floats(v, d), index, 1)
    for padding in (-1, 1):
        check(aten.embedding_dense_backward.default, draw.floats(*index.shape, d), index, v, padding, False)
    rule = check(aten.embedding_dense_backward.default, draw.floats(*index.shape, d), index, v, -1, True)
    assert not rule.reductions.keys() & set(rule.splittable)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_and_scatter(seed: int, dim: int) -> None:
    draw = Draw(seed)
    shape = draw.sizes(3)
    shape[dim] = draw.size(2, 4)
    other = list(shape)
    other[dim] = draw.size(1, 1, 2, 3)
    x, src = draw.floats(*shape), draw.floats(*other)
    index = draw.ints(shape[dim], *other)
    check(aten.gather.default, x, dim, index)
    check(aten.scatter_add.default, x, dim, index, src)
    check(aten.scatter.value, x, dim, index, 2.0)
    check(aten.scatter.value, x, dim, index, 0)
    check(aten.scatter_reduce.two, x, dim, index, src, "amax")
    once = torch.stack([torch.randperm(shape[dim])[: other[dim]] for _ in range(src.numel() // other[dim])])
    if other[dim] <= shape[dim]:  # without repeats the result of scatter.src is determined
        rest = [n for i, n in enumerate(other) if i != dim % 3]
        index = once.reshape(*rest, -1).movedim(-1, dim)
        check(aten.scatter.src, x, dim, index, src)


def test_partial_index() -> None:
    """An index shorter than the source in other dims takes part of them: both are whole."""
    draw = Draw(0)
    x, index = draw.floats(4, 5), draw.ints(4, 3, 2)
    assert set(check(aten.gather.default, x, 0, index).splittable) == {"v", "k"}
    check(aten.scatter_add.default, x, 0, index, draw.floats(3, 2))
    check(aten.scatter_add.default, x, 0, index, draw.floats(4, 2))
    check(aten.scatter.value, x, 0, index[:1], 1.0)
    check(aten.scatter.src, x, 0, index[:1], draw.floats(1, 2))


def test_bools_and_integers() -> None:
    draw = Draw(1)
    index = draw.ints(4, 2, 3)
    assert "v" not in check(aten.gather.default, draw.bools(4, 3), 0, index).splittable
    check(aten.gather.default, draw.ints(9, 4, 3), 0, index)
    check(aten.scatter.value, draw.ints(9, 4, 3), 0, index[:1], 7)
    check(aten.scatter.value, draw.bools(4, 3), 0, index[:1], True)
    check(aten.scatter.value, draw.bools(4, 3), 0, index, True)


@pytest.mark.parametrize("seed", SEEDS)
def test_index_select_and_add(seed: int) -> None:
    draw = Draw(seed)
    v, t, d = draw.size(2, 3, 5), draw.size(), draw.size()
    index = draw.ints(v, t)
    check(aten.index_select.default, draw.floats(d, v), 1, index)
    check(aten.index_select.default, draw.floats(v, d), 0, index)
    check(aten.index_add.default, draw.floats(d, v), 1, index, draw.floats(d, t), alpha=2)
    check(aten.index_add.default, draw.floats(v, d), 0, index, draw.floats(t, d))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_index(seed: int, at: int) -> None:
    draw = Draw(seed)
    shape = draw.sizes(3)
    shape[at] = draw.size(2, 4)
    index = draw.ints(shape[at], *draw.sizes(draw.pick(0, 1, 2)), low=-shape[at])
    indices = [None] * at + [index]
    x = draw.floats(*shape)
    read = aten.index.Tensor(x, indices)
    check(aten.index.Tensor, x, indices)
    check(aten.index_put.default, x, indices, draw.floats(*read.shape), True)
    check(aten.index_put.default, x, indices, draw.floats(*[draw.pick(n, 1) for n in read.shape[1:]]), True)
    check(aten.index_put.default, x, indices, draw.floats(), False)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("rows", [[1], [-1], [0, -2, 3], [[4, 1], [2, -5]]])
def test_rows_are_written_where_they_are(at: int, rows: list[Any]) -> None:
    """Of 5, of which a third rank has one."""
    draw, index = Draw(at), torch.tensor(rows)
    x, indices = draw.floats(*[5 if i == at else 3 for i in range(3)]), [None] * at + [index]
    shape = aten.index.Tensor(x, indices).shape
    for values in (draw.floats(*shape), draw.floats(*shape[1:])[:1], draw.floats()):
        rule = check(aten.index_put.default, x, indices, values, False)
        assert "v" in rule.splittable and not any(name.startswith("t") for name in rule.splittable)


@pytest.mark.parametrize("seed", range(2))
def test_several_indices(seed: int) -> None:
    draw = Draw(seed)
    x = draw.floats(4, 3, 2, 3)
    i, j = draw.ints(4, 3, 1), draw.ints(3, 2)
    for indices in ([i, j], [None, j, None, i[:, 0].clamp(max=2).unsqueeze(-1)]):
        read = aten.index.Tensor(x, indices)
        rule = check(aten.index.Tensor, x, indices)
        assert {"t0", "t1"} <= set(rule.splittable)
        check(aten.index_put.default, x, indices, draw.floats(*read.shape), True)
        check(aten.index_put.default, x, indices, draw.floats(), False)


def test_mask_index_is_whole() -> None:
    x = torch.ones(4, 3)
    assert check(aten.index.Tensor, x, [x[:, 0] > 0]).splittable == ()
