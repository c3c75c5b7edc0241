"""What stages between any two places of the forward would cost, and the cut whose longest stage is the shortest:
exactly, by a dynamic program over the forward. Each op has a home, one op of the forward.

The forward stands in a line. An op of the backward is where the last op is that it can run with; so what a stage
computes is a sum over a part of the line, and what it sends depends on its ends alone.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import fx

from cost_model.errors import InfeasibleError
from passes.ir.graph_properties import described
from passes.ir.joint import JointGraph, results_nbytes
from passes.ir.op_traits import is_product, op_signature
from passes.stages.graph_parts import (
    GraphParts,
    Line,
    graph_parts,
    is_glued,
    model_line,
    operands,
    passes_with_piece,
)
from passes.stages.stage_places import (
    ForwardPlaces,
    GradientSum,
    backward_places,
    forward_places,
    gradient_sums,
    tangent_places,
)


@dataclass(frozen=True)
class CutPlace:
    """position: in the forward; op: the one that the later stage begins with.

    sent: values that pass in the forward, of sent_nbytes. returned_nbytes: of their gradients, at most.
    """

    position: int
    op: str
    sent: int
    sent_nbytes: int
    returned_nbytes: int


@dataclass(frozen=True)
class CutCosts:
    """places:  where a stage may begin, in order.
    seconds: of all ops with a home before each position of the forward, and before its end.
    homes:   op of the backward -> position of the op of the forward that it is with.
    """

    parts: GraphParts
    forward: ForwardPlaces
    places: tuple[CutPlace, ...]
    seconds: tuple[float, ...]
    homes: Mapping[fx.Node, int]


@dataclass(frozen=True)
class Segment:
    """What one stage would hold: the ops with a home from `start` up to `stop`."""

    costs: CutCosts
    start: int
    stop: int

    @property
    def forward(self) -> tuple[fx.Node, ...]:
        return self.costs.parts.forward[self.start : self.stop]

    @property
    def held(self) -> tuple[fx.Node, ...]:
        """Parameters, buffers, constants and inputs that the forward reads here."""
        at = self.costs.forward.holders.items()
        return tuple(n for n, places in at if any(self.start <= place < self.stop for place in places))


def cut_costs(joint: JointGraph, op_seconds: Callable[[fx.Node], float]) -> CutCosts:
    """op_seconds: of one op, for one piece; asked once for ops alike. Ops that every stage has cost nothing here."""
    parts = graph_parts(joint)
    forward = forward_places(parts, {n: i for i, n in enumerate(parts.forward)}, len(parts.forward) - 1)
    if not parts.forward:  # results are constants: there is nothing to cut
        return CutCosts(parts, forward, (), (0.0,), {})
    sums = gradient_sums(parts)
    homes = _homes(parts, forward, sums)
    own = [0.0] * len(parts.forward)
    known: dict[Hashable, float] = {}
    for node in (*parts.forward, *parts.backward):
        key = op_signature(node)
        if key not in known:
            known[key] = op_seconds(node)
        own[forward.of[node] if node in forward.of else homes[node]] += known[key]
    seconds = tuple(itertools.accumulate(own, initial=0.0))
    closed = _closed(parts, forward) | _closed_to_gradients(parts, forward, homes, sums)
    return CutCosts(parts, forward, _places(parts, forward, closed), seconds, homes)


def narrow_places(costs: CutCosts) -> tuple[CutPlace, ...]:
    """The places where little passes: of `places_between_products` those with no more than their neighbours. A
    transformer may be cut where only its residual stream passes."""
    lowest = places_between_products(costs)
    nbytes = [place.sent_nbytes + place.returned_nbytes for place in lowest]
    return tuple(p for i, p in enumerate(lowest) if nbytes[i] <= min(nbytes[max(0, i - 1) : i + 2]))


def alike_places(costs: CutCosts) -> tuple[CutPlace, ...]:
    """Of `narrow_places` the most that pass as much, and that the same ops follow up to a product: of a transformer
    those between layers. Stages between them are alike, if they have as many layers."""
    groups: dict[Hashable, list[CutPlace]] = {}
    for place in narrow_places(costs):
        ops = costs.parts.forward[place.position :]
        product = next((i for i, node in enumerate(ops) if is_product(node)), len(ops) - 1)
        follows = tuple(map(op_signature, ops[: product + 1]))
        groups.setdefault((place.sent_nbytes, place.returned_nbytes, follows), []).append(place)
    return tuple(max(groups.values(), key=len, default=()))


def places_between_products(costs: CutCosts) -> tuple[CutPlace, ...]:
    """Between two products the place with the fewest bytes, the last of several: a bias stays with its weight."""
    products = list(itertools.accumulate((is_product(n) for n in costs.parts.forward), initial=0))
    groups = itertools.groupby(costs.places, key=lambda place: products[place.position])
    return tuple(min(places, key=_narrowness) for _, places in groups)


def _narrowness(place: CutPlace) -> tuple[int, int, int]:
    return place.sent_nbytes + place.returned_nbytes, place.sent, -place.position


def _homes(parts: GraphParts, forward: ForwardPlaces, sums: Mapping[int, GradientSum]) -> dict[fx.Node, int]:
    """The last place at which an op of the backward can run; rather one that comes from its line of the model."""
    lines: dict[Line, list[int]] = {}
    for position, node in enumerate(parts.forward):
        lines.setdefault(model_line(node), []).append(position)
    homes: dict[fx.Node, int] = {}
    bounds = backward_places(parts, forward, sums)
    for node in parts.backward:
        ceiling = min((homes[n] for n in operands(node) if n in homes), default=forward.last)
        last = min(bounds.latest.get(node, ceiling), ceiling)
        own = lines.get(model_line(node), [])
        within = bisect_right(own, last)
        on_line = within and own[within - 1] >= bounds.earliest.get(node, last)
        homes[node] = own[within - 1] if on_line else last
    return homes


def _places(parts: GraphParts, forward: ForwardPlaces, closed: set[int]) -> tuple[CutPlace, ...]:
    changes = np.zeros((len(parts.forward) + 1, 3), dtype=np.int64)
    for node, last in forward.reach.items():
        nbytes = results_nbytes(node)
        change = 1, nbytes, nbytes * (node in parts.differentiable)
        changes[forward.of[node] + 1] += change
        changes[last + 1] -= change
    passing = changes.cumsum(axis=0).tolist()
    return tuple(
        CutPlace(position, node.name, *passing[position])
        for position, node in enumerate(parts.forward)
        if position and position not in closed and not is_glued(node)
    )


def _closed(parts: GraphParts, forward: ForwardPlaces) -> set[int]:
    """Positions between the readers of a buffer and the op that changes it, and those that would send what is made once
    for all pieces of a batch."""
    found: set[int] = set()
    for node, last in forward.reach.items():
        if not passes_with_piece(parts.joint, node):
            found.update(range(forward.of[node] + 1, last + 1))
    for buffer in parts.changed:
        at = forward.holders[buffer]
        found.update(range(min(at) + 1, max(at) + 1))
    return found


def _closed_to_gradients(
    parts: GraphParts, forward: ForwardPlaces, homes: Mapping[fx.Node, int], sums: Mapping[int, GradientSum]
) -> set[int]:
    """Positions between what the backward makes once for all pieces of a batch and its readers, but for sums of a
    parameter's gradient, whose parts stay where they are made."""
    found: set[int] = set()
    made = {**tangent_places(parts, forward), **homes}
    summed = {node for found in sums.values() for node in found.ops}
    for reader in parts.backward:
        for node in () if reader in summed else operands(reader):
            if node in made and not passes_with_piece(parts.joint, node):
                found.update(range(homes[reader] + 1, made[node] + 1))
    return found


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
