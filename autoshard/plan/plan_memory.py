"""`plan.memory`: the bytes of a step as a curve, by kind, and what lives where it is highest."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from autoshard.plan.equal_layers import fold_numbers
from cost_model.checked_arguments import Count, Text
from cost_model.memory import format_bytes
from passes.predict.memory_kinds import KINDS, Kind
from passes.predict.memory_record import LiveValue, MemoryStep, MemoryWalk

OUTLINE = 40
"""Points of a curve that a plan's file holds."""
_SHOWN, _NAMED = 20, 3
"""Values of a timeline that are printed; and of a kind in its line."""
_COLUMNS, _BARS = 64, "▁▂▃▄▅▆▇█"
_Many = Annotated[int, Meta(ge=1, le=2**40)]


class AtPeak(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tensors that are alive at the peak and alike: of equal layers, or of one module.

    name: of the parameter or input, or of the module, "layers.0-31.mlp", "" for the model itself; op: what makes them,
    "" of what is given. value: dtype and shape of each on the fullest rank. nbytes: of all `count` of them.
    """

    kind: Kind
    name: Text
    op: Text
    value: Text
    count: _Many
    nbytes: Count

    def __str__(self) -> str:
        times = f" x {self.count}" if self.count > 1 else ""
        return f"{' '.join(filter(None, (self.name, self.op)))}{times}"


class MemoryTimeline(Struct, frozen=True, forbid_unknown_fields=True):
    """What the fullest rank's program holds, step by step.

    steps: every step of forward and backward, in order, with its bytes by kind; of a plan that was read from a file
    those at which the curve turns, `OUTLINE` at most, the peak among them. count: of all steps. at_peak: what is alive
    at the first step with the most bytes, the largest first; together these are its bytes.

    Of a plan with stages a step is an action of the fullest rank, and its phase the action's kind
    (`autoshard.plan.stage_schedule.pipeline_memory`).
    """

    count: _Many
    steps: Annotated[tuple[MemoryStep, ...], Meta(min_length=1)]
    at_peak: tuple[AtPeak, ...]

    @staticmethod
    def of(walk: MemoryWalk) -> MemoryTimeline:
        steps = tuple(walk.step(place) for place in range(len(walk.steps)))
        return MemoryTimeline(len(steps), steps, at_peak_of(walk.alive(walk.peak.place)))

    @property
    def peak(self) -> MemoryStep:
        """The first step with the most bytes."""
        return max(self.steps, key=lambda step: step.nbytes)

    @property
    def by_kind(self) -> Mapping[Kind, int]:
        """Bytes at the peak."""
        return dict(zip(KINDS, self.peak.by_kind, strict=True))

    def outline(self) -> MemoryTimeline:
        """With `OUTLINE` steps at most: the ends of the phases, the peak, and where the curve is furthest from straight
        lines."""
        if len(self.steps) <= OUTLINE:
            return self
        curve = [step.nbytes for step in self.steps]
        ends = [i for i, (one, two) in enumerate(itertools.pairwise(self.steps)) if one.phase != two.phase]
        last = len(curve) - 1
        kept = _turning_points(curve, {0, self.steps.index(self.peak), *ends, *(i + 1 for i in ends), last})
        return replace(self, steps=tuple(self.steps[place] for place in kept))

    def __str__(self) -> str:
        peak = self.peak
        lines = [
            f"peak {format_bytes(peak.nbytes)} at {peak.node}, step {peak.place} of {self.count - 1}, {peak.phase}",
            f"  {self._bars()}",
            *(f"  {line}" for line in kind_lines(self, named=0)),
            "  the largest of what lives there",
        ]
        lines += [
            f"    {format_bytes(row.nbytes):>8}  {row.kind:10}  {row}  {row.value}".rstrip()
            for row in self.at_peak[:_SHOWN]
        ]
        rest = self.at_peak[_SHOWN:]
        if rest:
            lines.append(f"    {format_bytes(sum(row.nbytes for row in rest)):>8}  {len(rest)} more")
        return "\n".join(lines)

    def _bars(self) -> str:
        """The curve from the first step to the last, the most of each stretch."""
        most = [0] * min(_COLUMNS, self.count)
        for here, after in zip(self.steps, (*self.steps[1:], None), strict=True):
            first, end = here.place, self.count if after is None else after.place
            for column in {place * len(most) // self.count for place in range(first, end)}:
                most[column] = max(most[column], here.nbytes)
        top = max(1, *most)
        return "".join(_BARS[(len(_BARS) - 1) * nbytes // top] for nbytes in most)


def kind_lines(memory: MemoryTimeline, named: int = _NAMED) -> Iterator[str]:
    """A line for each kind at the peak, the most bytes first, with its largest values."""
    for kind, nbytes in sorted(memory.by_kind.items(), key=lambda item: (-item[1], KINDS.index(item[0]))):
        if nbytes:
            largest = [row for row in memory.at_peak if row.kind == kind][:named]
            named_values = ", ".join(f"{row} {format_bytes(row.nbytes)}" for row in largest)
            yield f"{kind:10} {format_bytes(nbytes):>8}  {named_values}".rstrip()


def at_peak_of(values: Sequence[LiveValue]) -> tuple[AtPeak, ...]:
    """Values that are alike as one, those of equal layers too; the largest first."""
    one = lambda value: AtPeak(value.kind, "", value.op, _value(value), 1, value.nbytes)
    alike = Counter((value.name, one(value)) for value in values)
    rows = [(name, (each, times)) for (name, each), times in alike.items()]
    return in_order(
        replace(each, name=name, count=layers * times, nbytes=layers * times * each.nbytes)
        for name, (each, times), layers in fold_numbers(rows)
    )


def in_order(rows: Iterable[AtPeak]) -> tuple[AtPeak, ...]:
    """The largest first."""
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, KINDS.index(row.kind), row.name, row.op)))


def _value(value: LiveValue) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def _turning_points(curve: Sequence[int], ends: Collection[int]) -> list[int]:
    """Places of `OUTLINE` points, ascending: `ends`, and of those between two the one furthest from their line."""
    kept = sorted(ends)
    waiting: list[tuple[float, int, int, int]] = []

    def wait(first: int, last: int) -> None:
        if last - first > 1:
            slope = (curve[last] - curve[first]) / (last - first)
            off = lambda place: abs(curve[place] - curve[first] - slope * (place - first))
            furthest = max(range(first + 1, last), key=off)
            heapq.heappush(waiting, (-off(furthest), furthest, first, last))

    for first, last in itertools.pairwise(kept):
        wait(first, last)
    while waiting and len(kept) < OUTLINE:
        _, place, first, last = heapq.heappop(waiting)
        kept.append(place)
        wait(first, place)
        wait(place, last)
    return sorted(kept)
