"""Emitted redistributions, simulated: every rank must hold its shard of the same global tensor."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import fx

from cost_model.mesh import MeshSpec, simulated_groups
from passes.layout.layout import Layout
from passes.redistribution.lower_redistribute import collective_nodes, emit
from passes.redistribution.redistribute import Redistributor
from passes.redistribution.steps import CollectiveSeconds
from tests.redistribution.layouts import (
    StartPrices,
    creatable,
    link_prices,
    parts_of,
    random_layout,
    rank_graph,
    run_plan,
    totals,
)

MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}]


def check(
    mesh: MeshSpec,
    src: Layout,
    dst: Layout,
    value: torch.Tensor,
    seed: int = 0,
    prices: CollectiveSeconds | None = None,
) -> None:
    rng = random.Random(seed)
    redistributor = Redistributor(mesh, prices or link_prices(mesh))
    plan = redistributor.plan(src, dst, value.shape, value.element_size())
    assert (plan.steps[0].before, plan.steps[-1].after) == (src, dst) if plan.steps else src == dst
    locals_ = parts_of(value, src, mesh, rng)
    results = run_plan(plan, locals_, value.shape, mesh)
    wanted = parts_of(value, Layout(dst.dims, (), dst.sizes), mesh, rng)
    trail = [f"{type(s).__name__}{s.axes}" for s in plan.steps]
    for rank, (result, want) in enumerate(zip(totals(results, dst, mesh), wanted, strict=True)):
        assert result.dtype == value.dtype
        assert torch.equal(result, want), (rank, str(src), str(dst), trail, result, want)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("explicit", [0.0, 0.5])
def test_random_layouts(axes: dict[str, int], explicit: float) -> None:
    mesh = MeshSpec(axes)
    for seed in range(60):
        rng = random.Random(seed)
        shape = [rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 11]) for _ in range(rng.randint(1, 3))]
        src = random_layout(rng, shape, mesh, ["sum", "max", "min"], explicit)
        dst = creatable(src, random_layout(rng, shape, mesh, ["sum", "max", "min"], explicit))
        check(mesh, src, dst, torch.randint(-99, 99, shape, generator=torch.manual_seed(seed)), seed)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_every_pair_of_default_layouts(axes: dict[str, int]) -> None:
    """A vector of 5: nested uneven, dims smaller than the mesh."""
    mesh = MeshSpec(axes)
    layouts = {
        str(x): x for x in (random_layout(random.Random(s), [5, 3], mesh, ["sum"], 0) for s in range(80))
    }
    rng = random.Random(0)
    pairs = [(s, d) for s in layouts.values() for d in layouts.values()]
    for src, dst in rng.sample(pairs, min(len(pairs), 80)):
        check(mesh, src, dst, torch.arange(15).reshape(5, 3))


@pytest.mark.parametrize("length", [16, 11], ids=["even", "uneven"])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_nesting_order_of_three_axes(dim: int, length: int) -> None:
    """The group's order is the mesh's, whatever the layout's: three axes can be a cyclic shift apart."""
    mesh = MeshSpec({"a": 2, "b": 2, "c": 2})
    value = torch.arange(length * 8).reshape((length, 8) if dim == 0 else (8, length))
    sums = Layout(((), ()), (("a", "sum"), ("b", "sum"), ("c", "sum")))
    for axes in itertools.permutations("abc"):
        split = Layout((axes, ()) if dim == 0 else ((), axes))
        other = Layout(((), axes) if dim == 0 else (axes, ()))
        for src, dst in [(split, Layout.replicated(2)), (sums, split), (split, other)]:
            plan = Redistributor(mesh, StartPrices()).plan(src, dst, value.shape, 8)
            assert [step.axes for step in plan.steps] == [axes]
            check(mesh, src, dst, value, prices=StartPrices())


@pytest.mark.parametrize("dim", [0, 1])
def test_an_all_to_all_may_turn_the_order_of_axes(dim: int) -> None:
    """Even parts leave in one order and are put together in another."""
    mesh = MeshSpec({"a": 2, "b": 2, "c": 2})
    value = torch.arange(16 * 8).reshape((16, 8) if dim == 0 else (8, 16))
    for axes, turned in itertools.permutations(itertools.permutations("abc"), 2):
        src = Layout((axes, ()) if dim == 0 else ((), axes))
        dst = Layout(((), turned) if dim == 0 else (turned, ()))
        plan = Redistributor(mesh, StartPrices()).plan(src, dst, value.shape, 8)
        assert [step.name for step in plan.steps] == ["all_to_all"]
        check(mesh, src, dst, value, prices=StartPrices())


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int16, torch.int32, torch.uint32, torch.bfloat16, torch.float32, torch.float64],
)
def test_dtypes(dtype: torch.dtype) -> None:
    mesh = MeshSpec({"a": 2, "b": 2})
    value = (torch.arange(35).reshape(5, 7) % 3).to(dtype)
    a_b, b_a, rows, columns = (
        Layout((("a", "b"), ())),
        Layout((("b", "a"), ())),
        Layout((("a",), ())),
        Layout(((), ("a",))),
    )
    for src, dst in [(a_b, Layout.replicated(2)), (a_b, b_a), (rows, columns), (Layout.replicated(2), a_b)]:
        check(mesh, src, dst, value)


@pytest.mark.parametrize(
    ("dtype", "sent"),
    [
        (torch.float8_e5m2, torch.uint8),
        (torch.int16, torch.int32),
        (torch.uint16, torch.int32),
        (torch.uint32, torch.int64),
        (torch.uint64, torch.int64),
    ],
)
def test_what_backends_do_not_send_travels_as_another_dtype(dtype: torch.dtype, sent: torch.dtype) -> None:
    mesh, graph, layout = MeshSpec({"a": 2}), fx.Graph(), Layout((("a",), ()))
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 7, dtype=dtype)
    for dst in (Layout.replicated(2), Layout(((), ("a",)))):
        steps = Redistributor(mesh, StartPrices()).plan(layout, dst, (6, 7), 1).steps
        found = emit(graph, x, steps, (6, 7), mesh, 0, simulated_groups(mesh), {})
        assert found.meta["val"].dtype == dtype
    assert [n.meta["val"].dtype for n in collective_nodes(graph)] == [sent] * 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype: torch.dtype) -> None:
    """Even and uneven, summed and not; scalars too."""
    mesh = MeshSpec({"a": 2, "b": 2})
    layouts = (
        Layout((("a", "b"), ())),
        Layout((("a",), ("b",))),
        Layout((("b",), ()), (("a", "sum"),)),
        Layout(((), ()), (("a", "sum"), ("b", "sum"))),
        Layout.replicated(2),
    )
    for shape in ((4, 8), (5, 7)):
        real, imaginary = torch.randint(-9, 9, (2, *shape), generator=torch.manual_seed(0))
        for src, dst in itertools.product(layouts, layouts):
            check(mesh, src, creatable(src, dst), torch.complex(real.double(), imaginary.double()).to(dtype))
    check(mesh, Layout((), (("a", "sum"),)), Layout(()), torch.tensor(3 - 2j, dtype=dtype))


def test_scalars_and_empty_tensors() -> None:
    mesh = MeshSpec({"a": 2, "b": 2})
    check(mesh, Layout((), (("a", "sum"),)), Layout(()), torch.tensor(3))
    check(mesh, Layout(()), Layout((), (("a", "sum"), ("b", "sum"))), torch.tensor(3))
    for src in (Layout((("a",), ())), Layout(((), ()), (("a", "sum"),)), Layout(((), ("a", "b")))):
        for dst in (Layout.replicated(2), Layout((("b",), ())), Layout(((), ("a",)))):
            check(mesh, src, dst, torch.zeros(0, 3, dtype=torch.int64))


def test_a_group_without_elements_is_silent() -> None:
    """2 rows over a=4 leave a=2 and a=3 nothing to gather along b; the others do gather."""
    mesh = MeshSpec({"a": 4, "b": 2})
    src, dst = Layout((("a",), ("b",))), Layout((("a",), ()))
    value = torch.arange(12).reshape(2, 6)
    check(mesh, src, dst, value)
    plan = Redistributor(mesh, link_prices(mesh)).plan(src, dst, (2, 6), 8)
    locals_ = parts_of(value, src, mesh, random.Random(0))
    counts = [
        len(collective_nodes(rank_graph(x, plan, (2, 6), mesh, r).graph)) for r, x in enumerate(locals_)
    ]
    assert counts == [1, 1, 1, 1, 0, 0, 0, 0]


def emitted(axes: dict[str, int], src: Layout, dst: Layout, shape: tuple[int, ...]) -> list[str]:
    """Names of the ops of rank 0's graph."""
    mesh = MeshSpec(axes)
    plan = Redistributor(mesh, link_prices(mesh)).plan(src, dst, shape, 4)
    local = torch.zeros(src.local_shape(shape, mesh, 0))
    graph = rank_graph(local, plan, shape, mesh, 0).graph
    return [n.target._opname for n in graph.nodes if n.op == "call_function" and "wait" not in n.name]


def test_emitted_ops_of_even_shards() -> None:
    """No padding, no cat; along dim 0 the collective alone."""
    rows, columns, whole = Layout((("a",), ())), Layout(((), ("a",))), Layout.replicated(2)
    partial = Layout(((), ()), (("a", "sum"),))
    assert emitted({"a": 4}, rows, whole, (8, 8)) == ["all_gather_into_tensor"]
    assert emitted({"a": 4}, partial, rows, (8, 8)) == ["reduce_scatter_tensor"]
    assert emitted({"a": 4}, partial, whole, (8, 8)) == ["all_reduce"]
    assert emitted({"a": 4}, whole, rows, (8, 8)) == ["slice"]
    assert emitted({"a": 4}, columns, whole, (8, 8)) == [
        "all_gather_into_tensor",
        "view",
        "permute",
        "clone",
        "view",
    ]
    assert emitted({"a": 4}, partial, columns, (8, 8)) == [
        "view",
        "permute",
        "clone",
        "view",
        "reduce_scatter_tensor",
    ]


def test_uneven_chunks_need_one_slice_or_pad() -> None:
    """However many ranks there are: torch.chunk's padded parts put together are a prefix."""
    rows, whole = Layout((("a",), ())), Layout.replicated(2)
    partial = Layout(((), ()), (("a", "sum"),))
    assert emitted({"a": 8}, rows, whole, (13, 8)) == ["all_gather_into_tensor", "slice"]
    assert emitted({"a": 8}, partial, rows, (13, 8)) == ["constant_pad_nd", "reduce_scatter_tensor"]


def test_nodes_carry_meta_and_local_values() -> None:
    mesh = MeshSpec({"a": 3})
    src, dst, shape = Layout(((), ("a",))), Layout((("a",), ())), (4, 5)
    plan = Redistributor(mesh, link_prices(mesh)).plan(src, dst, shape, 4)
    for rank in range(3):
        graph = rank_graph(torch.zeros(src.local_shape(shape, mesh, rank)), plan, shape, mesh, rank).graph
        new = [n for n in graph.nodes if n.op == "call_function"]
        assert all(n.meta["phase"] == "forward" for n in new)
        assert tuple(new[-1].meta["val"].shape) == dst.local_shape(shape, mesh, rank)


def test_the_wrong_local_shape_is_refused() -> None:
    mesh = MeshSpec({"a": 2})
    plan = Redistributor(mesh, link_prices(mesh)).plan(Layout((("a",),)), Layout(((),)), (4,), 4)
    with pytest.raises(AssertionError, match="layout says"):
        rank_graph(torch.zeros(3), plan, (4,), mesh, 0)
