"""Exchanging and reducing halos, simulated: any split to any spans, and summands of any spans to any split."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor

from autoshard.plan.plan_content import json_data
from cost_model.mesh import MeshSpec
from passes.layout.layout import Halo, Layout, Span
from passes.redistribution.lower_redistribute import collective_nodes
from passes.redistribution.redistribute import Redistributor
from passes.redistribution.steps import HaloExchange, HaloReduce
from tests.redistribution.layouts import (
    creatable,
    cut,
    link_prices,
    parts_of,
    random_layout,
    rank_graph,
    run_plan,
    totals,
)

MESHES = [{"a": 2}, {"a": 5}, {"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 2, "c": 2}]


def random_spans(rng: random.Random, length: int, parts: int) -> tuple[Span, ...]:
    """Any: near or far, overlapping, empty, with gaps, and every other time around the ends, even all around."""
    beyond = rng.choice([0, length])
    ends = (sorted(rng.randint(-beyond, length + beyond) for _ in range(2)) for _ in range(parts))
    return tuple((lo, hi) if lo < hi else (0, 0) for lo, hi in ends)


def with_halos(rng: random.Random, layout: Layout, shape: list[int], mesh: MeshSpec, summed: bool) -> Layout:
    halos = [
        Halo(random_spans(rng, length, mesh.size(*axes)), summed) if axes and rng.random() < 0.7 else None
        for length, axes in zip(shape, layout.dims, strict=True)
    ]
    sizes = [s if h is None else None for s, h in zip(layout.sizes, halos, strict=True)]
    return Layout.of(shape, mesh, layout.dims, layout.partial, sizes, halos)


def random_shape(rng: random.Random) -> list[int]:
    return [rng.choice([1, 2, 3, 5, 8, 11]) for _ in range(rng.randint(1, 3))]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_exchanges(axes: dict[str, int]) -> None:
    mesh = MeshSpec(axes)
    exchanges = 0
    for seed in range(100):
        rng = random.Random(seed)
        shape = random_shape(rng)
        src = random_layout(rng, shape, mesh, ["sum"], 0.5)
        dst = random_layout(rng, shape, mesh, ["sum"], 0.0)
        dims = src.dims if rng.random() < 0.7 else dst.dims
        dst = with_halos(rng, Layout(dims), shape, mesh, summed=False)
        value = torch.randint(-99, 99, shape, generator=torch.manual_seed(seed))
        plan = Redistributor(mesh, link_prices(mesh)).plan(src, dst, shape, 8)
        exchanges += sum(isinstance(step, HaloExchange) for step in plan.steps)
        results = run_plan(plan, parts_of(value, src, mesh, rng), shape, mesh)
        for rank, result in enumerate(results):
            spans = [dst.interval(shape, mesh, d, rank) for d in range(len(shape))]
            assert torch.equal(result, cut(value, spans)), (seed, rank, str(src), dst)
    assert exchanges > 5


def summands(src: Layout, shape: list[int], mesh: MeshSpec, seed: int) -> tuple[list[Tensor], Tensor]:
    """Random parts, the same on ranks that `src` does not tell apart; and what they add up to."""
    made: dict[tuple[int, ...], Tensor] = {}
    total = torch.zeros(shape, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    for rank in range(mesh.device_count):
        home = tuple(mesh.coordinate(rank)[axis] for axis in src.axes)
        spans = [src.interval(shape, mesh, d, rank) for d in range(len(shape))]
        if home not in made:
            made[home] = torch.randint(-9, 9, [hi - lo for lo, hi in spans], generator=generator)
            for place in itertools.product(*(range(lo, hi) for lo, hi in spans)):
                at = tuple(p % n for p, n in zip(place, shape, strict=True))
                total[at] += made[home][tuple(p - lo for p, (lo, _) in zip(place, spans, strict=True))]
        parts.append(made[home])
    return parts, total


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_reductions(axes: dict[str, int]) -> None:
    mesh = MeshSpec(axes)
    reductions = 0
    for seed in range(60):
        rng = random.Random(seed)
        shape = random_shape(rng)
        src = random_layout(rng, shape, mesh, ["sum"], 0.5)
        src = with_halos(rng, src, shape, mesh, summed=True)
        dst = creatable(src, random_layout(rng, shape, mesh, ["sum"], 0.5))
        parts, total = summands(src, shape, mesh, seed)
        plan = Redistributor(mesh, link_prices(mesh)).plan(src, dst, shape, 8)
        reductions += sum(isinstance(step, HaloReduce) for step in plan.steps)
        results = run_plan(plan, parts, shape, mesh)
        wanted = parts_of(total, Layout(dst.dims, (), dst.sizes), mesh, rng)
        for rank, (result, want) in enumerate(zip(totals(results, dst, mesh), wanted, strict=True)):
            assert torch.equal(result, want), (seed, rank, src, str(dst))
    assert reductions > 5


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_halos_are_trimmed_for_nothing(axes: dict[str, int]) -> None:
    """Who holds more than a split, or than another halo, cuts it out of that."""
    mesh = MeshSpec(axes)
    for seed in range(40):
        rng = random.Random(seed)
        shape = random_shape(rng)
        split = random_layout(rng, shape, mesh, ["sum"], 0.0)
        plain = Layout(split.dims, (), split.sizes)
        narrow, wide = (
            Layout.of(
                shape,
                mesh,
                plain.dims,
                sizes=plain.sizes,
                halos=[
                    Halo(widened(plain.split_sizes(shape, mesh, d), by), summed=False)
                    if plain.dims[d]
                    else None
                    for d in range(len(shape))
                ],
            )
            for by in (1, 2)
        )
        value = torch.randint(-99, 99, shape, generator=torch.manual_seed(seed))
        for dst in (narrow, plain):
            plan = Redistributor(mesh, link_prices(mesh)).plan(wide, dst, shape, 8)
            assert plan.seconds == 0.0
            results = run_plan(plan, parts_of(value, wide, mesh, rng), shape, mesh)
            for result, want in zip(results, parts_of(value, dst, mesh, rng), strict=True):
                assert torch.equal(result, want), (seed, wide, str(dst))


def widened(sizes: Sequence[int], by: int) -> tuple[Span, ...]:
    ends = list(itertools.accumulate(sizes))
    return tuple((end - size - by, end + by) for size, end in zip(sizes, ends, strict=True))


def test_price_and_messages_by_hand() -> None:
    """12 rows of 5 float64 over 3 ranks; each needs one row of each neighbour: the middle one receives 2 rows."""
    mesh = MeshSpec({"a": 3})
    src = Layout((("a",), ()))
    dst = Layout.of((12, 5), mesh, (("a",), ()), halos=[Halo(((0, 5), (3, 9), (7, 12)), summed=False), None])
    plan = Redistributor(mesh, link_prices(mesh)).plan(src, dst, (12, 5), 8)
    assert [type(step) for step in plan.steps] == [HaloExchange]
    assert plan.step_nbytes == (2 * 5 * 8,)
    value = torch.arange(60).reshape(12, 5)
    sent = [
        [list(node.args[1:3]) for node in collective_nodes(rank_graph(part, plan, (12, 5), mesh, rank).graph)]
        for rank, part in enumerate(value.split(4))
    ]
    # (received from each rank, sent to each), in elements
    assert sent == [[[[0, 5, 0], [0, 5, 0]]], [[[5, 0, 5], [5, 0, 5]]], [[[0, 5, 0], [0, 5, 0]]]]


def test_nothing_foreign_needs_no_collective() -> None:
    """A stride that leaves gaps: every rank drops rows of its own."""
    mesh = MeshSpec({"a": 2})
    dst = Layout.of((8,), mesh, (("a",),), halos=[Halo(((0, 3), (4, 7)), summed=False)])
    plan = Redistributor(mesh, link_prices(mesh)).plan(Layout((("a",),)), dst, (8,), 8)
    assert plan.seconds == 0.0
    assert not collective_nodes(rank_graph(torch.arange(4), plan, (8,), mesh, 0).graph)


def test_spans_that_are_a_split_are_that_split() -> None:
    mesh = MeshSpec({"a": 3})
    same = Layout.of((8,), mesh, (("a",),), halos=[Halo(((0, 3), (3, 6), (6, 8)), summed=False)])
    assert same == Layout((("a",),))
    other = Layout.of((8,), mesh, (("a",),), halos=[Halo(((0, 1), (0, 0), (1, 8)), summed=False)])
    assert other == Layout.of((8,), mesh, (("a",),), sizes=[(1, 0, 7)])


def test_text_and_file() -> None:
    read = Layout((("a",), ()), halos=(Halo(((0, 5), (3, 8)), summed=False), None))
    left = Layout((("a",), ()), halos=(Halo(((0, 5), (3, 8)), summed=True), None))
    assert read.format((8, 2), "f32") == "f32[8@a{0:5,3:8}, 2]"
    assert left.format((8, 2), "f32") == "f32[8@a{0:5+3:8}, 2]"
    for layout in (read, left):
        assert msgspec.convert(json_data(layout), Layout) == layout
