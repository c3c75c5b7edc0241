"""Where to cut: the cut whose longest stage is the shortest, exactly, by a dynamic program over the forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_model.errors import InfeasibleError
from passes.ir.graph_properties import described
from passes.ir.joint import results_nbytes
from passes.stages.cut_costs import CutCosts, CutPlace, Segment

Fits = Callable[[Segment], bool]
"""Whether a stage's memory holds a segment. Of what fits, every part fits."""
TransferSeconds = Callable[[int], float]


@dataclass(frozen=True)
class ChosenCut:
    """cut: the op with which each stage but the first begins.

    seconds: of each stage, for one piece: forward, backward, and sending what it sends both ways.
    bound:   no cut at any place, whatever memory it takes, has a longest stage shorter than this.
    """

    cut: tuple[str, ...]
    seconds: tuple[float, ...]
    bound: float

    @property
    def gap(self) -> float:
        return max(self.seconds) / self.bound - 1.0 if self.bound else 0.0


def choose_cut(
    costs: CutCosts,
    stages: int,
    transfer_seconds: TransferSeconds,
    *,
    within: float = 0.0,
    places: Sequence[CutPlace] | None = None,
    fits: Fits | None = None,
) -> ChosenCut:
    """Of the cuts into `stages` at `places` (default: anywhere) whose longest stage is at most the share `within`
    longer than the shortest there is, the one with the least sum of squares of its stages' seconds: no stage is idle
    that could take of another.

    transfer_seconds: bytes -> seconds between two stages. Raises InfeasibleError that says whether there are too few
    places, one piece is too large for any stage, or all are too large together.
    """
    if stages < 1:
        raise InfeasibleError(f"cannot cut the graph into {stages} stages\n  try: one or more")
    wanted = costs.places if places is None else tuple(places)
    if len(wanted) < stages - 1:
        raise _too_few(costs, stages, wanted)
    line = _Line(costs, wanted, transfer_seconds, fits)
    longest = line.longest(stages)
    if not np.isfinite(longest):
        raise _too_large(costs, line, stages, wanted)
    bound = min(longest, _Line(costs, costs.places, transfer_seconds, None).longest(stages))
    cut = line.evenest(stages, longest * (1.0 + within))
    return ChosenCut(cut, stage_seconds(costs, cut, transfer_seconds), bound)


def stage_seconds(
    costs: CutCosts, cut: Sequence[str], transfer_seconds: TransferSeconds
) -> tuple[float, ...]:
    """Of each stage of a cut, as `ChosenCut.seconds`."""
    known = {place.op: place for place in costs.places}
    line = _Line(costs, tuple(known[op] for op in cut), transfer_seconds, None)
    return tuple(float(line.costs_to(i + 1)[i]) for i in range(len(cut) + 1))


@dataclass
class _Line:
    """Positions 0, those of the places, and the end; a stage is a pair of them."""

    costs: CutCosts
    places: Sequence[CutPlace]
    transfer_seconds: TransferSeconds
    _fits: Fits | None

    def __post_init__(self) -> None:
        costs, places, transfer_seconds = self.costs, self.places, self.transfer_seconds
        self.positions = [0, *(place.position for place in places), len(costs.parts.forward)]
        self.ops = [place.op for place in places]
        self._computed = np.array([costs.seconds[position] for position in self.positions])
        self._sent = np.array([0.0, *(transfer_seconds(place.sent_nbytes) for place in places), 0.0])
        self._returned = np.array([0.0, *(transfer_seconds(place.returned_nbytes) for place in places), 0.0])

    def costs_to(self, end: int) -> np.ndarray:
        """Seconds of the stages that end at `end`, by where they begin."""
        return self._computed[end] - self._computed[:end] + self._sent[end] + self._returned[:end]

    def longest(self, stages: int) -> float:
        """The least that the longest stage can take; infinity if nothing fits."""
        best = self._start()
        for _ in range(stages):
            longer = [np.maximum(best[:end], self.costs_to(end)) for end in range(len(self.positions))]
            best = np.array(
                [row[first:].min(initial=np.inf) for row, first in zip(longer, self._first, strict=True)]
            )
        return float(best[-1])

    def evenest(self, stages: int, longest: float) -> tuple[str, ...]:
        """Of the cuts with no stage longer than `longest` the one with the least sum of squares."""
        limit = longest * (1.0 + 1e-12)
        best, steps = self._start(), list[list[int]]()
        for _ in range(stages):
            found, step = [np.inf], [0]
            for end in range(1, len(self.positions)):
                seconds = self.costs_to(end)
                sums = np.where(seconds <= limit, best[:end] + seconds**2, np.inf)
                sums[: self._first[end]] = np.inf
                step.append(int(np.argmin(sums)))
                found.append(float(sums[step[-1]]))
            best = np.array(found)
            steps.append(step)
        end, cut = len(self.positions) - 1, list[str]()
        for step in reversed(steps[1:]):
            end = step[end]
            cut.append(self.ops[end - 1])
        return tuple(reversed(cut))

    def fits(self, start: int, end: int) -> bool:
        return self._fits is None or self._fits(
            Segment(self.costs, self.positions[start], self.positions[end])
        )

    def _start(self) -> np.ndarray:
        return np.array([0.0] + [np.inf] * (len(self.positions) - 1))

    @cached_property
    def _first(self) -> list[int]:
        """For each end the first start of a segment that fits a stage; the end itself if none does."""
        found, start = [0], 0
        for end in range(1, len(self.positions)):
            while start < end and not self.fits(start, end):
                start += 1
            found.append(start)
        return found


def _too_few(costs: CutCosts, stages: int, places: Sequence[CutPlace]) -> InfeasibleError:
    fewer = (
        f"at most {len(places) + 1} stages, or none" if places else "stages=None: there is no place to cut"
    )
    return InfeasibleError(
        f"cannot cut the graph into {stages} stages: too few layers; it has {len(places)} places to cut in the "
        f"{len(costs.parts.forward)} ops of its forward\n  try: {fewer}"
    )


def _too_large(costs: CutCosts, line: _Line, stages: int, places: Sequence[CutPlace]) -> InfeasibleError:
    pieces = range(len(line.positions) - 1)
    alone = [i for i in pieces if not line.fits(i, i + 1)]
    if not alone:
        return InfeasibleError(
            f"no cut into {stages} stages fits their memory, though each of {len(places) + 1} parts alone fits\n"
            "  try: a larger memory_limit, or stages along a longer mesh axis"
        )
    ops = costs.parts.forward[line.positions[alone[0]] : line.positions[alone[0] + 1]]
    largest = max(ops, key=lambda n: sum(map(results_nbytes, n.all_input_nodes)))
    return InfeasibleError(
        "no cut fits: one op is too large for the memory of any stage, and an op is never cut\n"
        f"  {described(largest)}\n  try: split it over a mesh axis inside its stage, or a larger memory_limit"
    )
