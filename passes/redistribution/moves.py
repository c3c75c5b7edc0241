"""The moves out of a layout: what one step of a redistribution may do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cost_model.groups import group_ranks, group_shape
from cost_model.mesh import MeshSpec
from passes.ir.routing import Choice
from passes.layout.layout import REDUCE_OPS, ROUTED, JoinedAxes, Layout, Unit, chained, in_units, orders
from passes.redistribution.dim_splits import UNSPLIT, DimSplits, Split, subsets
from passes.redistribution.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    HaloExchange,
    HaloReduce,
    ReduceScatter,
    Reshard,
    ReturnRows,
    SendRows,
    Slice,
    Step,
    ToPartial,
    ToRouted,
    ToSum,
)

Partial = tuple[tuple[str, str], ...]


class State(NamedTuple):
    """A layout over the dims in play: one split per dim, and the partial axes."""

    splits: tuple[Split, ...]
    partial: Partial


class NextStep(NamedTuple):
    """An edge before it is a `Step`. dims are positions among the dims in play."""

    make: type[Step]
    axes: tuple[str, ...]
    dims: tuple[int, ...]
    op: str
    target: State
    share: float | None = (
        None  # what part of the shard is sent or received, where that is known: of halos and sizes
    )


@dataclass(frozen=True)
class Moves:
    """The moves out of a state. This is the definition of what a redistribution may do. joined: axes that are moved
    together, in `dims` as well. routed: axes over which rows may come to count on the rank of their expert, with how
    they are pending then."""

    mesh: MeshSpec
    dims: tuple[DimSplits, ...]
    joined: JoinedAxes = ()
    routed: frozenset[tuple[str, str]] = frozenset()

    def __call__(self, state: State) -> Iterator[NextStep]:
        yield from self.local(state)
        yield from self.gathers_and_exchanges(state)
        yield from self.reductions(state)
        yield from self.of_two_dims(state)
        yield from self.halos(state)
        yield from self.rows(state)

    def local(self, state: State) -> Iterator[NextStep]:
        used = {axis for split in state.splits for axis in split.axes} | {a for a, _ in state.partial}
        free = in_units([axis for axis in self.mesh.real_axes() if axis not in used], self.joined)
        for run in _runs(free):
            for dim, target in self.split_by(state, run):
                yield NextStep(Slice, run, (dim,), "", target)
        for run in _runs(free):
            for dim, splits in enumerate(self.dims):
                if state.splits[dim] == UNSPLIT:
                    for held in splits.halos(run, summed=False):
                        yield NextStep(Slice, run, (dim,), "", _with_split(state, dim, held))
        for dim, splits in enumerate(self.dims):
            for trimmed in splits.trims(state.splits[dim]):
                yield NextStep(Slice, state.splits[dim].axes, (dim,), "", _with_split(state, dim, trimmed))
        for unit in free:
            yield NextStep(ToPartial, unit, (), "sum", _with_partial(state, unit, "sum"))
        if not _routed(state):
            for run in map(chained, subsets([unit for unit in free if self._routed_over(unit)])):
                for op in self._routed_over(run):
                    yield NextStep(ToRouted, run, (), op, _with_partial(state, run, op))

    def gathers_and_exchanges(self, state: State) -> Iterator[NextStep]:
        for dim, splits in enumerate(self.dims):
            for run, coarser in splits.gathers(state.splits[dim]):
                gathered = _with_split(state, dim, coarser)
                yield NextStep(AllGather, run, (dim,), "", gathered)
                for order in orders(run, self.joined):
                    for to_dim, target in self.split_by(gathered, order):
                        if to_dim != dim:
                            yield NextStep(AllToAll, order, (dim, to_dim), "", target)
            for axes, other in splits.reshards(state.splits[dim]):
                share = splits.foreign(state.splits[dim], other)
                yield NextStep(Reshard, axes, (dim,), "", _with_split(state, dim, other), share)

    def of_two_dims(self, state: State) -> Iterator[NextStep]:
        """Gathers and reduce-scatters that undo or make the splits of two dims as one group."""
        for run, dims, gathered in self._gathered_twice(
            state, itertools.combinations(range(len(self.dims)), 2)
        ):
            yield NextStep(AllGather, run, dims, "", gathered)
        for op in sorted({op for _, op in state.partial if op in REDUCE_OPS}):
            units = in_units([axis for axis in self.mesh.names if (axis, op) in state.partial], self.joined)
            for first, second in itertools.permutations(units, 2):
                left = tuple((a, o) for a, o in state.partial if a not in (*first, *second))
                for (i, j), target in self._split_twice(State(state.splits, left), first, second):
                    if i < j:
                        yield NextStep(ReduceScatter, first + second, (i, j), op, target)

    def halos(self, state: State) -> Iterator[NextStep]:
        for dim, splits in enumerate(self.dims):
            split = state.splits[dim]
            moves = [(HaloExchange, other) for other in splits.exchanges(split)]
            moves += [(HaloReduce, other) for other in splits.sums(split)]
            for make, other in moves:
                share = splits.foreign(split, other)
                yield NextStep(make, split.axes, (dim,), "", _with_split(state, dim, other), share)

    def rows(self, state: State) -> Iterator[NextStep]:
        """Rows to the ranks of their experts, and back, of one dim or of two. Ranks share experts over all their axes
        at once. The last dim is no row's place."""
        last = len(self.dims) - 1
        sums = {axis: Choice.of(op) for axis, op in state.partial if op.startswith("sum")}
        few = tuple(axis for axis in self.mesh.names if sums.get(axis))
        if few:
            (choice,) = {sums[axis] for axis in few}
            left = State(state.splits, tuple(p for p in state.partial if p[0] not in few))
            yield NextStep(ToSum, few, (), "sum", _with_partial(left, few, "sum"))
            share = choice.copies(self._ranks(few)) / self.mesh.size(*few) if choice else 1.0
            once = (((dim,), target) for dim, target in self.split_by(left, few))
            twice = (self._split_twice(left, few[:n], few[n:]) for n in range(1, len(few)))
            for dims, target in itertools.chain(once, *twice):
                if max(dims) < last:
                    yield NextStep(ReturnRows, few, dims, "", target, share)
        if _routed(state):
            return
        once = (
            (run, (dim,), _with_split(state, dim, coarser))
            for dim, splits in enumerate(self.dims[:last])
            for run, coarser in splits.gathers(state.splits[dim])
        )
        twice = self._gathered_twice(state, itertools.permutations(range(last), 2))
        for run, dims, gathered in itertools.chain(once, twice):
            if list(run) != sorted(run, key=self.mesh.index):
                continue
            for op in self._routed_over(run):
                choice = Choice.of(op)
                if choice and last - 1 in dims:  # that counts a token's rows
                    continue
                share = choice.copies(self._ranks(run)) / choice.count if choice else 1.0
                yield NextStep(SendRows, run, dims, "", _with_partial(gathered, run, op), share)

    def _ranks(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Of one group along the axes."""
        return group_ranks(group_shape(self.mesh, axes))

    def _split_twice(
        self, state: State, first: tuple[str, ...], second: tuple[str, ...]
    ) -> Iterator[tuple[tuple[int, int], State]]:
        """One dim split by a run, and another by the other."""
        for i, half in self.split_by(state, first):
            for j, target in self.split_by(half, second):
                if i != j:
                    yield (i, j), target

    def _gathered_twice(
        self, state: State, pairs: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[tuple[str, ...], tuple[int, int], State]]:
        """Both dims of a pair less split, each by a part of the run."""
        for i, j in pairs:
            gathers = (self.dims[dim].gathers(state.splits[dim]) for dim in (i, j))
            for (first, coarser), (second, other) in itertools.product(*gathers):
                gathered = _with_split(_with_split(state, i, coarser), j, other)
                yield first + second, (i, j), gathered

    def _routed_over(self, run: tuple[str, ...]) -> list[str]:
        """How rows may be pending over all these axes."""
        return sorted({op for _, op in self.routed if all((axis, op) in self.routed for axis in run)})

    def reductions(self, state: State) -> Iterator[NextStep]:
        for op in sorted({op for _, op in state.partial if op in REDUCE_OPS}):
            axes = [axis for axis in self.mesh.names if (axis, op) in state.partial]
            for chosen in map(chained, subsets(in_units(axes, self.joined))):
                left = tuple((a, o) for a, o in state.partial if a not in chosen)
                reduced = State(state.splits, left)
                yield NextStep(AllReduce, chosen, (), op, reduced)
                for order in orders(chosen, self.joined):
                    for dim, target in self.split_by(reduced, order):
                        yield NextStep(ReduceScatter, order, (dim,), op, target)

    def split_by(self, state: State, run: tuple[str, ...]) -> Iterator[tuple[int, State]]:
        for dim, splits in enumerate(self.dims):
            for finer in splits.refinements(state.splits[dim], run):
                yield dim, _with_split(state, dim, finer)


def _runs(units: list[Unit]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(units) + 1):
        yield from map(chained, itertools.permutations(units, count))


def _routed(state: State) -> list[str]:
    return [axis for axis, op in state.partial if op.startswith(ROUTED)]


def _with_partial(state: State, axes: tuple[str, ...], op: str) -> State:
    return State(state.splits, tuple(sorted((*state.partial, *((axis, op) for axis in axes)))))


def _with_split(state: State, dim: int, split: Split) -> State:
    return State((*state.splits[:dim], split, *state.splits[dim + 1 :]), state.partial)


def as_layout(state: State, dims: tuple[int, ...], ndim: int) -> Layout:
    """The layout of an `ndim`-dimensional tensor whose dims in play are `dims`."""
    at = dict(zip(dims, state.splits, strict=True))
    splits = [at.get(dim, UNSPLIT) for dim in range(ndim)]
    axes, sizes, halos = (tuple(column) for column in zip(*splits, strict=True)) if splits else ((), (), ())
    return Layout(axes, state.partial, sizes, halos)


def as_state(layout: Layout, dims: tuple[int, ...]) -> State:
    """Inverse of `as_layout`."""
    return State(tuple(Split(layout.dims[d], layout.sizes[d], layout.halos[d]) for d in dims), layout.partial)


def as_step(state: State, move: NextStep, dims: tuple[int, ...], ndim: int) -> Step:
    """`move` out of `state`, of an `ndim`-dimensional tensor whose dims in play are `dims`."""
    fields: dict[str, object] = {
        "before": as_layout(state, dims, ndim),
        "after": as_layout(move.target, dims, ndim),
        "axes": move.axes,
    }
    names = ("from_dim", "to_dim") if move.make is AllToAll else ("dim",)
    fields.update(zip(names, (dims[d] for d in move.dims), strict=False))
    if move.make in (AllReduce, ReduceScatter):
        fields["op"] = move.op
    return move.make(**fields)  # type: ignore[arg-type]
