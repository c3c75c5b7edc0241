"""`plan.memory`: the bytes of a step as a curve, by kind, and what lives where it is highest."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from cost_model.errors import Count, Text
from cost_model.memory import format_bytes
from passes.predict.prediction import KINDS, Kind, LiveValue, MemoryStep, MemoryWalk

Content = TypeVar("Content", bound=Hashable)


def fold_numbers(rows: Sequence[tuple[str, Content]]) -> list[tuple[str, Content, int]]:
    """(dotted name, content) -> (name, content, how many rows it stands for), in the order of the first of each.

    layers.0.w [@tp, -], layers.1.w [@tp, -], layers.2.w [@tp, -]  ->  layers.0-2.w [@tp, -] x 3
    """
    found = [(tuple(name.split(".")), content, 1) for name, content in rows]
    for depth in range(max((len(path) for path, _, _ in found), default=0)):
        found = _fold_at(found, depth)
    return [(".".join(path), content, count) for path, content, count in found]


_Row = tuple[tuple[str, ...], Content, int]


def _fold_at(rows: Sequence[_Row[Content]], depth: int) -> list[_Row[Content]]:
    """Rows that differ only in the number at `depth` of their path, as one."""
    alike: dict[Hashable, list[int]] = {}
    for place, (path, content, count) in enumerate(rows):
        numbered = len(path) > depth and path[depth].isdecimal()
        key = (path[:depth], path[depth + 1 :], content, count) if numbered else place
        alike.setdefault(key, []).append(place)
    folded: dict[int, _Row[Content]] = {}
    for places in alike.values():
        if len(places) == 1:
            folded[places[0]] = rows[places[0]]
            continue
        numbers = {int(rows[place][0][depth]): place for place in places}
        for first, last in runs(sorted(numbers)):
            path, content, count = rows[numbers[first]]
            name = str(first) if first == last else f"{first}-{last}"
            folded[numbers[first]] = (
                (*path[:depth], name, *path[depth + 1 :]),
                content,
                count * (last - first + 1),
            )
    return [folded[place] for place in sorted(folded)]


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of the runs of consecutive numbers in an ascending sequence."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


OUTLINE = 40
"""Points of a curve that a plan's file holds, with twice as many values."""
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


class Lived(AtPeak, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The same, of tensors that are alive from step `first` to step `last`, both included."""

    first: Count
    last: Count


class MemoryTimeline(Struct, frozen=True, forbid_unknown_fields=True):
    """What the fullest rank's program holds, step by step.

    steps: every step of forward and backward, in order, with its bytes by kind; of a plan that was read from a file
    those at which the curve turns, `OUTLINE` at most, the peak among them. count: of all steps. at_peak: what is alive
    at the first step with the most bytes, the largest first; together these are its bytes. values: the largest of all
    that ever lives; of a plan that was read from a file 80 at most.

    Of a plan with stages a step is an action of the fullest rank, and its phase the action's kind
    (`autoshard.plan.stage_schedule.pipeline_memory`).
    """

    count: _Many
    steps: Annotated[tuple[MemoryStep, ...], Meta(min_length=1)]
    at_peak: tuple[AtPeak, ...]
    values: tuple[Lived, ...] = ()

    @staticmethod
    def of(walk: MemoryWalk) -> MemoryTimeline:
        steps = tuple(walk.step(place) for place in range(len(walk.steps)))
        return MemoryTimeline(len(steps), steps, at_peak_of(walk.alive(walk.peak.place)), _lived(walk.values))

    @property
    def peak(self) -> MemoryStep:
        """The first step with the most bytes."""
        return max(self.steps, key=lambda step: step.nbytes)

    @property
    def by_kind(self) -> Mapping[Kind, int]:
        """Bytes at the peak."""
        return dict(zip(KINDS, self.peak.by_kind, strict=True))

    def outline(self, most: int = OUTLINE) -> MemoryTimeline:
        """With so many steps at most: the ends of the phases, the peak, and where the curve is furthest from straight
        lines; and with twice as many of the largest values."""
        values = self.values[: 2 * most]
        if len(self.steps) <= most:
            return self if values == self.values else replace(self, values=values)
        curve = [step.nbytes for step in self.steps]
        ends = [i for i, (one, two) in enumerate(itertools.pairwise(self.steps)) if one.phase != two.phase]
        last = len(curve) - 1
        kept = _turning_points(
            curve, {0, self.steps.index(self.peak), *ends, *(i + 1 for i in ends), last}, most
        )
        return replace(self, steps=tuple(self.steps[place] for place in kept), values=values)

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
    return in_order(AtPeak(*row) for row in _alike(values, lambda _: ()))


def _lived(values: Sequence[LiveValue]) -> tuple[Lived, ...]:
    """Alike are those that live as long."""
    rows = (Lived(*row) for row in _alike(values, lambda value: (value.first, value.last)))
    largest = sorted(filter(lambda row: row.nbytes, rows), key=lambda row: (-row.nbytes, row.first))
    # That a timeline holds.
    return tuple(largest[:1000])


def _alike(
    values: Sequence[LiveValue], more: Callable[[LiveValue], tuple[int, ...]]
) -> Iterator[tuple[Any, ...]]:
    """Fields of `AtPeak`, and `more`, of what is alike."""
    one = lambda value: (value.kind, value.op, _value(value), value.nbytes, *more(value))
    alike = Counter((value.name, one(value)) for value in values)
    rows = fold_numbers([(name, (each, times)) for (name, each), times in alike.items()])
    for name, ((kind, op, value, nbytes, *others), times), layers in rows:
        yield kind, name, op, value, layers * times, layers * times * nbytes, *others


def in_order(rows: Iterable[AtPeak]) -> tuple[AtPeak, ...]:
    """The largest first."""
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, KINDS.index(row.kind), row.name, row.op)))


def _value(value: LiveValue) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def _turning_points(curve: Sequence[int], ends: Collection[int], most: int) -> list[int]:
    """Places of `most` points, ascending: `ends`, and of those between two the one furthest from their line."""
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
    while waiting and len(kept) < most:
        _, place, first, last = heapq.heappop(waiting)
        kept.append(place)
        wait(first, place)
        wait(place, last)
    return sorted(kept)
