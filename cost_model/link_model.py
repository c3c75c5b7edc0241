"""Prices of collectives from link levels alone: latency and bandwidth, no measurement.

Every model is a set of straight lines `seconds = alpha + beta * nbytes`; the price is the lowest of them
(the communication library picks its best algorithm). What `nbytes` means: `cost_model.collectives`.

Written S = nbytes, n = ranks of the group, and for each level i that the group uses: h_i hops, of them
d_i deep in one domain, m_i lanes, a_i latency, B_i bytes per second of one rank's port (`cost_model.groups`,
`cost_model.measurements`).

A ring passes through every rank of a unit, so with m_i ranks in the emptiest unit NCCL builds m_i rings
that leave it through m_i ports: level i carries the ring's traffic at m_i * B_i, and the slowest level
decides. The steps take sum(h_i * a_i). [NCCL src/graph/tuning.cc: steps inside and between nodes;
nccl-tests doc/PERFORMANCE.md: bytes over a link]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cost_model.errors import UnsupportedOpError
from cost_model.groups import Occupancy
from cost_model.measurements import KINDS, LinkLevel


@dataclass(frozen=True)
class Line:
    """seconds = alpha + beta * nbytes; alpha in seconds, beta in seconds per byte."""

    alpha: float
    beta: float

    def __call__(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes


Model = Callable[[Occupancy, Sequence[LinkLevel]], tuple[Line, ...]]


def check_kind(kind: str) -> None:
    """UnsupportedOpError for a collective that has no price. Nothing is ever priced at zero by default."""
    if kind not in KINDS:
        raise UnsupportedOpError(
            f"no price for collective {kind!r}\n  the priced collectives are {', '.join(KINDS)}"
        )


def model_lines(kind: str, group: Occupancy, links: Sequence[LinkLevel], launch: float) -> tuple[Line, ...]:
    """The lines whose minimum prices `kind` on `group`; `launch` seconds are added to each."""
    check_kind(kind)
    assert group.ranks > 1, "a group of one rank does not communicate"
    return tuple(Line(launch + line.alpha, line.beta) for line in _MODELS[kind](group, links))


def floor_slope(kind: str, group: Occupancy, links: Sequence[LinkLevel]) -> float:
    """Seconds per byte below which `kind` is physically impossible, whatever the algorithm.

    A unit that holds m of the n ranks must receive what it does not have through its m ports at peak
    rate P: (n - m) / n * S of a gathered, scattered or exchanged array, S of a broadcast one. An
    all-reduce gets S: switches that reduce (NVLink SHARP) need only that. Half of the
    messages to neighbours may come from either side, through two ports where the unit holds two of the ranks.
    """
    check_kind(kind)
    return max(
        _floor_bytes(kind, group.ranks, use.lanes) / links[use.level].peak_bytes_per_second
        for use in group.uses
    )


def _floor_bytes(kind: str, n: int, m: int) -> float:
    """Bytes through one port, per byte of `nbytes`."""
    if kind in ("all_gather", "reduce_scatter"):
        return (n - m) / n / m
    if kind == "all_to_all":
        return (n - m) / n
    if kind == "point_to_point":
        return 1.0 / min(m, 2)
    return 1.0 / m


def _ring_latency(group: Occupancy, links: Sequence[LinkLevel]) -> float:
    """sum(h_i * a_i): one trip that visits every rank."""
    return sum(use.hops * links[use.level].latency_seconds for use in group.uses)


def _ring_seconds_per_byte(group: Occupancy, links: Sequence[LinkLevel]) -> float:
    """max(1 / (m_i * B_i)): for each byte that a ring passes on."""
    return max(1.0 / (use.lanes * links[use.level].bytes_per_second) for use in group.uses)


def _ring_share(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """Ring all-gather or reduce-scatter: t = sum(h_i * a_i) + (n-1)/n * S * max(1 / (m_i * B_i)).

    Each rank passes on (n-1)/n of the whole array, in n-1 steps.
    """
    share = (group.ranks - 1) / group.ranks
    return (Line(_ring_latency(group, links), share * _ring_seconds_per_byte(group, links)),)


def _all_reduce(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """The best of a ring, a tree and, inside one level whose switches sum, those.

    Ring: reduce-scatter then all-gather, t = 2 * sum(h_i * a_i) + 2(n-1)/n * S * max(1 / (m_i * B_i)).
    Tree: a chain of d_0 hops inside a node, binary between nodes, up and down, the whole array each way:
    t = 2 * (d_0 * a_0 + sum_{i>0} ceil(log2(d_i + 1)) * a_i) + 2 * S * max(1 / (m_i * B_i)).
    Switches: each rank sends its array to them and receives the sum, t = 2 * a_i + S / R_i, with R_i the level's
    `reduced_bytes_per_second`. [NVIDIA/nccl-tests issue 212]
    """
    (share,) = _ring_share(group, links)
    ring = Line(2.0 * share.alpha, 2.0 * share.beta)
    tree = Line(2.0 * _tree_latency(group, links), 2.0 * _ring_seconds_per_byte(group, links))
    return ring, tree, *_in_switches(group, links)


def _in_switches(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """None for a group that leaves the domain of its switches: NCCL's NVLS trees are not modelled."""
    use, *others = group.uses
    if others:
        return ()
    link = links[use.level]
    rate = link.reduced_bytes_per_second
    return () if rate is None else (Line(2.0 * link.latency_seconds, 1.0 / rate),)


def _tree_latency(group: Occupancy, links: Sequence[LinkLevel]) -> float:
    """Depth of the tree in seconds: d_0 * a_0 + sum_{i>0} ceil(log2(d_i + 1)) * a_i."""
    steps = (use.depth if use.level == 0 else math.ceil(math.log2(use.depth + 1)) for use in group.uses)
    return sum(step * links[use.level].latency_seconds for step, use in zip(steps, group.uses, strict=True))


def _all_to_all(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """Direct exchange: t = sum(d_i * a_i) + S * max((n - m_i) / n / B_i).

    Each rank sends S/n to every other; (n - m_i) / n of its buffer leaves its unit, through its own
    port. Messages to the ranks of one domain are posted together, hence one latency for each.
    """
    n = group.ranks
    latency = sum(use.depth * links[use.level].latency_seconds for use in group.uses)
    slope = max((n - use.lanes) / n / links[use.level].bytes_per_second for use in group.uses)
    return (Line(latency, slope),)


def _broadcast(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """Pipelined rings: t = sum(h_i * a_i) + S * max(1 / (m_i * B_i)). Every link carries all of S once."""
    return (Line(_ring_latency(group, links), _ring_seconds_per_byte(group, links)),)


def _point_to_point(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """Every rank sends S to its neighbour in the group: t = max(a_i) + S * max(1 / B_i), the worst pair."""
    used = [links[use.level] for use in group.uses]
    latency = max(link.latency_seconds for link in used)
    return (Line(latency, max(1.0 / link.bytes_per_second for link in used)),)


_MODELS: dict[str, Model] = {
    "all_gather": _ring_share,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "point_to_point": _point_to_point,
    "reduce_scatter": _ring_share,
}
assert set(_MODELS) == set(KINDS)
