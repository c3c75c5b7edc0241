"""Which collectives to merge into buckets: decided from prices on the global graph, so on all ranks alike.

Merged, `k` collectives pay for one start instead of `k`; but the first gradient of a bucket travels only
when the last is ready, and a bucket of gathers must all have arrived when its first parameter is read.
So for every list of transfers alike (same steps over the same axes, same dtype) this is solved:

    gradients, in the order in which they are ready; ready[i]: seconds of computing before it

        end[j] = min over i < j of  max(end[i], ready[j]) + seconds(i + 1 .. j)

    end[n], when the last has arrived, is least. [as in MG-WFBP, Shi et al., INFOCOM 2019, by an exact program]
    That counts on computing while they travel. Where only a share e of it hides (`Prices.hidden_share`),
    what is least is e end[n] + (1 - e) (seconds on the wire): exact for e = 1 and e = 0.

Gathers are the same backwards in time: from the end of the phase, a gather "is ready" at its reader, and
the total is least where the one read first is through as early as possible.

    seconds(group) = the price of one collective of all its bytes + copying them in, and gathers out again

Halos are merged as gradients are, among those that may travel together: each is ready before any is read. Other
transfers on the critical path are never merged: the first would wait for the last.

A group holds no more bytes than at which starting is a tenth of the time
(`cost_model.collectives`): more would gain little, and memory holds a whole group; nor more than
`Prices.moved_nbytes`. The least time on the wire wins a tie. The lists are solved one by one, as if each had the wire
to itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from cost_model.collectives import BucketedPrices, copies_seconds
from passes.ir.joint import JointGraph, node_value, result_index
from passes.layout.layout import Assignment
from passes.plan.planned_graph import Transfer
from passes.plan.transfers import Move
from passes.redistribution.steps import (
    AllGather,
    AllReduce,
    HaloExchange,
    HaloReduce,
    Redistribution,
    ReduceScatter,
    Reshard,
)
from passes.schedule.issue_order import Ending, Groups, IssueOrder, Limits, Place, Side, issue_order
from passes.schedule.schedule import Prefetch
from passes.strategies.prices import Prices

_MERGED = (AllGather, AllReduce, ReduceScatter, HaloExchange, HaloReduce, Reshard)

Kind = tuple[tuple[str, tuple[str, ...], str], ...]
"""Per collective step: (kind, axes of the group, reduction)."""


def bucketed_order(
    joint: JointGraph, assignment: Assignment, prices: Prices, moved: Mapping[Transfer, Redistribution]
) -> IssueOrder:
    """`issue_order` with transfers merged and started ahead where `prices` say that a step is shorter for it. moved:
    their steps."""
    plan = BucketPlan(assignment, prices, moved)
    return issue_order(joint, assignment, merge=plan, ahead=plan.ahead, pending=plan.pending)


@dataclass(frozen=True)
class BucketPlan:
    """The `Merge` of a graph with layouts `assignment` under `prices`."""

    assignment: Assignment
    prices: Prices
    moved: Mapping[Transfer, Redistribution]
    known: dict[int, tuple[Sequence[fx.Node], list[float]]] = field(default_factory=dict)

    def __call__(self, side: Side, moves: Sequence[Move], ops: Sequence[fx.Node]) -> list[Sequence[Move]]:
        if len(moves) < 2:
            return [[move] for move in moves]
        alike: dict[tuple[Kind, torch.dtype], list[Item]] = {}
        groups: list[Sequence[Move]] = []
        for move in moves:
            kind = self._kind(move)
            if kind is None or (side == "between" and kind[0][0] != "point_to_point"):
                groups.append([move])
                continue
            elapsed = self._elapsed(ops)
            # Gathers are dealt with backwards in time.
            ready = elapsed[-1] - elapsed[move.end] if side == "early" else elapsed[move.start + 1]
            item = Item(move, ready, self._nbytes(move))
            alike.setdefault((kind, node_value(move.operand).dtype), []).append(item)
        prices = self.prices
        bucketed = BucketedPrices(prices.redistributor.collective_seconds, prices.mesh, prices.compute)
        limit = lambda kind, axes: min(bucketed.limit(kind, axes), prices.moved_nbytes)
        for (kind, _), items in alike.items():
            order = items[::-1] if side == "early" else items
            cut = _cut(order, Wire(kind, prices, limit))
            groups += [[i.move for i in (g[::-1] if side == "early" else g)] for g in cut]
        return groups

    def ahead(self, groups: Groups, ops: Sequence[fx.Node], awaited: Sequence[int], ending: Ending) -> Limits:
        """Each group so early that it has arrived when it is read, if computing is all that it waits for; behind what
        others wait for, where it arrives in time nevertheless; and before reductions that would keep it from that. Of
        several collectives each likewise before the next.

        At least `PREFETCH` in flight; more only as long as they take no more memory than `ROOM` of the largest. Where
        memory is short, several only if they hold no more than `Prices.moved_nbytes`.
        """
        steps = [self._sends(group) for group in groups]
        ending_steps = [(place, self._sends(group)) for place, group in ending]
        reductions = [
            sorted((place, _seconds_over(link, sends)) for place, sends in ending_steps)
            for link in range(self.prices.redistributor.link_count)
        ]
        found: list[list[tuple[int, Place]]] = [[] for _ in groups]
        read = [group[0].end for group in groups]
        for later in range(max(map(len, steps), default=0)):
            chosen = [i for i, sends in enumerate(steps) if len(sends) > later]
            until = [steps[i][: len(steps[i]) - later] for i in chosen]
            wire = Prefetch(
                self._elapsed(ops),
                [min(read[j] for j in chosen[place:]) for place in range(len(chosen))],
                [_seconds_over(sends[-1].link, sends) for sends in until],
                [max(one.nbytes for one in sends) for sends in until],
                self.prices.moved_nbytes,
                [sends[-1].link for sends in until],
            )
            for i, (depth, place) in zip(chosen, wire.places(awaited, reductions), strict=True):
                place = min(place, found[i][0][1]) if later else place
                found[i].insert(0, (depth, place))
                read[i] = min(read[i], (place[0] + 1) // 2)
        return found

    def _sends(self, group: Sequence[Move]) -> list[_Send]:
        """The collectives of a group, one after the other; local steps alone are one that takes nothing."""
        plans = [self.moved[move.transfer] for move in group]
        moving = [
            [
                (step, *figures)
                for step, *figures in zip(plan.steps, plan.step_seconds, plan.step_nbytes, strict=True)
                if step.kind is not None
            ]
            for plan in plans
        ]
        link = self.prices.redistributor.link
        found = [
            _Send(sum(one[1] for one in alike), sum(one[2] for one in alike), link(alike[0][0].axes))
            for alike in zip(*moving, strict=True)
        ]
        return found or [_Send(0.0, 0, 0)]

    def pending(self, groups: Sequence[Sequence[Move]]) -> list[int]:
        """Only where memory is short."""
        if math.isinf(self.prices.moved_nbytes):
            return []
        held = [sum(max(self._nbytes(move), default=0) for move in group) for group in groups]
        return [_most(held[: i + 1], self.prices.moved_nbytes) for i in range(len(held))]

    def _kind(self, move: Move) -> Kind | None:
        """None for what cannot be merged."""
        dtype = node_value(move.operand).dtype
        if dtype == torch.bool or dtype.is_complex:  # travels as bytes, or as pairs
            return None
        steps = [step for step in self.moved[move.transfer].steps if step.kind is not None]
        if not steps or not all(isinstance(step, _MERGED) for step in steps):
            return None
        mesh = self.prices.mesh
        axes = [tuple(sorted(step.axes, key=mesh.index)) for step in steps]
        return tuple((str(s.kind), a, getattr(s, "op", "")) for s, a in zip(steps, axes, strict=True))

    def _nbytes(self, move: Move) -> tuple[int, ...]:
        plan = self.moved[move.transfer]
        pairs = zip(plan.steps, plan.step_nbytes, strict=True)
        return tuple(nbytes for step, nbytes in pairs if step.kind is not None)

    def _elapsed(self, ops: Sequence[fx.Node]) -> list[float]:
        """Seconds of computing before each op, and in all; counted once a phase, whose ops are one list."""
        if id(ops) not in self.known:
            seconds = list(itertools.accumulate((self._seconds(op) for op in ops), initial=0.0))
            self.known[id(ops)] = ops, seconds
        return self.known[id(ops)][1]

    def _seconds(self, node: fx.Node) -> float:
        if result_index(node)[0] is not node:
            return 0.0
        return self.prices.op_seconds(node, self.assignment[node.name])


class _Send(NamedTuple):
    """A collective of merged transfers: its price, its bytes, the link that it is over."""

    seconds: float
    nbytes: int
    link: int


def _seconds_over(link: int, sends: Sequence[_Send]) -> float:
    return sum(one.seconds for one in sends if one.link == link)


@dataclass(frozen=True)
class Item:
    """ready: seconds since the start of the phase (its end, for gathers). nbytes: per collective step."""

    move: Move
    ready: float
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class Wire:
    """Prices of the groups of one list of transfers."""

    kind: Kind
    prices: Prices
    limit: Callable[[str, tuple[str, ...]], float]

    def fits(self, nbytes: Sequence[int]) -> bool:
        pairs = zip(self.kind, nbytes, strict=True)
        return all(n <= self.limit(kind, axes) for (kind, axes, _), n in pairs)

    @property
    def hidden(self) -> float:
        """The share e of a group that hides: of all its steps, where each is as large as it may be."""
        prices = self.prices
        shares = [prices.hidden_share(kind, axes) for kind, axes, _ in self.kind]
        if len(set(shares)) == 1:
            return shares[0]
        price, limit = prices.redistributor.collective_seconds, self.limit
        seconds = [price(kind, axes, int(limit(kind, axes))) for kind, axes, _ in self.kind]
        hidden = sum(share * taken for share, taken in zip(shares, seconds, strict=True))
        return hidden / sum(seconds) if any(seconds) else min(shares)

    def seconds(self, nbytes: Sequence[int], count: int) -> float:
        """What a group of `count` takes: its collectives, and the copies that it takes to merge several."""
        price = self.prices.redistributor.collective_seconds
        total = 0.0
        for (kind, axes, _), n in zip(self.kind, nbytes, strict=True):
            total += price(kind, axes, n)
            if count > 1 and n:
                compute, ranks = self.prices.compute, self.prices.mesh.size(*axes)
                total += compute.launch_seconds + copies_seconds(compute, kind, ranks, n, count)
        return total


def _most(nbytes: Sequence[int], room: float) -> int:
    """How many of the last of them are within `room`; one at least."""
    sums = itertools.accumulate(reversed(nbytes))
    return max(1, sum(held <= room for held in sums))


def _cut(items: Sequence[Item], wire: Wire) -> list[list[Item]]:
    """Those that fill a bucket alone, alone; the others by `least_end`, past them."""
    small = [item for item in items if wire.fits(item.nbytes)]
    alone = [[item] for item in items if not wire.fits(item.nbytes)]
    return alone + least_end(small, wire, wire.hidden)


def least_end(items: Sequence[Item], wire: Wire, efficiency: float = 1.0) -> list[list[Item]]:
    """`items` cut into consecutive groups such that the last arrives first; see the module. efficiency: e."""

    def order(entry: tuple[float, float, int]) -> tuple[float, float, int]:
        end, busy, first = entry
        return efficiency * end + (1.0 - efficiency) * busy, busy, -first

    best: list[tuple[float, float, int]] = [
        (0.0, 0.0, 0)
    ]  # (end, seconds on the wire, where the group begins)
    for j in range(len(items)):
        nbytes, ready = [0] * len(wire.kind), 0.0
        found: list[tuple[float, float, int]] = []
        for i in range(j, -1, -1):
            nbytes = [a + b for a, b in zip(nbytes, items[i].nbytes, strict=True)]
            ready = max(ready, items[i].ready)
            if i < j and not wire.fits(nbytes):
                break
            seconds = wire.seconds(nbytes, j - i + 1)
            end, busy, _ = best[i]
            found.append((max(end, ready) + seconds, busy + seconds, i))
        best.append(min(found, key=order))
    groups: list[list[Item]] = []
    last = len(items)
    while last:
        first = best[last][2]
        groups.append(list(items[first:last]))
        last = first
    return groups[::-1]
