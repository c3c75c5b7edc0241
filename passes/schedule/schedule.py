"""From what a rank computes in a phase to when: the passes between splitting the phases and compiling; and, of gathers
whose operands are at hand, by their price and that of what is on the wire beside them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from passes.ir.graph_pass import RankPass, run_rank_passes
from passes.ir.graph_properties import COLLECTIVES, OPS, HasGraph, Property, described, group_of, is_start
from passes.ir.joint import FakeCalls
from passes.ops.collective_ops import exchange_rows
from passes.plan.planned_graph import Turn
from passes.schedule.bucket import Bucket
from passes.schedule.issue_order import PREFETCH, Place, place_behind
from passes.schedule.overlap import Overlap, issue_key

SCHEDULE: tuple[RankPass, ...] = (
    Bucket(),  # first: what is left to hide is then what the buckets take
    Overlap(),
)


def scheduled(module: fx.GraphModule, calls: FakeCalls | None = None) -> fx.GraphModule:
    """`module`, in place, with its collectives merged and running behind computation. calls: of such graphs."""
    return run_rank_passes(module, SCHEDULE if calls is None else (Bucket(calls), *SCHEDULE[1:]))


def one_communicator_at_a_time(module: fx.GraphModule) -> fx.GraphModule:
    """`scheduled`, where collectives of different groups must not be in flight together."""
    return run_rank_passes(module, (*SCHEDULE, SerializeCommunicators()))


def _two_groups(graph: HasGraph) -> str | None:
    flying: dict[fx.Node, str] = {}
    for node in graph.graph.nodes:
        if is_start(node):
            others = [other for other, group in flying.items() if group != group_of(node)]
            if others:
                return (
                    f"{described(node)}: starts while %{others[0].name} of {flying[others[0]]} is in flight"
                )
            flying[node] = group_of(node)
        elif node.all_input_nodes:
            flying.pop(node.all_input_nodes[0], None)
    return None


ONE_GROUP_IN_FLIGHT = Property("collectives in flight together are of one group", _two_groups)


class SerializeCommunicators(RankPass):
    """Wait for what is in flight on other communicators before a collective starts.

        %g: f32[8, 16] = all_gather(%w, group dp)          %g: f32[8, 16] = all_gather(%w, group dp)
        %r: f32[8, 16] = all_reduce(%x, group tp)    ->    %v: f32[8, 16] = wait_tensor(%g)
        %v: f32[8, 16] = wait_tensor(%g)                   %r: f32[8, 16] = all_reduce(%x, group tp)

    The same nodes, in place; waits move up, nothing else. NCCL's kernels hold their part of the GPU until the
    other ranks join them. Two of different communicators that start in another order on another GPU, or of
    which one leaves no room for the other, wait for each other forever. [NCCL user guide, "Using multiple NCCL
    communicators concurrently"] On a GPU a wait is an order between streams: the host goes on.

    Collectives of one communicator stay in flight together: they run in the order in which they were issued.
    """

    ensures = (ONE_GROUP_IN_FLIGHT,)
    keeps = (OPS, COLLECTIVES)

    def rewrite(self, graph: fx.Graph) -> None:
        flying: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if is_start(node):
                for other in [o for o in flying if group_of(o) != group_of(node)]:
                    node.prepend(flying.pop(other))
                (flying[node],) = node.users
            elif node.all_input_nodes:
                flying.pop(node.all_input_nodes[0], None)
        graph.lint()


def behind_ids(graph: fx.Graph) -> None:
    """Lets rows that have the turn of the transfer that they stand for go behind the collectives of the ids that say
    where to, if these have a later one."""
    if not graph.find_nodes(op="call_function", target=exchange_rows):
        return
    last: dict[fx.Node, Turn] = {}
    for node in graph.nodes:
        before = max((last[n] for n in node.all_input_nodes if n in last), default=None)
        if node.target is exchange_rows and before is not None and before > issue_key(node)[0]:
            for made in (node, *node.users):
                made.meta["turn"] = (*before, 1)
                made.meta.pop("places", None)
        own = [issue_key(node)[0]] if "turn" in node.meta else []
        if before is not None or own:
            last[node] = max(own if before is None else [before, *own])


SLACK = 1.25
"""Times the price of a gather by which it is started before it is read. Others are on the wire as well."""


@dataclass(frozen=True)
class Prefetch:
    """elapsed: seconds of computing before each op of the phase, and in all. Per group of gathers, in the order in
    which they are read: read: position of its first reader; seconds: its price; nbytes: what it gathers; links: that
    they are over, () where all are over one. room: bytes that several may hold at once, where memory is short."""

    elapsed: Sequence[float]
    read: Sequence[int]
    seconds: Sequence[float]
    nbytes: Sequence[int]
    room: float = math.inf
    links: Sequence[int] = ()

    def places(
        self, awaited: Sequence[int], reductions: Sequence[Sequence[tuple[Place, float]]]
    ) -> list[tuple[int, Place]]:
        """Per group its depth and place, see `passes.schedule.issue_order.Ahead`. reductions: over each link, rising,
        the place of each and its seconds."""
        found: list[tuple[int, Place]] = []
        over = [self._arriving(each) for each in reductions]
        for i, (depth, start) in enumerate(self._depths()):
            place = self._behind_awaited(i, place_behind(self.read, i, depth), awaited)
            found.append(self._before_reductions(i, depth, place, start, over[self._link(i)]))
        return found

    def _arriving(self, reductions: Sequence[tuple[Place, float]]) -> list[tuple[Place, float]]:
        """When each has arrived, if one link has them alone: each waits for the one before it."""
        found: list[tuple[Place, float]] = []
        end = 0.0
        for place, seconds in reductions:
            end = max(end, self.elapsed[(place[0] + 1) // 2]) + seconds
            found.append((place, end))
        return found

    def _link(self, i: int) -> int:
        return self.links[i] if self.links else 0

    def _depths(self) -> list[tuple[int, float]]:
        """So deep that each group has arrived when it is read, if all later ones have to as well; when it must start
        for that."""
        depths: list[tuple[int, float]] = []
        free: dict[int, float] = {}  # by link, until when it may be busy with others
        for i in reversed(range(len(self.read))):
            arrives = min(self.elapsed[self.read[i]], free.get(self._link(i), math.inf))
            start = free[self._link(i)] = arrives - SLACK * self.seconds[i]
            depth = 1
            while depth <= i and self.elapsed[self.read[i - depth]] > start and self._fit(i, depth + 1):
                depth += 1
            depths.append((max(depth, PREFETCH) if math.isinf(self.room) else depth, start))
        return depths[::-1]

    def _fit(self, i: int, depth: int) -> bool:
        """Whether group `i` may be in flight with the `depth` - 1 before it."""
        # Times the bytes of the largest gather that those in flight may hold.
        return sum(self.nbytes[i + 1 - depth : i + 1]) <= min(4 * max(self.nbytes), self.room)

    def _behind_awaited(self, i: int, place: Place, awaited: Sequence[int]) -> Place:
        """`place`, or behind the awaited transfers that follow before so much is computed."""
        latest = self.elapsed[self.read[i]] - SLACK * self.seconds[i]  # when the group must be on the wire
        for position in awaited[bisect_left(awaited, place[0] // 2) :]:
            ready = self.elapsed[position + 1]
            if ready > latest or ready - self.elapsed[place[0] // 2] > SLACK * self.seconds[i]:
                break
            place = (2 * position + 1, 1)
        return place

    def _before_reductions(
        self, i: int, depth: int, place: Place, start: float, reductions: Sequence[tuple[Place, float]]
    ) -> tuple[int, Place]:
        """Before a reduction that is on the wire when the group should be."""
        for reduced, arrived in reversed(reductions):
            if reduced >= place:
                continue
            position = (reduced[0] + 1) // 2
            deeper = i + 1 - bisect_left(self.read, position)
            if arrived <= start or not self._fit(i, deeper):
                break
            depth, place = max(depth, deeper), (reduced[0], 0)
        return depth, place
