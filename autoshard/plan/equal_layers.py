"""Equal layers told once: runs of names that differ in one number."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

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
