"""`halo_exchange` on real ranks, eager and compiled: slices of the whole tensor, and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import ShardingError, halo_exchange
from tests.ranks import RankPool

MESHES: dict[str, tuple[int, ...]] = {"line": (4,), "grid": (2, 2), "pair": (2,)}


@dataclass(frozen=True)
class Case:
    """mesh: a key of `MESHES`. parts: rows of each rank along the dim's axis. The rest are arguments of the call."""

    mesh: str
    shape: tuple[int, ...]
    parts: Mapping[int, Sequence[int]]
    halo: Mapping[int, tuple[int, int]]
    sizes: Mapping[int, Any] | None
    periodic: tuple[int, ...] = field(default=())


CASES = {
    "even": Case("line", (2, 8, 3), {1: (2, 2, 2, 2)}, {1: (1, 2)}, None),
    "chunked": Case("line", (2, 9, 3), {1: (3, 3, 3, 0)}, {-2: (2, 1)}, {-2: 9}),
    "uneven": Case("line", (7, 2), {0: (1, 0, 5, 1)}, {0: (3, 2)}, {0: (1, 0, 5, 1)}),
    "ring": Case("line", (2, 5), {1: (1, 2, 1, 1)}, {1: (4, 5)}, {1: (1, 2, 1, 1)}, (1,)),
    "nothing": Case("line", (4, 2), {0: (1, 1, 1, 1)}, {0: (0, 0)}, None),
    "corners": Case("grid", (2, 5, 7), {1: (3, 2), 2: (1, 6)}, {1: (1, 2), 2: (2, 1)}, {1: 5, 2: (1, 6)}),
    "torus": Case("grid", (4, 6), {0: (2, 2), 1: (3, 3)}, {0: (1, 1), 1: (4, 2)}, None, (0, 1)),
    "cylinder": Case("grid", (4, 6), {0: (2, 2), 1: (3, 3)}, {0: (1, 1), 1: (1, 1)}, None, (1,)),
}


def rows(case: Case, coordinate: Sequence[int], halo: bool) -> dict[int, Tensor]:
    """By dim, the rows of the whole that the rank at `coordinate` holds: with their halo or without."""
    found: dict[int, Tensor] = {}
    for (dim, parts), reach, place in zip(case.parts.items(), case.halo.values(), coordinate, strict=True):
        length, end = case.shape[dim], [*accumulate(parts)][place]
        span = range(end - parts[place], end)
        if halo and parts[place]:
            span = range(span.start - reach[0], span.stop + reach[1])
        kept = [row for row in span if dim in case.periodic or 0 <= row < length]
        found[dim] = torch.tensor([row % length for row in kept], dtype=torch.int64)
    return found


def cut(whole: Tensor, chosen: Mapping[int, Tensor]) -> Tensor:
    for dim, places in chosen.items():
        whole = whole.index_select(dim, places)
    return whole


def loss_of(y: Tensor) -> Tensor:
    """Every place of the span counts differently."""
    return (y * torch.arange(1.0, 1 + y.numel(), dtype=y.dtype).view(y.shape)).square().sum()


def expected_grad(case: Case, whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Of the sum of all ranks' losses, by one process."""
    leaf = whole.clone().requires_grad_()
    places = [torch.unravel_index(torch.tensor(r), MESHES[case.mesh]) for r in range(mesh.size())]
    spans = [cut(leaf, rows(case, [int(i) for i in place], halo=True)) for place in places]
    torch.stack([loss_of(span) for span in spans]).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def check(case: Case, mesh: DeviceMesh, wrap: Callable[..., Any]) -> None:
    whole = torch.randn(case.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    mine = rows(case, coordinate, halo=False)
    x = cut(whole, mine).requires_grad_()

    def exchanged(x: Tensor) -> tuple[Tensor, Tensor]:
        y = halo_exchange(x * 1.0, mesh, case.halo, sizes=case.sizes, periodic=case.periodic)
        return y, loss_of(y)

    y, loss = wrap(exchanged)(x)
    loss.backward()
    torch.testing.assert_close(y, cut(whole, rows(case, coordinate, halo=True)), rtol=0, atol=0)
    torch.testing.assert_close(x.grad, cut(expected_grad(case, whole, mesh), mine), rtol=1e-12, atol=1e-12)


def on_rank(rank: int) -> None:
    meshes = {name: init_device_mesh("cpu", MESHES[name]) for name in ("line", "grid")}
    for name, case in CASES.items():
        try:
            check(case, meshes[case.mesh], lambda function: function)
        except Exception as error:
            error.add_note(f"case {name}")
            raise
    for dtype in (torch.bool, torch.bfloat16, torch.int64):
        whole = torch.arange(8).remainder(3).to(dtype)
        y = halo_exchange(whole[2 * rank : 2 * rank + 2], dist.group.WORLD, {0: (1, 0)})
        assert y.dtype == dtype and torch.equal(y, whole[max(0, 2 * rank - 1) : 2 * rank + 2])
    check_second_derivative(rank, meshes["line"])


def check_second_derivative(rank: int, mesh: DeviceMesh) -> None:
    """Of sum(span^2): twice the number of spans that a row lies in."""
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    loss = halo_exchange(x, mesh, {0: (0, 1)}).square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0 if rank == 0 else 4.0, 2.0]


def test_eager(ranks: RankPool) -> None:
    ranks.run(on_rank, world=4)


def compiled_on_rank(rank: int, backend: str) -> None:
    mesh = init_device_mesh("cpu", MESHES["pair"])
    # The same shapes on both ranks, but not the same messages: no cache may take one's code for the other's.
    case = Case("pair", (6, 2), {0: (3, 3)}, {0: (2, 1)}, None, (0,))
    check(case, mesh, lambda function: torch.compile(function, fullgraph=True, backend=backend))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(ranks: RankPool, backend: str) -> None:
    ranks.run(compiled_on_rank, backend, world=2)


X = torch.zeros(3, 4)
OP_REFUSALS: dict[str, tuple[tuple[Any, ...], str]] = {
    "out of range": (
        (X, 0, [3, 3], [0, 4, 2, 7], False, 0, "g"),
        "halo_exchange: the span [2, 7) of rank 1 leaves the dim, [0, 6)\n"
        "  try: clip it, or periodic=True to wrap around",
    ),
    "around twice": (
        (X, 0, [3, 3], [-7, 4, 2, 7], True, 0, "g"),
        "halo_exchange: the span [-7, 4) of rank 0 wraps around a periodic dim of 6 more than once\n"
        "  try: a halo of at most 6 to either side",
    ),
    "backwards": (
        (X, 0, [3, 3], [0, 4, 6, 2], False, 0, "g"),
        "halo_exchange: the span [6, 2) of rank 1 ends before it starts\n  try: lo <= hi; lo == hi is empty",
    ),
    "short spans": (
        (X, 0, [3, 3], [0, 4], False, 0, "g"),
        "halo_exchange: spans has 2 numbers for 2 sizes\n"
        "  try: [lo, hi] of each rank, one after the other: two numbers a rank",
    ),
    "negative size": (
        (X, 0, [3, -3], [0, 3, 0, 3], False, 0, "g"),
        "halo_exchange: sizes [3, -3] has a negative part\n  try: 0 for an empty one",
    ),
    "rank": (
        (X, 0, [3, 3], [0, 4, 2, 6], False, 2, "g"),
        "halo_exchange: rank is 2, but sizes has parts for 2 ranks\n"
        "  try: torch.distributed.get_rank(group), and a size for each rank, 0 where it holds nothing",
    ),
    "dim": (
        (X, 2, [3, 3], [0, 4, 2, 6], False, 0, "g"),
        "halo_exchange: dim is 2, but x has 2 dims",
    ),
    "rows": (
        (X, 1, [3, 3], [0, 4, 2, 6], False, 0, "g"),
        "halo_exchange: x has 4 rows in dim 1; by the arguments rank 0 holds 3",
    ),
    "dtype": (
        (X.to(torch.complex64), 0, [3, 3], [0, 4, 2, 6], False, 0, "g"),
        "halo_exchange: x is torch.complex64, which is not sent\n"
        "  try: one of float64, float32, float16, bfloat16, int64, int32, int8, uint8, bool",
    ),
}


@pytest.mark.parametrize("name", OP_REFUSALS)
def test_the_op_refuses(name: str) -> None:
    arguments, message = OP_REFUSALS[name]
    with pytest.raises(ShardingError) as refused:
        torch.ops.autoshard.halo_exchange(*arguments)
    assert str(refused.value) == message


def test_booleans_have_no_sum() -> None:
    with pytest.raises(ShardingError, match="has no sum"):
        torch.ops.autoshard.halo_reduce(X.bool(), 0, [3], [0, 3], False, 0, "g")


CALL_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no dim": ({"halo": {}}, "halo_exchange: halo names no dim\n  try: halo={2: (1, 1)}"),
    "axes": (
        {"halo": {0: (1, 1), 1: (1, 1)}},
        "halo_exchange: a mesh of 1 axes for the 2 dims of halo; each dim is split over one axis\n"
        "  try: a part of the mesh, mesh['h', 'w'], with its axes in the order of halo's dims",
    ),
    "dim": (
        {"halo": {2: (1, 1)}},
        "halo_exchange: halo names dim 2, but x has 2 dims\n  try: an integer from -2 to 1",
    ),
    "negative": (
        {"halo": {0: (-1, 1)}},
        "halo_exchange: the halo of dim 0 is (-1, 1)\n"
        "  try: (before, after), two numbers of rows, at least 0",
    ),
    "sizes of another dim": (
        {"halo": {0: (1, 1)}, "sizes": {1: 4}},
        "halo_exchange: sizes names dim 1, of which no halo is exchanged\n"
        "  try: leave it out, or halo={1: (0, 0)}",
    ),
    "ranks": (
        {"halo": {0: (1, 1)}, "sizes": {0: (3, 3, 3)}},
        "halo_exchange: 3 sizes of dim 0 for a group of 2 ranks\n"
        "  try: one for each rank, 0 where it holds nothing",
    ),
    "too long": (
        {"halo": {0: (7, 0)}, "periodic": (0,)},
        "halo_exchange: the span [-7, 3) of rank 0 wraps around a periodic dim of 6 more than once\n"
        "  try: a halo of at most 6 to either side",
    ),
}


def refused_on_rank(rank: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", MESHES["pair"])
    said: dict[str, str] = {}
    for name, (arguments, _) in CALL_REFUSALS.items():
        try:
            halo_exchange(X, mesh, **arguments)
        except ShardingError as error:
            said[name] = str(error)
    return said


def test_every_rank_refuses(ranks: RankPool) -> None:
    wanted = {name: message for name, (_, message) in CALL_REFUSALS.items()}
    assert ranks.run(refused_on_rank, world=2) == [wanted, wanted]
