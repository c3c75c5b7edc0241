"""The order in which ranks issue their collectives: decided on the global graph, so on all ranks alike.

Ranks that share a process group must issue its collectives in the same order, or they hang. No rank
can decide that on its own graph: with uneven shards a group with nothing to move has no collective, and a
rank with an empty shard does not even compute what others do. So the order is a function of the
joint graph and the layouts alone, which every rank has. A rank issues its own collectives, whichever
it has, in that order; orders that are parts of one common order agree.

A *transfer* is the redistribution of one operand for one reader. Positions below are of a phase's ops in
the order in which they run (the forward as captured; the backward with every op that no tangent decides
right before its first reader).

    role         a transfer takes its turn       because
    "awaited"    right after its operand         its reader waits for it: issuing it later gains nothing
    "at hand"    `ahead` transfers early         issued when the one `ahead` before it is first read
    "ending"     after the next awaited one      it lets pass what others wait for, at most `reach` products away

`passes.plan.transfers` says which role a transfer has.

Transfers of one kind may be merged (`merge`, see `passes.schedule.bucket_plan`): those of one group have one turn,
at which the first of them is issued early, or the last of them late. Awaited transfers are merged only if
all are ready before any is read: halos of neighbouring tensors.

Invariants
  - The order depends on no rank, local shape or clock.
  - A transfer that communicates comes after every one that its operand is computed from; none is merged with one.

The steps of a transfer of several collectives start at turns of their own (`step_places`).
A gradient that is scattered within hosts, reduced between them and gathered again has three collectives, each of the
result of the one before. Issued one right after the other the first may hide behind computing, and the others are
waited for where they start. So a further step waits for the next reduction's turn, and by then the one before it has
had as long on its way as the backward took to get there:

    turn        of a        of b        of c
    a           scatter
    b           reduce      scatter
    c           gather      reduce      scatter
    the end                 gather      reduce, gather

A parameter that is gathered between hosts, then within them, has the transfer's turn for its last step, and an earlier
one for each before that, at which it starts so early that it has arrived by the next.

All ranks find the same: by the graph, the layouts and the turns of the plan alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from passes.ir.joint import JointGraph
from passes.ir.op_traits import is_product
from passes.layout.layout import Assignment
from passes.plan.planned_graph import PlannedGraph, Transfer, Turn
from passes.plan.transfers import Move, PhaseRoles, TransferRole, by_segment, ops_that_end, transfers

PREFETCH = 2
"""Collectives started ahead of their reader: one on the wire, one ready to follow."""

REACH = 8
"""Products that a collective may be moved across: the gradients of one attention or MLP block."""

Side = Literal["early", "between", "last"]
"""Merged transfers are issued with the first that is read ("early"), or the last that is ready ("between", "last")."""


Groups = Sequence[Sequence[Move]]
"""Of transfers that are merged."""

MergeRule = Callable[[Side, Sequence[Move], Sequence[fx.Node]], Groups]
"""Which transfers of a side to merge: groups of them, which are in the order in which they are read ("early") or ready
("last"). Every one is in one group; groups keep that order inside."""


def _alone(side: Side, moves: Sequence[Move], ops: Sequence[fx.Node]) -> Groups:
    return [[move] for move in moves]


Place = tuple[int, int]
"""In an order of ops: (2 * position, 0) is just before the op there, (2 * position + 1, 0) just after it, (..., 1)
behind other transfers there."""


Ending = Sequence[tuple[Place, Sequence[Move]]]
"""Merged transfers that only the end needs, and their places."""

Limits = Sequence[Sequence[tuple[int, Place]]]
"""Per group of its last collectives, as far as they do not start together: how many are in flight at most, it included,
when it is started, and its place."""

Ahead = Callable[[Groups, Sequence[fx.Node], Sequence[int], Ending], Limits]
"""(groups, ops, awaited, ending) -> when transfers at hand are issued. groups: in the order in which they are read.
awaited: positions of ops whose results others wait for, rising."""


def prefetched(groups: Groups, ops: Sequence[fx.Node], awaited: Sequence[int], ending: Ending) -> Limits:
    """Every group when the one `PREFETCH` before it is first read."""
    read = [group[0].end for group in groups]
    return [[(PREFETCH, place_behind(read, i, PREFETCH))] for i in range(len(read))]


def place_behind(read: Sequence[int], i: int, depth: int) -> Place:
    """Where the group `depth` before group `i` is first read: no later than `i` is, so whatever is computed from it
    comes after it. What computes its operand is at hand as well, and goes wherever it is wanted. read: position of the
    first reader of each."""
    return (2 * read[i - depth], 0) if i >= depth else (0, 0)


Pending = Callable[[Groups], Sequence[int]]
"""Merged transfers that only the end needs, in order -> of each how many are in flight at most when it is started; none
where that is for `passes.schedule.overlap` to say."""


def _unlimited(groups: Groups) -> Sequence[int]:
    return []


@dataclass(frozen=True)
class IssueOrder:
    """turns: every transfer -> its turn; smaller is earlier, and only merged ones have the same. ahead: transfers at
    hand, and ending ones that are limited, -> how many such collectives are in flight at most, it included, when it is
    started. starts: transfers at hand of several collectives -> place in the phase and such a limit of those before the
    last that start before its turn."""

    turns: Mapping[Transfer, Turn]
    ahead: Mapping[Transfer, int]
    starts: Mapping[Transfer, tuple[tuple[int, int], ...]]


def issue_order(
    joint: JointGraph,
    assignment: Assignment,
    *,
    merge: MergeRule = _alone,
    ahead: Ahead = prefetched,
    pending: Pending = _unlimited,
    reach: int = REACH,
) -> IssueOrder:
    """Of every transfer that `assignment` asks for."""
    phases = [_Phase(ops, joint, moves) for ops, moves in by_segment(joint, transfers(joint, assignment))]
    turns: dict[Transfer, Turn] = {}
    depths: dict[Transfer, int] = {}
    starts: dict[Transfer, tuple[tuple[int, int], ...]] = {}
    for number, phase in enumerate(phases):
        for place, (group, depth) in enumerate(phase.ordered(ahead, pending, reach, merge)):
            for move in group:
                if depth is None:
                    turns[move.transfer] = number, place
                else:
                    starts[move.transfer] = (*starts.get(move.transfer, ()), (place, depth))
        depths.update(phase.depths)
    return IssueOrder(turns, depths, starts)


def closing(ops: Sequence[fx.Node], joint: JointGraph, moves: Sequence[Move]) -> list[Move]:
    """Those `moves` of a phase that only its end needs, and that no other transfer follows: they may be merged.
    ops: the phase's."""
    return _Phase(ops, joint, moves).closing()


class _Phase:
    """Where things stand in one phase."""

    def __init__(self, ops: Sequence[fx.Node], joint: JointGraph, moves: Sequence[Move]) -> None:
        self.ops = ops
        self.position = {node: i for i, node in enumerate(ops)}
        self.position[joint.output_node] = len(ops)
        self.all = [self._placed(m) for m in moves]
        self.products = [0]  # before each position
        for node in ops:
            self.products.append(self.products[-1] + is_product(node))
        self.roles = PhaseRoles(ops, {(m.reader, m.operand) for m in moves if m.moves})
        self.settled = self._settled()
        self.depths: dict[Transfer, int] = {}

    def _placed(self, move: Move) -> Move:
        start = self.position.get(move.operand, -1)
        # A part is read behind all that runs before the pieces.
        return replace(move, start=start, end=self.position.get(move.reader, len(self.ops)))

    def ordered(
        self, ahead: Ahead, pending: Pending, reach: int, merge: MergeRule
    ) -> list[tuple[Sequence[Move], int | None]]:
        """Groups of merged transfers, mostly of one; with a limit a collective of it that starts before its turn."""
        # Turns in half steps: 2 * position is just before the op there, 2 * position + 1 just after it.
        moving = [m for m in self.all if m.moves]
        early = sorted((m for m in moving if self._role(m) == "at hand"), key=_stable)
        last = sorted((m for m in moving if self._role(m) == "ending"), key=lambda m: (m.start, *_stable(m)))
        apart = {*early, *last}
        urgent = sorted({m.start for m in moving if m not in apart})
        turns: dict[Move, tuple[Place, Sequence[Move]]] = {
            m: (self._local_place(m), [m]) for m in self.all if m not in apart and not m.moves
        }
        for together in _together([m for m in moving if m not in apart]):
            for group in merge("between", together, self.ops):
                turns[group[-1]] = (2 * group[-1].start + 1, 0), group
        groups = sorted(merge("early", early, self.ops), key=lambda group: _stable(group[0]))
        ending = [
            ((self._let_pass(group[-1].start, urgent, reach), 1), group)
            for group in self._last_groups(last, merge)
        ]
        steps: list[tuple[tuple[int, ...], tuple[Sequence[Move], int | None]]] = []
        starts = zip(groups, ahead(groups, self.ops, urgent, ending), strict=True)
        for group, (*before, (depth, place)) in starts:
            self.depths.update((move.transfer, depth) for move in group)
            turns[group[0]] = place, group
            for step, (most, start) in enumerate(before, -len(before)):
                steps.append(((*start, step, *self._key(group[0])), (group, most)))
        for (_, group), depth in zip(ending, pending([group for _, group in ending]), strict=False):
            self.depths.update((move.transfer, depth) for move in group)
        turns.update((group[-1], (place, group)) for place, group in ending)
        steps += [((*place, 0, *self._key(m)), (group, None)) for m, (place, group) in turns.items()]
        return [step for _, step in sorted(steps, key=lambda step: step[0])]

    def _key(self, move: Move) -> tuple[int, ...]:
        return move.start, *_stable(move)

    def _local_place(self, move: Move) -> Place:
        """Of a transfer that moves nothing: before all others, if what it reads is at hand, since a gather may be
        made of it that is issued at once."""
        return (-1, 0) if self.roles.given(move.operand) else (2 * move.start + 1, 0)

    def closing(self) -> list[Move]:
        return self._unfollowed([m for m in self.all if m.moves and self._role(m) == "ending"])

    def _unfollowed(self, last: Sequence[Move]) -> list[Move]:
        return [m for m in last if m.reader.op == "output" or m.reader in self.settled]

    def _last_groups(self, last: Sequence[Move], merge: MergeRule) -> list[Sequence[Move]]:
        """Merged are gradients that no other transfer follows."""
        free = self._unfollowed(last)
        held = [[m] for m in last if m not in set(free)]
        return [*held, *merge("last", free, self.ops)]

    def _let_pass(self, ready: int, urgent: Sequence[int], reach: int) -> int:
        following = next(iter(urgent[bisect_left(urgent, ready) :]), len(self.ops))
        if following == len(self.ops) or self.products[following + 1] - self.products[ready + 1] > reach:
            return 2 * ready + 1
        return 2 * following + 1

    def _role(self, move: Move) -> TransferRole:
        return self.roles.of(move.reader, move.operand)

    def _settled(self) -> set[fx.Node]:
        """Ops that end the phase and that no transfer at all comes after."""
        followed = {m.operand for m in self.all}
        return ops_that_end([op for op in self.ops if op not in followed])


def _together(moves: Sequence[Move]) -> list[list[Move]]:
    """In the order in which they are ready, cut where one is read before the next is ready: so none in a run is
    computed from what another delivers."""
    runs: list[list[Move]] = []
    for move in sorted(moves, key=lambda m: (m.start, *_stable(m))):
        if runs and min(m.end for m in runs[-1]) > move.start:
            runs[-1].append(move)
        else:
            runs.append([move])
    return runs


def _stable(move: Move) -> tuple[int, int]:
    return move.end, move.index


def step_places(joint: JointGraph, planned: PlannedGraph) -> Mapping[Transfer, tuple[int, ...]]:
    """Of transfers of several collectives of which not all start at its turn: the place in its phase, as in `Turn`, at
    which each starts. One of them is the turn's."""
    turns = planned.turns
    count = {transfer: sum(step.kind is not None for step in way) for transfer, way in planned.steps.items()}
    if max(count.values(), default=0) < 2:
        return {}
    found: dict[Transfer, tuple[int, ...]] = {
        transfer: (*(place for place, _ in starts), turns[transfer][1])
        for transfer, starts in planned.starts.items()
    }
    for ops, moves in by_segment(joint, transfers(joint, planned.layouts)):
        ending = [move.transfer for move in closing(ops, joint, moves)]
        places = sorted({turns[transfer][1] for transfer in ending})
        end = max((turns[move.transfer][1] for move in moves), default=0) + 1
        for transfer in ending:
            if count[transfer] > 1:
                own = places.index(turns[transfer][1])
                every = (*places[own:], *range(end, end + count[transfer]))
                found[transfer] = every[: count[transfer]]
    return found
