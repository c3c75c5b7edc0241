"""Where the boxes of one phase stand within their rows: few crossings, short edges, no overlap."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

GAP = 18.0
LANE_WIDTH = 6.0
ORDER_SWEEPS = 6
PLACE_SWEEPS = 24


@dataclass(frozen=True)
class Column:
    """centre: box -> x of its middle; lanes: edge -> the (row, x) points it passes between boxes;
    left, right: the extent of all boxes."""

    centre: dict[int, float]
    lanes: dict[tuple[int, int], list[tuple[int, float]]]
    left: float
    right: float


def place_column(rows: dict[int, int], widths: dict[int, float], edges: Sequence[tuple[int, int]]) -> Column:
    """Place the boxes (keys of `rows`, which gives each its row) so that `edges` (upper, lower) are
    short. An edge over several rows gets a lane, a narrow box in every row that it passes."""
    cells: list[list[int]] = [[] for _ in range(1 + max(rows.values(), default=0))]
    for box, row in rows.items():
        cells[row].append(box)
    wide, links, chains = dict(widths), [], {}
    fresh = 1 + max(rows, default=0)
    for upper, lower in edges:
        chain = [upper]
        for row in range(rows[upper] + 1, rows[lower]):
            cells[row].append(fresh)
            wide[fresh] = LANE_WIDTH
            chain.append(fresh)
            fresh += 1
        chain.append(lower)
        links += itertools.pairwise(chain)
        chains[upper, lower] = chain
    neighbours = _neighbours(wide, links)
    _order(cells, neighbours)
    centre = _centres(cells, wide, neighbours)
    lanes = {
        edge: [(rows[edge[0]] + i, centre[c]) for i, c in enumerate(chain)][1:-1]
        for edge, chain in chains.items()
    }
    left = min((centre[box] - widths[box] / 2 for box in rows), default=0.0)
    right = max((centre[box] + widths[box] / 2 for box in rows), default=0.0)
    lane_xs = [x for points in lanes.values() for _, x in points]
    return Column({box: centre[box] for box in rows}, lanes, min([left, *lane_xs]), max([right, *lane_xs]))


def spread(wanted: Sequence[float], weights: Sequence[float], apart: Sequence[float]) -> list[float]:
    """The positions nearest to `wanted` (weighted least squares) with position i+1 at least apart[i] right
    of position i. Pool adjacent violators, on the positions less the room that those before them need."""
    offsets = list(itertools.accumulate(apart, initial=0.0))[: len(wanted)]
    pools: list[tuple[float, float, int]] = []  # (position, weight, count) of targets that share it
    for target, offset, weight in zip(wanted, offsets, weights, strict=True):
        position, count = target - offset, 1
        while pools and pools[-1][0] > position:
            other, heavy, many = pools.pop()
            position = (other * heavy + position * weight) / (heavy + weight)
            weight, count = weight + heavy, count + many
        pools.append((position, weight, count))
    positions = [position for position, _, count in pools for _ in range(count)]
    return [position + offset for position, offset in zip(positions, offsets, strict=True)]


def _neighbours(
    wide: dict[int, float], links: Sequence[tuple[int, int]]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """(cells above each cell, cells below each cell)."""
    above: dict[int, list[int]] = {cell: [] for cell in wide}
    below: dict[int, list[int]] = {cell: [] for cell in wide}
    for upper, lower in links:
        above[lower].append(upper)
        below[upper].append(lower)
    return above, below


def _order(cells: list[list[int]], neighbours: tuple[dict[int, list[int]], dict[int, list[int]]]) -> None:
    """Sort each row by the mean place of its neighbours in the row before; down, then up, a few times."""
    for sweep in range(ORDER_SWEEPS):
        near = neighbours[sweep % 2]
        row_order = cells if sweep % 2 == 0 else cells[::-1]
        place: dict[int, float] = {}
        for row in row_order:
            here = {cell: index / max(1, len(row)) for index, cell in enumerate(row)}
            seen = {cell: [place[n] for n in near[cell] if n in place] for cell in row}
            row.sort(key=lambda cell: sum(seen[cell]) / len(seen[cell]) if seen[cell] else here[cell])
            place.update({cell: (index + 0.5) / len(row) for index, cell in enumerate(row)})


def _centres(
    cells: Sequence[Sequence[int]],
    wide: dict[int, float],
    neighbours: tuple[dict[int, list[int]], dict[int, list[int]]],
) -> dict[int, float]:
    """x of every cell: near the weighted mean of its neighbours, long edges straight before all."""
    centre: dict[int, float] = {}
    for row in cells:
        apart = _apart(row, wide)
        start = [-sum(apart) / 2 + offset for offset in itertools.accumulate(apart, initial=0.0)]
        centre.update(zip(row, start, strict=False))
    links = {
        cell: [(n, _weight(wide[cell], wide[n])) for side in neighbours for n in side[cell]] for cell in wide
    }
    for sweep in range(PLACE_SWEEPS):
        for row in cells if sweep % 2 == 0 else reversed(cells):
            weights = [sum(weight for _, weight in links[cell]) or 0.1 for cell in row]
            wanted = [
                sum(centre[n] * weight for n, weight in links[cell]) / total if links[cell] else centre[cell]
                for cell, total in zip(row, weights, strict=True)
            ]
            centre.update(zip(row, spread(wanted, weights, _apart(row, wide)), strict=True))
    return centre


def _weight(width: float, other: float) -> float:
    """Of a link, by how many of its ends are lanes."""
    return (1.0, 2.0, 8.0)[(width == LANE_WIDTH) + (other == LANE_WIDTH)]


def _apart(row: Sequence[int], wide: dict[int, float]) -> list[float]:
    return [(wide[a] + wide[b]) / 2 + GAP for a, b in itertools.pairwise(row)]
