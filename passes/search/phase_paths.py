"""How long a phase takes at least whose seconds are of known kinds: the longest of the paths through it.

Whatever the order of its collectives, a phase takes at least, for every i < j,

    communication at hand or awaited, read before mark i, over any one link
    + computing between the marks: all of it, or all but fillers and with it what is awaited
    + communication awaited or for the end only, of values made after mark j, over any one link

that is the bound of a two-machine flow shop [Johnson 1954] for a graph whose ends have nothing to hide behind. Of
streams that slow each other down only a share hides: then it takes that share of the longest path and the rest of all
seconds (`cost_model.timeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import numpy as np

from passes.search.step_kinds import COMPUTING, KINDS, LINKS, MOVING, SEGMENTS, kind_of, kinds_of_phase
from passes.solver.problem import Array

CLOSE, EXPLAINED = 1e-3, 0.99
"""Share of a phase by which it may be off as it is, and of what is missing that may stay so for a share that hides to
be taken for the cause. Nothing is learned of what a plan does not have: what is left is a constant."""


@dataclass(frozen=True)
class PhaseOverlap:
    """How well a phase overlaps. efficiency: of two streams busy at once, the share of the shorter that costs no
    time, in [0, 1]. awaited: the share of what is awaited that may hide behind fillers. extra: seconds that the phase
    takes besides."""

    efficiency: float
    awaited: float = 0.0
    extra: float = 0.0

    def hides_as(self, other: PhaseOverlap) -> bool:
        """Whether the same plan is the fastest under both: they differ by a constant."""
        return (self.efficiency, self.awaited) == (other.efficiency, other.awaited)


def phase_paths(overlaps: Sequence[PhaseOverlap], links: int = 1) -> tuple[Array, ...]:
    """Per phase float64[paths, kinds]: what each path holds of the phase's seconds less all of them, times the
    efficiency.

    The seconds of a phase are those of all its kinds and the largest of `paths @ totals`, which is what hides,
    negative. The first path is the one of all computing.
    """
    return tuple(_paths(phase, overlap, links) for phase, overlap in enumerate(overlaps))


def phase_seconds(totals: Array, overlaps: Sequence[PhaseOverlap]) -> list[float]:
    """Of each phase, by its longest path."""
    return [_seconds(totals, phase, overlap) for phase, overlap in enumerate(overlaps)]


def corrected(
    totals: Array, overlaps: Sequence[PhaseOverlap], seconds: Sequence[float]
) -> tuple[PhaseOverlap, ...]:
    """`overlaps` under which a step of these totals takes `seconds` per phase: by the share of what is awaited that
    hides, then by the efficiency, both in [0, 1], and what is left is `extra`."""
    pairs = zip(overlaps, seconds, strict=True)
    return tuple(_corrected(totals, phase, overlap, wanted) for phase, (overlap, wanted) in enumerate(pairs))


def _seconds(totals: Array, phase: int, overlap: PhaseOverlap) -> float:
    rows, hidden = _rows(phase, LINKS)
    longest = float((rows @ totals + (1.0 - overlap.awaited) * (hidden @ totals)).max())
    return float(totals[kinds_of_phase(phase)].sum()) + overlap.efficiency * longest + overlap.extra


def _corrected(totals: Array, phase: int, overlap: PhaseOverlap, wanted: float) -> PhaseOverlap:
    best, taken = replace(overlap, extra=0.0), partial(_seconds, totals, phase)
    for share in ("awaited", "efficiency") if phase else ("efficiency",):
        missing = abs(wanted - taken(best))
        if missing <= CLOSE * wanted:
            break
        hiding = partial(_hiding, best, share)
        other = hiding(_root(lambda s, hiding=hiding: taken(hiding(s)), wanted))
        if abs(wanted - taken(other)) <= EXPLAINED * missing:
            best = other
    return replace(best, extra=wanted - taken(best))


def _hiding(overlap: PhaseOverlap, share: str, value: float) -> PhaseOverlap:
    return replace(overlap, **{share: value})


def _root(falling: Callable[[float], float], wanted: float) -> float:
    """Where in [0, 1] a function that never rises comes nearest to `wanted`."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return round(high, 9)


def _paths(phase: int, overlap: PhaseOverlap, links: int) -> Array:
    rows, hidden = _rows(phase, links)
    return overlap.efficiency * _once(rows + (1.0 - overlap.awaited) * hidden)


def _once(rows: Array) -> Array:
    return np.array(list({row.tobytes(): row for row in rows}.values()))


@cache
def _rows(phase: int, links: int) -> tuple[Array, Array]:
    """What each path holds of the phase's seconds, but for what is awaited and may hide, less all of them; and that.

    Both float64[paths, kinds]. Some paths are the same where all of that hides, or nothing.
    """
    spans = [(0, SEGMENTS)]
    spans += [(i, j) for i in range(SEGMENTS + 1) for j in range(i, SEGMENTS + 1) if (i, j) != (0, SEGMENTS)]
    rows: list[Array] = []
    hidden: list[Array] = []
    every = range(links)
    for (first, last), role, ahead, behind in product(spans, ("filler", "awaited"), every, every):
        row, may_hide = np.zeros(KINDS), np.zeros(KINDS)
        _mark(row, phase, ("at hand", "awaited"), range(first), [ahead])
        _mark(row, phase, ("chain", role), range(first, last), every)
        if role == "filler":
            _mark(may_hide, phase, ("awaited",), range(first, last), every)
        _mark(row, phase, ("ending", "awaited"), range(last, SEGMENTS), [behind])
        rows.append(row)
        hidden.append(may_hide)
    for link in every:
        moved = np.zeros(KINDS)
        _mark(moved, phase, MOVING, range(SEGMENTS), [link])
        rows.append(moved)
        hidden.append(np.zeros(KINDS))
    both = _once(np.concatenate([np.array(rows) - _all(phase), np.array(hidden)], axis=1))
    return both[:, :KINDS], both[:, KINDS:]


def _all(phase: int) -> Array:
    every = np.zeros(KINDS)
    every[kinds_of_phase(phase)] = 1.0
    return every


def _mark(row: Array, phase: int, roles: tuple[str, ...], segments: range, links: Iterable[int]) -> None:
    """Communication over these links, and computing."""
    for role, segment in product(roles, segments):
        over = (0,) if role in COMPUTING else links
        row[[kind_of(phase, role, segment, link) for link in over]] = 1.0
