"""From one layout to another: the cheapest sequence of steps, and its seconds.

One class decides the steps. The search prices with it (`Redistributor.matrix`), and what it chooses once the search is
over (`Redistributor.plan`, in `passes.plan.decide`) is in the plan and runs, so what is priced is what runs.

The steps are a shortest path in a graph whose nodes are layouts and whose edges are the moves of
`passes.redistribution.moves`. That graph doesn't depend on the tensor's shape (unless a layout has
explicit sizes), so it is built once per number of dims; a shape only sets the bytes of its edges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from cost_model.deadline import NEVER, Deadline
from cost_model.errors import ProfileError, ShardingError
from cost_model.mesh import MeshSpec
from passes.layout.layout import JoinedAxes, Layout
from passes.redistribution.moves import as_step
from passes.redistribution.steps import CollectiveSeconds, Redistribution
from passes.redistribution.universe import (
    Floats,
    PricedUniverse,
    Universe,
    UniverseKey,
    build_universe,
    universe_key,
)

LinkOf = Callable[[tuple[str, ...]], int]
"""Axes of groups -> the link that they communicate over. Over different links collectives run side by side."""


def one_link(axes: tuple[str, ...]) -> int:
    """Of a machine on which they don't."""
    return 0


@dataclass(eq=False)
class Redistributor:
    """Plans and prices redistributions on one mesh with one set of prices; caches both.

    joined: axes that are moved together, so that meshes of many axes have few layouts. Then all layouts asked for use
    them together. avoided: kinds of collectives that no way has. link: over which groups along axes communicate.
    most: bytes of a tensor that a rank may hold on its way, as far as there is a way.
    """

    mesh: MeshSpec
    prices: CollectiveSeconds
    joined: JoinedAxes = ()
    avoided: frozenset[str] = frozenset()
    link_of: LinkOf = one_link
    most: float = math.inf
    _universes: dict[UniverseKey, Universe] = field(
        default_factory=dict, repr=False
    )  # of the mesh and joined axes
    _seconds: dict[tuple[str, tuple[str, ...], int], float] = field(
        default_factory=dict, init=False, repr=False
    )
    _spaces: dict[tuple[UniverseKey, bytes], PricedUniverse] = field(
        default_factory=dict, init=False, repr=False
    )
    _plans: dict[tuple[Layout, Layout, tuple[int, ...], int], Redistribution] = field(
        default_factory=dict, init=False, repr=False
    )
    _asked: dict[tuple[tuple[int, ...], int], dict[frozenset[Layout], None]] = field(
        default_factory=dict, init=False, repr=False
    )

    def joining(self, joined: JoinedAxes) -> Redistributor:
        """One with the same prices that moves the axes `joined` together."""
        return self if joined == self.joined else replace(self, joined=joined, _universes={})

    def avoiding(self, kinds: frozenset[str]) -> Redistributor:
        """One with the same prices that moves nothing by collectives of these kinds."""
        return replace(self, avoided=kinds)

    def within(self, nbytes: float) -> Redistributor:
        """One with the same prices on whose ways no rank holds more bytes of a tensor."""
        return self if nbytes == self.most else replace(self, most=nbytes)

    def priced_by(self, prices: CollectiveSeconds) -> Redistributor:
        """One with other prices."""
        return replace(self, prices=prices)

    @cached_property
    def _anyhow(self) -> Redistributor:
        """For what has no way on which ranks hold few bytes."""
        return self.within(math.inf)

    @cached_property
    def _links(self) -> dict[frozenset[str], int]:
        """Axes of groups -> the number of their link, from 0 on."""
        axes = self.mesh.real_axes()
        groups = [group for n in range(1, len(axes) + 1) for group in itertools.combinations(axes, n)]
        links = {frozenset(group): self.link_of(group) for group in groups}
        numbers = {link: number for number, link in enumerate(sorted(set(links.values())))}
        return {group: numbers[link] for group, link in links.items()}

    @property
    def link_count(self) -> int:
        """Of how many links the mesh has, over which collectives run side by side; at least 1."""
        return max(self._links.values(), default=0) + 1

    def link(self, axes: tuple[str, ...]) -> int:
        """The number of the link that groups along these axes communicate over; 0 of groups of one rank."""
        real = self.mesh.real_axes()
        return self._links.get(frozenset(axis for axis in axes if axis in real), 0)

    def plan(self, src: Layout, dst: Layout, shape: Sequence[int], itemsize: int) -> Redistribution:
        """The cheapest steps that turn `src` into `dst`, for a tensor of global `shape`.

        Raises ShardingError if there are none: a pending max or min cannot be created.
        """
        key = (src, dst, tuple(shape), itemsize)
        if key not in self._plans:
            self._plans[key] = self._plan(src, dst, tuple(shape), itemsize)
        return self._plans[key]

    def matrix(
        self,
        srcs: Sequence[Layout],
        dsts: Sequence[Layout],
        shape: Sequence[int],
        itemsize: int,
        deadline: Deadline = NEVER,
    ) -> Floats:
        """[srcs, dsts] seconds of `plan`; inf where there is none. Raises OutOfTime.

        Equal to `plan`'s seconds (up to the order of adding) if prices never fall with bytes.
        """
        apart = lambda space, rows: space.distances(rows, deadline)[None]
        return self._matrices(srcs, dsts, shape, itemsize, deadline, apart)[0]

    def by_link(
        self,
        srcs: Sequence[Layout],
        dsts: Sequence[Layout],
        shape: Sequence[int],
        itemsize: int,
        deadline: Deadline = NEVER,
    ) -> list[Floats]:
        """`matrix` over each link; what is impossible is so over the first. Raises OutOfTime."""
        if self.link_count == 1:
            return [self.matrix(srcs, dsts, shape, itemsize, deadline)]
        apart = lambda space, rows: self._apart(space, rows, deadline)
        return list(self._matrices(srcs, dsts, shape, itemsize, deadline, apart))

    def _apart(self, space: PricedUniverse, rows: list[int], deadline: Deadline) -> Floats:
        links = np.array([0 if key is None else self.link(key[1]) for key in space.universe.prices])
        return space.by_link(rows, links[space.universe.price], self.link_count, deadline)

    def _matrices(
        self,
        srcs: Sequence[Layout],
        dsts: Sequence[Layout],
        shape: Sequence[int],
        itemsize: int,
        deadline: Deadline,
        apart: Callable[[PricedUniverse, list[int]], Floats],
    ) -> Floats:
        """[links, srcs, dsts], of [links, sources, states] seconds `apart` from these states."""
        if not len(srcs) or not len(dsts):
            return np.zeros((self.link_count, len(srcs), len(dsts)))
        space = self._space((*srcs, *dsts), tuple(shape), itemsize, deadline)
        self._asked.setdefault((tuple(shape), itemsize), {}).setdefault(frozenset((*srcs, *dsts)))
        rows, columns = (
            {i: state for i, one in enumerate(layouts) if (state := space.state(one)) is not None}
            for layouts in (srcs, dsts)
        )
        found = apart(space, [*rows.values()])
        seconds = np.zeros((len(found), len(srcs), len(dsts)))
        seconds[0] = np.inf
        seconds[np.ix_(range(len(found)), [*rows], [*columns])] = found[:, :, [*columns.values()]]
        if self.most < math.inf and np.isinf(seconds[0]).any():
            anyhow = self._anyhow._matrices(srcs, dsts, shape, itemsize, deadline, apart)
            seconds = np.where(np.isinf(seconds[0]), anyhow, seconds)
        return seconds

    def _plan(self, src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int) -> Redistribution:
        if src == dst:
            return Redistribution((), 0.0, (), ())
        # A way may lead over sizes that neither of the two has: of other layouts that `matrix` was asked for with them.
        asked = self._asked.get((shape, itemsize), {})
        known = ((src, dst), *(layouts for layouts in asked if src in layouts and dst in layouts))
        found = (self._space(tuple(each), shape, itemsize) for each in known)
        spaces = {id(one.seconds): one for one in found}
        ways = [(one, way) for one in spaces.values() if (way := self._path(one, src, dst)) is not None]
        if not ways and self.most < math.inf:
            return self._anyhow.plan(src, dst, shape, itemsize)
        if not ways:
            raise ShardingError(f"no redistribution from {src} to {dst}: a pending max or min cannot be made")
        space, path = min(ways, key=lambda each: sum(float(each[0].seconds[move]) for move in each[1]))
        seconds = tuple(float(space.seconds[move]) for move in path)
        nbytes = tuple(int(space.payloads[move]) for move in path)
        whole = space.universe
        steps = tuple(
            as_step(whole.states[whole.tail[move]], whole.moves[move], space.dims, len(shape))
            for move in path
        )
        return Redistribution(steps, sum(seconds, 0.0), seconds, nbytes)

    def _path(self, space: PricedUniverse, src: Layout, dst: Layout) -> list[int] | None:
        source, target = space.state(src), space.state(dst)
        return None if source is None or target is None else space.path(source, target)

    def _space(
        self, layouts: Sequence[Layout], shape: tuple[int, ...], itemsize: int, deadline: Deadline = NEVER
    ) -> PricedUniverse:
        dims, key = universe_key(layouts, shape)
        universe = self._universes.get(key)
        if universe is None:
            universe = self._universes[key] = build_universe(self.mesh, key, self.joined, deadline)
        lengths = tuple(shape[d] for d in dims)
        others = math.prod(length for d, length in enumerate(shape) if d not in dims)
        shard_bytes = universe.shard_bytes(lengths, others, itemsize)
        # Shapes whose shards have the same bytes in every layout share their distances.
        space = self._spaces.get((key, shard_bytes.tobytes()))
        if space is None:
            payloads = universe.payloads(shard_bytes)
            seconds = universe.seconds(payloads, self.collective_seconds)
            if self.most < math.inf:
                held = shard_bytes * universe.counted
                seconds = np.where(held[universe.tail] > self.most, np.inf, seconds)
            space = PricedUniverse(universe, (), payloads, seconds, {}, {})
            self._spaces[key, shard_bytes.tobytes()] = space
        return PricedUniverse(universe, dims, space.payloads, space.seconds, space.rows, space.apart)

    def collective_seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        """Price of one collective, inf if it is avoided; ProfileError for a price that is negative or not finite."""
        if nbytes == 0:
            return 0.0  # the lowering emits no collective
        if kind in self.avoided:
            return math.inf
        key = (kind, axes, nbytes)
        if key not in self._seconds:
            seconds = self.prices.seconds(kind, axes, nbytes)
            if not 0.0 <= seconds < math.inf:
                raise ProfileError(f"{kind} of {nbytes} bytes over {axes} is priced at {seconds} seconds")
            self._seconds[key] = seconds
        return self._seconds[key]
