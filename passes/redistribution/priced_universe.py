"""Shortest paths in the graph of layouts, for one shape: seconds from some of its states to all, and the moves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.deadline import NEVER, Deadline
from passes.layout.layout import Layout
from passes.redistribution.moves import as_state
from passes.redistribution.universe import Floats, Ints, Universe


@dataclass(frozen=True)
class PricedUniverse:
    """A universe with one shape's bytes and seconds. dims: the tensor dims in play."""

    universe: Universe
    dims: tuple[int, ...]
    payloads: Ints
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

    def by_link(self, sources: Sequence[int], links: Ints, count: int, deadline: Deadline) -> Floats:
        """[links, sources, states] seconds of `path` over each of `count` links, inf over the first where there is
        none. links: [moves]. Raises OutOfTime."""
        missing = list(dict.fromkeys(s for s in sources if s not in self.apart))
        if missing:
            found = self._apart(self.rounds(missing, deadline), links, count)
            self.apart.update((source, found[:, :, i]) for i, source in enumerate(missing))
        return np.stack([self.apart[s] for s in sources], axis=1)

    def _apart(self, rounds: list[Floats], links: Ints, count: int) -> Floats:
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
