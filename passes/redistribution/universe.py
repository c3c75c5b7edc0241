"""The graph whose nodes are layouts and whose edges are steps; and shortest paths in it for one shape: seconds from
some of its states to all, and the moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cost_model.deadline import NEVER, Deadline
from cost_model.mesh import MeshSpec
from passes.ir.routing import rows_share
from passes.layout.layout import ROUTED, JoinedAxes, Layout, nested_sizes
from passes.redistribution.dim_splits import UNSPLIT, DimSpec, DimSplits, Split, sort_key
from passes.redistribution.moves import Moves, NextStep, Partial, State, as_state, as_step
from passes.redistribution.steps import PAYLOAD_BYTES, Step

Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


class UniverseKey(NamedTuple):
    """dims: one spec per dim in play. reduced: (axis, op) other than sum, which cannot be created."""

    dims: tuple[DimSpec, ...]
    reduced: Partial


def universe_key(layouts: Sequence[Layout], shape: Sequence[int]) -> tuple[tuple[int, ...], UniverseKey]:
    """(dims in play, what decides the moves) between `layouts` of a tensor of global `shape`. Dims of length 1 are in
    play only if a layout splits them."""
    used = {dim for layout in layouts for dim, axes in enumerate(layout.dims) if axes}
    dims = tuple(d for d, length in enumerate(shape) if length > 1 or d in used)
    reduced = tuple(sorted({p for layout in layouts for p in layout.partial if p[1] != "sum"}))
    return dims, UniverseKey(tuple(_dim_spec(layouts, shape[d], d) for d in dims), reduced)


def _dim_spec(layouts: Sequence[Layout], length: int, dim: int) -> DimSpec:
    splits = {Split(x.dims[dim], x.sizes[dim], x.halos[dim]) for x in layouts}
    explicit = sorted((s for s in splits if s.sizes is not None or s.halo is not None), key=sort_key)
    return DimSpec(length, tuple(explicit)) if explicit else DimSpec(0, ())


@dataclass(frozen=True)
class Universe:
    """states and the moves between them, as arrays over moves sorted by where they lead.

    split_ids: [states, dims in play], into `splits`. tail, head: [moves], state numbers.
    price: [moves], into `prices`: (collective, axes of the group in mesh order), None for free.
    heads: the distinct heads; starts: where each one's moves begin.
    shared: positions of the moves between cuts of one dim over the same axes; share: for each of
    them, the part of the shard before it that the busiest rank sends or receives. Other moves send all of it.
    """

    mesh: MeshSpec
    states: list[State]
    index: dict[State, int]
    splits: list[Split]
    split_ids: _Ints
    moves: list[NextStep]
    tail: _Ints
    head: _Ints
    price: _Ints
    prices: list[tuple[str, tuple[str, ...]] | None]
    heads: _Ints
    starts: _Ints
    shared: _Ints
    share: Floats

    def shard_bytes(self, lengths: tuple[int, ...], others: int, itemsize: int) -> _Ints:
        """[states]: bytes of the largest shard. `others`: product of the lengths not in play."""
        total = np.full(len(self.states), others * itemsize, dtype=np.int64)
        counts = [tuple(self.mesh.size(a) for a in split.axes) for split in self.splits]
        for dim, length in enumerate(lengths):
            used = np.unique(self.split_ids[:, dim])
            largest = np.zeros(len(self.splits), dtype=np.int64)
            for i in used:
                _, sizes, halo = self.splits[i]
                sizes = sizes if halo is None else halo.sizes
                largest[i] = max(nested_sizes(length, counts[i]) if sizes is None else sizes)
            total *= largest[self.split_ids[:, dim]]
        return total

    @cached_property
    def counted(self) -> Floats:
        """[states]: what part of its shard a rank holds, where rows count on the rank of their expert."""
        return np.array([rows_share(state.partial, self.mesh) for state in self.states])

    def payloads(self, shard_bytes: _Ints) -> _Ints:
        """[moves]: the bytes each move is priced by; 0 for free ones."""
        payload = np.zeros(len(self.tail), dtype=np.int64)
        for i, key in enumerate(self.prices):
            if key is not None:
                where = np.flatnonzero(self.price == i)
                before, after = shard_bytes[self.tail[where]], shard_bytes[self.head[where]]
                payload[where] = PAYLOAD_BYTES[key[0]](before, after, self.mesh.size(*key[1]))
        payload[self.shared] = np.rint(self.share * shard_bytes[self.tail[self.shared]])
        return payload

    def seconds(self, payloads: _Ints, price: Callable[[str, tuple[str, ...], int], float]) -> Floats:
        """[moves]: seconds of each move; every distinct (collective, axes, bytes) is asked once."""
        seconds = np.zeros(len(payloads))
        for i, key in enumerate(self.prices):
            if key is not None:
                where = np.flatnonzero(self.price == i)
                distinct, inverse = np.unique(payloads[where], return_inverse=True)
                found = np.array([price(*key, int(nbytes)) for nbytes in distinct])
                seconds[where] = found[inverse]
        return seconds

    def relax(self, seconds: Floats, distance: Floats) -> Floats:
        """One round of Bellman-Ford over [states, sources]: distances with one more step allowed."""
        reached = np.minimum.reduceat(distance[self.tail] + seconds[:, None], self.starts, axis=0)
        closer = distance.copy()
        closer[self.heads] = np.minimum(distance[self.heads], reached)
        return closer


def build_universe(
    mesh: MeshSpec, key: UniverseKey, joined: JoinedAxes = (), deadline: Deadline = NEVER
) -> Universe:
    """Every state that can be reached from the replicated one, or from the partial `key.reduced`.

    joined: axes that are moved together. Raises OutOfTime.
    """
    routed = frozenset(pending for pending in key.reduced if pending[1].startswith(ROUTED))
    expand = Moves(mesh, tuple(DimSplits(mesh, spec, joined) for spec in key.dims), joined, routed)
    plain = (UNSPLIT,) * len(key.dims)
    partials = [p for p in _partials(key.reduced) if all(_alike(p, run) for run in joined)]
    held = itertools.product(partials, _summands(expand.dims))
    states = [State(splits or plain, partial) for partial, splits in held if _disjoint(splits, partial)]
    index = {state: i for i, state in enumerate(states)}
    moves: list[tuple[int, int, NextStep]] = []
    for tail, state in enumerate(states):  # `states` grows meanwhile
        # States from one look at the clock to the next.
        if tail % 256 == 0:
            deadline.check()
        for move in expand(state):
            head = index.setdefault(move.target, len(states))
            if head == len(states):
                states.append(move.target)
            moves.append((tail, head, move))
    moves.sort(key=lambda item: item[1])  # stable: ties keep the order of expansion
    return _universe(mesh, states, index, moves)


def _partials(reduced: Partial) -> list[Partial]:
    """Every choice of axes still partial, the sum ones aside."""
    counts = range(len(reduced) + 1)
    chosen = itertools.chain.from_iterable(itertools.combinations(reduced, n) for n in counts)
    return [c for c in chosen if len({axis for axis, _ in c}) == len(c)]


def _alike(partial: Partial, axes: tuple[str, ...]) -> bool:
    """Whether all of `axes`, or none of them, await the same reduction."""
    ops = dict(partial)
    return len({ops.get(axis) for axis in axes}) == 1


def _summands(dims: tuple[DimSplits, ...]) -> list[tuple[Split, ...]]:
    """Every choice of dims that hold summands of a halo, the others unsplit: nothing leads to these."""
    options = [
        [UNSPLIT, *(s for s in splits.spec.explicit if s.halo is not None and s.halo.summed)]
        for splits in dims
    ]
    return list(itertools.product(*options))


def _disjoint(splits: tuple[Split, ...], partial: Partial) -> bool:
    axes = [axis for split in splits for axis in split.axes] + [axis for axis, _ in partial]
    return len(set(axes)) == len(axes)


def _universe(
    mesh: MeshSpec, states: list[State], index: dict[State, int], moves: list[tuple[int, int, NextStep]]
) -> Universe:
    splits: dict[Split, int] = {}
    ids = [[splits.setdefault(split, len(splits)) for split in state.splits] for state in states]
    prices: dict[tuple[str, tuple[str, ...]] | None, int] = {}
    groups: dict[tuple[Any, tuple[str, ...]], int] = {}
    price: list[int] = []
    for _, _, move in moves:
        seen = groups.get((move.make, move.axes))
        if seen is None:
            axes = tuple(sorted(move.axes, key=mesh.index))
            entry = None if move.make.kind is None else (move.make.kind, axes)
            seen = groups[move.make, move.axes] = prices.setdefault(entry, len(prices))
        price.append(seen)
    head = np.array([h for _, h, _ in moves], dtype=np.int64)
    shared = [(i, move.share) for i, (_, _, move) in enumerate(moves) if move.share is not None]
    heads, starts = np.unique(head, return_index=True)
    return Universe(
        mesh=mesh,
        states=states,
        index=index,
        splits=list(splits),
        split_ids=np.array(ids, dtype=np.int64).reshape(len(states), -1),
        moves=[move for _, _, move in moves],
        tail=np.array([t for t, _, _ in moves], dtype=np.int64),
        head=head,
        price=np.array(price, dtype=np.int64),
        prices=list(prices),
        heads=heads,
        starts=starts,
        shared=np.array([i for i, _ in shared], dtype=np.int64),
        share=np.array([share for _, share in shared], dtype=np.float64),
    )


def step_problems(
    held: Layout,
    wanted: Layout,
    steps: Sequence[Step],
    shape: Sequence[int],
    mesh: MeshSpec,
    joined: JoinedAxes = (),
) -> Iterator[str]:
    """What is wrong with `steps` as a way from `held` to `wanted`, in sentences; nothing if each is a move that the
    search has and they end in `wanted`.

    shape: the tensor's global one. The layouts, those between the steps too, fit it and the mesh.
    joined: axes that the search moved together.
    """
    if not steps and held == wanted:
        return
    dims, key = universe_key((held, wanted), shape)
    # Axes that neither the tensor nor a step has only add moves that are none of these.
    used = {*held.axes, *wanted.axes, *(axis for step in steps for axis in step.axes)}
    part = MeshSpec(
        {name: mesh.size(name) for name in mesh.names if name in used or not used}, mesh.device_type
    )
    runs = tuple(run for run in joined if used.issuperset(run))
    routed = frozenset(pending for pending in key.reduced if pending[1].startswith(ROUTED))
    moves = Moves(part, tuple(DimSplits(part, spec, runs) for spec in key.dims), runs, routed)
    now = held
    for step in steps:
        state = as_state(now, dims)
        made = (as_step(state, move, dims, len(shape)) for move in moves(state) if move.make is type(step))
        if all(step != other for other in made):
            yield f"no step {step.text()} leads from {now} to {step.after}"
            return
        now = step.after
    if now != wanted:
        yield f"its steps lead to {now}, and it reads {wanted}"


@dataclass(frozen=True)
class PricedUniverse:
    """A universe with one shape's bytes and seconds. dims: the tensor dims in play."""

    universe: Universe
    dims: tuple[int, ...]
    payloads: _Ints
    seconds: Floats
    rows: dict[int, Floats]  # source state -> [states] distances, filled on demand
    apart: dict[int, Floats]  # likewise [links, states], of a cheapest path the seconds over each link

    def state(self, layout: Layout) -> int | None:
        return self.universe.index.get(as_state(layout, self.dims))

    def rounds(self, sources: Sequence[int], deadline: Deadline = NEVER) -> list[Floats]:
        """[states, sources] distances with at most 0, 1, 2, ... steps, until they stay the same. Raises OutOfTime."""
        distance = np.full((len(self.universe.states), len(sources)), np.inf)
        distance[sources, np.arange(len(sources))] = 0.0
        found = [distance]
        while len(self.universe.moves):
            deadline.check()
            distance = self.universe.relax(self.seconds, distance)
            if np.array_equal(distance, found[-1]):
                break
            found.append(distance)
        return found

    def distances(self, sources: Sequence[int], deadline: Deadline) -> Floats:
        """[sources, states]. Raises OutOfTime."""
        missing = list(dict.fromkeys(s for s in sources if s not in self.rows))
        if missing:
            last = self.rounds(missing, deadline)[-1]
            self.rows.update((source, last[:, i]) for i, source in enumerate(missing))
        return np.stack([self.rows[s] for s in sources])

    def by_link(self, sources: Sequence[int], links: _Ints, count: int, deadline: Deadline) -> Floats:
        """[links, sources, states] seconds of `path` over each of `count` links, inf over the first where there is
        none. links: [moves]. Raises OutOfTime."""
        missing = list(dict.fromkeys(s for s in sources if s not in self.apart))
        if missing:
            found = self._apart(self.rounds(missing, deadline), links, count)
            self.apart.update((source, found[:, :, i]) for i, source in enumerate(missing))
        return np.stack([self.apart[s] for s in sources], axis=1)

    def _apart(self, rounds: list[Floats], links: _Ints, count: int) -> Floats:
        """[links, states, sources], from distances with at most 0, 1, 2, ... steps."""
        universe, numbers = self.universe, np.arange(len(links))[:, None]
        found = np.zeros((count, *rounds[0].shape))
        for before, after in itertools.pairwise(rounds):
            arriving = before[universe.tail] + self.seconds[:, None]
            best = np.where(arriving == after[universe.head], numbers, len(links))
            first = np.minimum.reduceat(best, universe.starts, axis=0)
            places, source = np.nonzero(after[universe.heads] < before[universe.heads])
            move, state = first[places, source], universe.heads[places]
            now = found[:, universe.tail[move], source]
            now[links[move], np.arange(len(move))] += self.seconds[move]
            found[:, state, source] = now
        found[0][np.isinf(rounds[-1])] = np.inf
        return found

    def path(self, source: int, target: int) -> list[int] | None:
        """Moves of a cheapest path; of those one with fewest steps, then first in order."""
        rounds = [distance[:, 0] for distance in self.rounds([source])]
        if math.isinf(rounds[-1][target]):
            return None
        path: list[int] = []
        state, left = target, len(rounds) - 1
        while state != source:
            while rounds[left - 1][state] == rounds[left][state]:
                left -= 1
            first = np.searchsorted(self.universe.head, state)
            last = np.searchsorted(self.universe.head, state, side="right")
            arriving = rounds[left - 1][self.universe.tail[first:last]] + self.seconds[first:last]
            move = int(first + np.flatnonzero(arriving == rounds[left][state])[0])
            path.append(move)
            state, left = int(self.universe.tail[move]), left - 1
        return path[::-1]
