"""Which steps a redistribution takes, and their seconds, against hand arithmetic."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import networkx as nx
import numpy as np
import pytest

from cost_model.errors import ProfileError, ShardingError
from cost_model.mesh import MeshSpec
from passes.layout.layout import Halo, Layout
from passes.redistribution.dim_splits import DimSpec
from passes.redistribution.moves import as_layout
from passes.redistribution.redistribute import Redistributor
from passes.redistribution.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Redistribution,
    ReduceScatter,
    Reshard,
    Slice,
    ToPartial,
)
from passes.redistribution.universe import UniverseKey, build_universe
from tests.redistribution.layouts import creatable, link_prices, random_layout

R1, R2 = Layout.replicated(1), Layout.replicated(2)
ROWS, COLUMNS = Layout((("a",), ())), Layout(((), ("a",)))
SUM = Layout(((), ()), (("a", "sum"),))
ONE_AXIS = MeshSpec({"a": 4})
TWO_AXES = MeshSpec({"a": 4, "b": 2})


@dataclass(frozen=True)
class Rates:
    """Seconds: a start-up of 1, and a rate a byte by kind; `asked` records the questions."""

    rates: Mapping[str, float] = field(
        default_factory=lambda: {
            "all_gather": 1.0,
            "reduce_scatter": 1.0,
            "all_reduce": 2.0,
            "all_to_all": 1.0,
            "point_to_point": 1.0,
        }
    )
    start: float = 1.0
    asked: list[tuple[str, tuple[str, ...], int]] = field(default_factory=list)

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        self.asked.append((kind, axes, nbytes))
        return self.start + self.rates[kind] * nbytes


def steps(plan: Redistribution) -> list[tuple[object, ...]]:
    return [
        (type(s), s.axes, n, t)
        for s, n, t in zip(plan.steps, plan.step_nbytes, plan.step_seconds, strict=True)
    ]


def plan(
    src: Layout, dst: Layout, shape: tuple[int, ...], mesh: MeshSpec = ONE_AXIS, rates: Rates | None = None
) -> Redistribution:
    """With items of 1 byte."""
    return Redistributor(mesh, rates or Rates()).plan(src, dst, shape, 1)


def test_equal_layouts_need_no_step() -> None:
    assert plan(SUM, SUM, (8, 8)) == Redistribution((), 0.0, (), ())


def test_what_is_avoided_is_no_way_for_any_tensor() -> None:
    """16 bytes of a rank exchanged, or all 64 gathered and sliced."""
    free = Redistributor(ONE_AXIS, Rates())
    spared = free.avoiding(frozenset({"all_to_all"})).joining(())
    assert [kind for kind, *_ in steps(free.plan(ROWS, COLUMNS, (8, 8), 1))] == [AllToAll]
    assert steps(spared.plan(ROWS, COLUMNS, (8, 8), 1)) == [
        (AllGather, ("a",), 64, 65.0),
        (Slice, ("a",), 0, 0.0),
    ]
    assert spared.matrix([ROWS], [COLUMNS], (8, 8), 1)[0, 0] == 65.0


def test_slicing_and_making_partial_are_free() -> None:
    assert steps(plan(R2, ROWS, (8, 8))) == [(Slice, ("a",), 0, 0.0)]
    assert steps(plan(R2, SUM, (8, 8))) == [(ToPartial, ("a",), 0, 0.0)]
    assert steps(plan(R1, Layout((("b", "a"),)), (16,), TWO_AXES)) == [(Slice, ("b", "a"), 0, 0.0)]


def test_all_gather_counts_the_gathered_tensor_and_its_padding() -> None:
    assert steps(plan(ROWS, R2, (8, 8))) == [(AllGather, ("a",), 64, 65.0)]
    # 9 over 4 is 3, 3, 3, 0: twelve rows of 8 travel.
    assert steps(plan(ROWS, R2, (9, 8))) == [(AllGather, ("a",), 96, 97.0)]


def test_itemsize_scales_bytes() -> None:
    assert Redistributor(ONE_AXIS, Rates()).plan(ROWS, R2, (8, 8), 4).step_nbytes == (256,)


def test_reductions() -> None:
    assert steps(plan(SUM, R2, (8, 8))) == [(AllReduce, ("a",), 64, 129.0)]
    found = plan(SUM, COLUMNS, (8, 6))  # 6 over 4 is 2, 2, 2, 0: input padded to 8 columns
    assert steps(found) == [(ReduceScatter, ("a",), 64, 65.0)]
    assert isinstance(found.steps[0], ReduceScatter) and (found.steps[0].dim, found.steps[0].op) == (1, "sum")


def test_all_reduce_or_reduce_scatter_and_all_gather_by_price() -> None:
    """All-reduce costs 1 + 3 * 64 = 193, the two others (1 + 64) + (1 + 64) = 130."""
    expensive = Rates(
        {
            "all_gather": 1.0,
            "reduce_scatter": 1.0,
            "all_reduce": 3.0,
            "all_to_all": 1.0,
            "point_to_point": 1.0,
        }
    )
    found = plan(SUM, R2, (8, 8), rates=expensive)
    assert steps(found) == [(ReduceScatter, ("a",), 64, 65.0), (AllGather, ("a",), 64, 65.0)]
    assert found.seconds == 130.0


def test_all_to_all_moves_a_split_between_dims() -> None:
    found = plan(ROWS, COLUMNS, (8, 8))
    assert steps(found) == [(AllToAll, ("a",), 16, 17.0)]
    assert isinstance(found.steps[0], AllToAll) and (found.steps[0].from_dim, found.steps[0].to_dim) == (0, 1)
    # One row over 4 ranks: rank 0 holds all 8 bytes and must send them.
    assert steps(plan(COLUMNS, ROWS, (1, 8))) == [(AllToAll, ("a",), 8, 9.0)]


def test_several_axes_are_one_group() -> None:
    both = Layout((("b", "a"), ()))
    assert steps(plan(both, R2, (8, 8), TWO_AXES)) == [(AllGather, ("b", "a"), 64, 65.0)]
    sums = Layout(((), ()), (("a", "sum"), ("b", "sum")))
    assert steps(plan(sums, R2, (8, 8), TWO_AXES)) == [(AllReduce, ("a", "b"), 64, 129.0)]
    assert steps(plan(sums, both, (8, 8), TWO_AXES)) == [(ReduceScatter, ("b", "a"), 64, 65.0)]


def test_two_groups_where_one_axis_is_slow() -> None:
    """Gather over b moves 8 bytes to 16, over a 16 to 64: cheap links carry most."""

    @dataclass(frozen=True)
    class Slow:
        def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
            return nbytes * (10.0 if "b" in axes else 1.0)

    found = Redistributor(TWO_AXES, Slow()).plan(Layout((("a", "b"), ())), R2, (8, 8), 1)
    assert steps(found) == [(AllGather, ("b",), 16, 160.0), (AllGather, ("a",), 64, 64.0)]


def test_prices_are_asked_for_groups_in_mesh_order() -> None:
    rates = Rates()
    plan(Layout((("b", "a"), ())), R2, (8, 8), TWO_AXES, rates)
    assert {axes for _, axes, _ in rates.asked} == {("a",), ("b",), ("a", "b")}


def test_nesting_order_changes_by_an_exchange_of_shards() -> None:
    found = plan(Layout((("a", "b"),)), Layout((("b", "a"),)), (64,), TWO_AXES)
    assert steps(found) == [(Reshard, ("b", "a"), 8, 9.0)]


def test_a_new_major_axis_is_sliced_then_exchanged() -> None:
    """Gathering 64 bytes over a would cost 65."""
    found = plan(Layout((("a",),)), Layout((("b", "a"),)), (64,), TWO_AXES)
    assert [(s, n) for s, _, n, _ in steps(found)] == [(Slice, 0), (Reshard, 8)]


def test_explicit_sizes() -> None:
    def rows(*sizes: int) -> Layout:
        return Layout.of((12,), ONE_AXIS, (("a",),), sizes=(sizes,))

    assert rows(3, 3, 3, 3) == Layout((("a",),))
    assert steps(plan(R1, rows(6, 2, 2, 2), (12,))) == [(Slice, ("a",), 0, 0.0)]
    dear_start = Rates(start=100.0)
    assert steps(plan(rows(6, 2, 2, 2), R1, (12,), rates=dear_start)) == [(AllGather, ("a",), 24, 124.0)]
    # With a start of 1, evening the shards out first saves padding: 4 + 13 < 25.
    assert [n for _, _, n, _ in steps(plan(rows(6, 2, 2, 2), R1, (12,)))] == [3, 12]
    # The first rank sends half of what it has; the last receives all that it then has.
    assert steps(plan(rows(6, 2, 2, 2), rows(3, 3, 3, 3), (12,))) == [(Reshard, ("a",), 3, 4.0)]
    assert steps(plan(rows(6, 2, 2, 2), rows(0, 4, 4, 4), (12,))) == [(Reshard, ("a",), 6, 7.0)]


def test_explicit_sizes_survive_a_step_on_another_axis() -> None:
    given = (5, 1, 1, 1)
    src = Layout.of((8,), TWO_AXES, (("a",),), (("b", "sum"),), (given,))
    dst = Layout.of((8,), TWO_AXES, (("a",),), (), (given,))
    assert steps(plan(src, dst, (8,), TWO_AXES)) == [(AllReduce, ("b",), 5, 11.0)]


def test_a_minor_split_of_explicit_parts_is_exchanged_over_its_axis_alone() -> None:
    """Over (a, b) both nest in parts 4, 4, 4, 4 of a: ranks with the same a exchange, one element of their two."""
    src = Layout((("a", "b"),))
    dst = Layout.of((16,), TWO_AXES, (("a", "b"),), sizes=((3, 1) * 4,))
    assert steps(plan(src, dst, (16,), TWO_AXES)) == [(Reshard, ("b",), 1, 2.0)]


def test_pending_max_cannot_be_made_but_can_be_kept_and_reduced() -> None:
    peak = Layout(((), ()), (("a", "max"),))
    with pytest.raises(ShardingError, match="pending max or min cannot be made"):
        plan(R2, peak, (8, 8))
    assert Redistributor(ONE_AXIS, Rates()).matrix([R2, SUM, peak], [peak], (8, 8), 1).tolist() == [
        [np.inf],
        [np.inf],
        [0.0],
    ]
    assert steps(plan(peak, ROWS, (8, 8))) == [(ReduceScatter, ("a",), 64, 65.0)]


def test_a_tensor_without_elements_costs_nothing() -> None:
    """Nothing is emitted for it, and no price is asked for."""
    rates = Rates()
    assert plan(ROWS, R2, (0, 8), rates=rates).seconds == 0.0
    assert rates.asked == []


def test_axes_of_size_one_are_never_used() -> None:
    mesh = MeshSpec({"a": 4, "one": 1})
    distances = Redistributor(mesh, Rates()).matrix([R2], [ROWS, Layout((("a", "one"), ()))], (8, 8), 1)
    assert distances.tolist() == [[0.0, np.inf]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e9])
def test_impossible_prices_are_refused(bad: float) -> None:
    with pytest.raises(ProfileError, match=r"all_gather of \d+ bytes over \('a',\) is priced at"):
        plan(ROWS, R2, (8, 8), rates=Rates(start=bad))


@pytest.mark.parametrize("explicit", [0.0, 0.4])
@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 4, "b": 2}, {"a": 2, "b": 3, "c": 2}], ids=str)
def test_matrix_holds_the_seconds_of_plan(axes: dict[str, int], explicit: float) -> None:
    mesh, rng = MeshSpec(axes), random.Random(1)
    for shape in ((12, 8, 4), (7, 1, 5), (16,), (2, 3)):
        redistributor = Redistributor(mesh, link_prices(mesh))
        srcs = [random_layout(rng, shape, mesh, ["sum", "max"], explicit) for _ in range(6)]
        dsts = [creatable(srcs[0], random_layout(rng, shape, mesh, ["sum"], explicit)) for _ in range(6)]
        matrix = redistributor.matrix(srcs, dsts, shape, 4)
        for i, src in enumerate(srcs):
            for j, dst in enumerate(dsts):
                if np.isinf(matrix[i, j]):
                    with pytest.raises(ShardingError):
                        redistributor.plan(src, dst, shape, 4)
                else:
                    found = redistributor.plan(src, dst, shape, 4)
                    assert found.seconds == pytest.approx(matrix[i, j], rel=1e-12)
                    assert found.seconds == sum(found.step_seconds)


@pytest.mark.parametrize("axes", [{"a": 4, "b": 2}, {"a": 2, "b": 3, "c": 2}], ids=str)
def test_seconds_over_each_link_are_those_of_the_steps(axes: dict[str, int]) -> None:
    """Groups along the first axis, alone or with others, communicate over another link."""
    mesh, rng = MeshSpec(axes), random.Random(2)
    link = lambda axes: int("a" in axes)
    redistributor = Redistributor(mesh, link_prices(mesh), link_of=link)
    assert redistributor.link_count == 2
    moved = [0.0, 0.0]
    for shape in ((12, 8, 4), (7, 1, 5), (16,)):
        srcs = [random_layout(rng, shape, mesh, ["sum", "max"], 0.0) for _ in range(6)]
        dsts = [creatable(srcs[0], random_layout(rng, shape, mesh, ["sum"], 0.0)) for _ in range(6)]
        total = redistributor.matrix(srcs, dsts, shape, 4)
        over = redistributor.by_link(srcs, dsts, shape, 4)
        for i, j in np.ndindex(total.shape):
            if np.isinf(total[i, j]):
                assert np.isinf(over[0][i, j]) and over[1][i, j] == 0.0
                continue
            found = redistributor.plan(srcs[i], dsts[j], shape, 4)
            steps = list(zip(found.steps, found.step_seconds, strict=True))
            for number in range(2):
                wanted = sum(s for step, s in steps if step.kind is not None and link(step.axes) == number)
                assert over[number][i, j] == pytest.approx(wanted, rel=1e-12)
                moved[number] += wanted
    assert min(moved) > 0.0


def test_links_are_counted_on_the_mesh() -> None:
    """All groups leave their host, or none does: one link."""
    for link in (lambda axes: 0, lambda axes: 7):
        one = Redistributor(TWO_AXES, link_prices(TWO_AXES), link_of=link)
        assert one.link_count == 1 and one.link(("a",)) == one.link(("a", "b")) == 0
    two = Redistributor(TWO_AXES, link_prices(TWO_AXES), link_of=lambda axes: 7 * ("a" in axes))
    assert [two.link(axes) for axes in (("b",), ("a",), ("b", "a"))] == [0, 1, 1]
    assert two.joining((TWO_AXES.names,)).link_count == two.avoiding(frozenset()).link_count == 2


def test_distances_are_those_of_dijkstra() -> None:
    mesh = MeshSpec({"a": 2, "b": 3})
    prices = link_prices(mesh)
    universe = build_universe(mesh, UniverseKey((DimSpec(0, ()),) * 3, ()))
    payloads = universe.payloads(universe.shard_bytes((6, 5, 4), 1, 4))
    seconds = universe.seconds(payloads, prices.seconds)
    graph = nx.DiGraph()
    for tail, head, weight in zip(universe.tail, universe.head, seconds, strict=True):
        old = graph.get_edge_data(tail, head, {"weight": np.inf})["weight"]
        graph.add_edge(tail, head, weight=min(old, weight))
    layouts = [as_layout(state, (0, 1, 2), 3) for state in universe.states]
    found = Redistributor(mesh, prices).matrix(layouts, layouts, (6, 5, 4), 4)
    for source, lengths in nx.all_pairs_dijkstra_path_length(graph):
        for target, length in lengths.items():
            assert found[source, target] == pytest.approx(length, rel=1e-12)


def test_the_number_of_layouts_of_a_matrix_on_two_axes() -> None:
    """Each axis: nowhere, partial, or one of 3 dims; both on one dim in 2 orders: 5 * 5 + 3."""
    assert len(build_universe(TWO_AXES, UniverseKey((DimSpec(0, ()),) * 3, ())).states) == 28


def test_two_axes_moved_together_are_as_one() -> None:
    """Nowhere, partial, or one of 3 dims; and each way between these costs no less than with the axes apart."""
    key = UniverseKey((DimSpec(0, ()),) * 3, ())
    universe = build_universe(TWO_AXES, key, joined=(TWO_AXES.names,))
    one = build_universe(MeshSpec({"x": 4}), key)
    assert (len(universe.states), len(universe.moves)) == (5, len(one.moves))
    layouts = [as_layout(state, (0, 1, 2), 3) for state in universe.states]
    apart = Redistributor(TWO_AXES, link_prices(TWO_AXES))
    together = apart.joining((TWO_AXES.names,))
    shape = (6, 5, 4)
    assert (together.matrix(layouts, layouts, shape, 4) >= apart.matrix(layouts, layouts, shape, 4)).all()
    with pytest.raises(ShardingError):
        together.plan(Layout((("a",), (), ())), layouts[0], shape, 4)


def test_a_way_that_was_priced_can_be_gone() -> None:
    """From a halo to other dims it leads over the halo's own rows, sizes that only a third layout has. What the search
    was told for all three is what the plan of the two takes."""
    mesh, shape = MeshSpec({"a": 4}), (8, 4, 8, 8)
    held = (None, None, Halo(((0, 5), (3, 8), (0, 0), (0, 0)), summed=False), None)
    halo = Layout.of(shape, mesh, ((), (), ("a",), ()), (), None, held)
    rows = Layout.of(shape, mesh, ((), (), ("a",), ()), (), (None, None, (4, 4, 0, 0), None))
    batch = Layout.of(shape, mesh, (("a",), (), (), ()))
    redistributor = Redistributor(mesh, Rates())
    with pytest.raises(ShardingError):
        redistributor.plan(halo, batch, shape, 4)
    ((priced,), _) = redistributor.matrix([halo, rows], [batch], shape, 4).tolist()
    found = redistributor.plan(halo, batch, shape, 4)
    assert found.seconds == pytest.approx(priced)
    assert [step.after for step in found.steps] == [rows, batch]


def test_two_dims_in_one_collective() -> None:
    """8 x 8 bytes in 4 x 2 parts: one gather of 64, where one after the other takes 32 or 16 besides; sums likewise."""
    both, total = Layout((("a",), ("b",))), Layout(((), ()), (("a", "sum"), ("b", "sum")))
    assert steps(plan(both, R2, (8, 8), TWO_AXES)) == [(AllGather, ("a", "b"), 64, 65.0)]
    assert steps(plan(total, both, (8, 8), TWO_AXES)) == [(ReduceScatter, ("a", "b"), 64, 65.0)]
    turned = Layout((("b",), ("a",)))
    assert steps(plan(total, turned, (8, 8), TWO_AXES)) == [(ReduceScatter, ("b", "a"), 64, 65.0)]
