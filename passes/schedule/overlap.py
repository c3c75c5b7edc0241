"""Reorder one rank's forward or backward so that communication runs behind computation."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from passes.ir.graph_pass import RankPass
from passes.ir.graph_properties import FUNCTIONAL, OPS, HasGraph, Property, described
from passes.ir.op_traits import is_cheap, is_collective, is_product
from passes.ir.torch_dispatch import input_nodes
from passes.ir.torch_sizes import counts_as
from passes.plan.planned_graph import Turn
from passes.plan.transfers import PhaseRoles, ops_that_end
from passes.redistribution.lower_redistribute import collective_nodes
from passes.schedule.issue_order import PREFETCH, REACH

NO_TURN: Turn = (-1, 0)


def _out_of_turn(graph: HasGraph) -> str | None:
    for before, node in itertools.pairwise(collective_nodes(graph.graph)):
        if issue_key(before) > issue_key(node):
            turns = [start.meta.get("turn") for start in (node, before)]
            return f"{described(node)}: has turn {turns[0]}, and stands behind %{before.name} with {turns[1]}"
    return None


def issue_key(collective: fx.Node) -> tuple[Turn, int, int, int]:
    """Turn, then the step of a transfer of several: a rank that receives nothing in the first of them has no
    dependency that orders the two. Then the transfer, where several share a turn and were not merged. Steps may start
    elsewhere (meta "places", `passes.schedule.issue_order`): a further one goes before what has its turn there, the
    furthest first."""
    meta = collective.meta
    turn, step, transfer = meta.get("turn", NO_TURN), meta.get("step", 0), meta.get("transfer", 0)
    if "places" not in meta:
        return turn, 0, step, transfer
    places = meta["places"]
    return (turn[0], places[step]), places.index(turn[1]) - step, 0, transfer


IN_TURN = Property("collectives of all groups start in the order of their turns", _out_of_turn)


@dataclass(frozen=True)
class Overlap(RankPass):
    """Start every collective as soon as its operand exists, wait for it as late as possible.

        %dw: f32[64, 16] = mm(%gt, %x)                %dx: f32[8, 16] = mm(%g, %w)
        %dx: f32[8, 16]  = mm(%g, %w)                 %r:  f32[8, 16] = all_reduce(%dx)
        %r:  f32[8, 16]  = all_reduce(%dx)      ->    %dw: f32[64, 16] = mm(%gt, %x)
        %v:  f32[8, 16]  = wait_tensor(%r)            %v:  f32[8, 16] = wait_tensor(%r)
        %y:  f32[8, 16]  = relu(%v)                   %y:  f32[8, 16] = relu(%v)

    The same nodes in another order, in place. Ops keep their order but for those that a collective
    somebody waits for is computed from: they go first, from at most `reach` products ahead, so a value
    lives longer than it did only while that hides something.

    prefetch: at most so many collectives whose operand was at hand from the start (gathers of parameters)
              are in flight at a time: each holds its result before anything reads it. Where a collective has meta
              "ahead", that many.
    pending:  what only the end needs (reductions of gradients) and is in flight holds at most so many times the bytes
              of the largest such operand; where one has meta "ahead", at most so many are. Beyond, the oldest is
              waited for.
    reach:    products ahead from which a collective's operand is fetched.

    The order of the collectives is not decided here, where another rank might decide otherwise: it is
    that of their meta "turn" (`passes.schedule.issue_order`), or the graph's where they have none. When each
    starts is this rank's affair: as all ranks issue what they share in the same order, the earliest
    collective that is not finished can always be joined.

    Requires besides: turns agree with the dependencies.
    """

    requires = (FUNCTIONAL,)
    ensures = (IN_TURN,)
    keeps = (OPS,)

    prefetch: int = PREFETCH
    pending: int = 4
    reach: int = REACH

    def rewrite(self, graph: fx.Graph) -> None:
        output = graph.output_node()
        for node in _Schedule(graph, self).run():
            output.prepend(node)
        graph.lint()


class _Schedule:
    """A list of ops in their new order, written front to back."""

    def __init__(self, graph: fx.Graph, options: Overlap) -> None:
        self.options = options
        self.roles = _Roles(graph)
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        counts = itertools.accumulate((is_product(n) for n in graph.nodes), initial=0)
        self.products = list(counts)  # before each place
        self.unstarted = deque(sorted(collective_nodes(graph), key=issue_key))
        self.due: set[fx.Node] = set()  # unstarted, though their source exists
        self.urgent: set[fx.Node] = set()  # those of them that ops wait for
        self.flying: dict[fx.Node, fx.Node] = {}  # collective -> its wait, oldest first
        self.done: dict[fx.Node, None] = dict.fromkeys(n for n in graph.nodes if n.op == "placeholder")
        self.placeholders = len(self.done)
        self.largest_last = max(map(_operand_nbytes, self.roles.last), default=0)
        self.cursor = 0  # place of the op that the walk has come to
        for node in self.done:
            self._note_due(node)

    def run(self) -> list[fx.Node]:
        for node, place in self.place.items():
            self.cursor = place
            if node in self.done or node.op == "output" or node in self.roles.on_demand:
                continue
            self.start_ready()
            for operand in input_nodes(node):
                if operand not in self.done:
                    self.wait(operand)
            # A slot is free now, and what goes on the wire here hides behind `node`.
            self.start_ready()
            if node not in self.done:
                self.emit(node)
        while self.unstarted:
            self.start()
        for node in self.place:
            if node not in self.done and node.op != "output":
                self.emit(node)
        return list(self.done)[self.placeholders :]

    def emit(self, node: fx.Node) -> None:
        assert node not in self.done and all(n in self.done for n in input_nodes(node)), node
        self.done[node] = None
        if node in self.roles.wait_of:
            self.flying[node] = self.roles.wait_of[node]
        elif input_nodes(node):
            self.flying.pop(node.all_input_nodes[0], None)
        self._note_due(node)

    def _note_due(self, node: fx.Node) -> None:
        for collective in self.roles.fed.get(node, ()):
            self.due.add(collective)
            if collective not in self.roles.last:
                self.urgent.add(collective)

    def wait(self, wait: fx.Node) -> None:
        """Start all up to the collective that `wait` is for, and wait."""
        collective = wait.all_input_nodes[0]
        while collective not in self.done:
            self.start()
        if wait not in self.done:
            self.emit(wait)

    def start_ready(self) -> None:
        while self.unstarted and self._may_start(self.unstarted[0]):
            self.start()

    def start(self) -> None:
        """Compute what the next collective needs, and issue it."""
        collective = self.unstarted.popleft()
        for node in self.missing(collective):
            assert node not in self.roles.wait_of, f"{collective} has an earlier turn than {node}"
            self.emit(node)
        self.due.discard(collective)
        self.urgent.discard(collective)
        self.emit(collective)
        self._limit_last()

    def _limit_last(self) -> None:
        """Free the buffers of the oldest collectives that nobody but the end waits for."""
        last = [c for c in self.flying if c in self.roles.last]
        held, count = sum(map(_operand_nbytes, last)), len(last)
        for collective in last[:-1]:
            few = count <= last[-1].meta.get("ahead", count)
            if few and held <= self.options.pending * self.largest_last:
                return
            held, count = held - _operand_nbytes(collective), count - 1
            self._receive(self.flying[collective])

    def _receive(self, node: fx.Node) -> None:
        """Wait, and take out what is kept of it: the buffer is free then."""
        self.emit(node)
        for user in sorted(node.users, key=self.place.__getitem__):
            ready = user not in self.done and all(n in self.done for n in input_nodes(user))
            if ready and user in self.roles.on_demand and not is_collective(user):
                self._receive(user)

    def _may_start(self, collective: fx.Node) -> bool:
        """Whether the next collective in turn goes now, rather than when its result is asked for."""
        if collective in self.roles.early:
            meta, left = collective.meta, _steps_left(collective)
            flying = sum(c in self.roles.early and _steps_left(c) == left for c in self.flying)
            most = meta["starts"][-left][1] if left else meta.get("ahead", self.options.prefetch)
            return bool(self.urgent) or flying < most
        source = self.roles.source[collective]
        if source in self.done:
            return True
        if collective in self.roles.last:
            # The next of several steps goes when the collective behind it could.
            return source in self.roles.on_demand and bool(self.due)
        distance = self.products[self.place[source]] - self.products[self.cursor]
        near = distance <= self.options.reach or bool(self.urgent)
        return near and not any(self._blocks(n) for n in self.missing(collective))

    def _blocks(self, node: fx.Node) -> bool:
        """Waits, but not those for what was fetched ahead: they would not be put off by much."""
        collective = node.all_input_nodes[0] if node in self.roles.waits else None
        return collective is not None and not (collective in self.roles.early and collective in self.flying)

    def missing(self, node: fx.Node) -> Sequence[fx.Node]:
        """What has to run before `node` can, in the graph's order."""
        found: set[fx.Node] = set()
        stack = list(input_nodes(node))
        while stack:
            operand = stack.pop()
            if operand not in self.done and operand not in found:
                found.add(operand)
                stack.extend(input_nodes(operand))
        return sorted(found, key=self.place.__getitem__)


class _Roles:
    """What each collective is for.

    early:     those at hand (`passes.plan.transfers`), and further steps of these.
    last:      those ending whose readers can all be put off to the end; others are awaited where their readers stand.
    source:    what its operand is made of by views and copies.
    fed:       the collectives, but the early ones, by source.
    on_demand: waits, collectives, and the cheap ops between the last waits and the results: none has
               a place of its own in the order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        collectives = collective_nodes(graph)
        self.wait_of = {c: _wait_of(c) for c in collectives}
        self.waits = set(self.wait_of.values())
        roles = PhaseRoles([n for n in graph.nodes if n.op != "placeholder"])
        put_off = _put_off(graph, self.waits)
        self.last = {c for c in collectives if self.wait_of[c] in put_off}
        at_hand = {c for c in collectives if roles.of(c, c.all_input_nodes[0]) == "at hand"}
        begun = {c.meta["turn"] for c in at_hand if "places" in c.meta}
        further = {c for c in collectives if "places" in c.meta and c.meta["turn"] in begun}
        self.early = (at_hand | further) - self.last
        sources = _sources(graph)
        self.source = {c: sources[c.all_input_nodes[0]] for c in collectives}
        self.fed: dict[fx.Node, list[fx.Node]] = {}
        for collective in collectives:
            if collective not in self.early:
                self.fed.setdefault(self.source[collective], []).append(collective)
        self.on_demand = {*collectives, *self.waits, *put_off}


def _steps_left(collective: fx.Node) -> int:
    """Of a transfer at hand: how many of its collectives that start apart are behind this one."""
    meta = collective.meta
    return len(meta["starts"]) - meta.get("step", 0) if "starts" in meta else 0


def _operand_nbytes(collective: fx.Node) -> int:
    value = collective.all_input_nodes[0].meta["val"]
    return counts_as(value.numel()) * value.element_size()


def _wait_of(collective: fx.Node) -> fx.Node:
    (wait,) = collective.users
    return wait


def _sources(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Node -> the one node that it is computed from by cheap ops of no other operand; else itself."""
    sources: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        found = {sources[n] for n in input_nodes(node)}
        light = node.op == "call_function" and is_cheap(node) and len(found) == 1
        sources[node] = found.pop() if light else node
    return sources


def _put_off(graph: fx.Graph, waits: set[fx.Node]) -> set[fx.Node]:
    """Waits, and cheap ops and collectives computed from waits alone, that only the results read.

    Alone: an op that reads anything else would keep that alive until the end.
    """
    received: dict[fx.Node, None] = {}
    for node in graph.nodes:
        operands = input_nodes(node)
        passed_on = operands and all(n in received for n in operands)
        if node in waits or (passed_on and (is_collective(node) or is_cheap(node))):
            received[node] = None
    return ops_that_end(list(received))
