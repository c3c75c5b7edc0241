"""The redistributions that layouts ask for, of which phase each is, and what it is for there: the one
analysis behind prices, turns, buckets, order; which may hide.

    role        because                                                       e.g.
    "at hand"   its operand exists before the phase has run a product         a parameter's shard, a saved value
    "ending"    only the end of the phase reads what is made of its result    a gradient to its parameter's layout
    "awaited"   neither: ops wait for it                                      a partial sum between two products

A transfer may be both of the first two. It is "at hand" if an op reads its result beside a value that is not (the last
layer's bias), "ending" otherwise (the last layer's bias's gradient): nobody needs it early. Only products
(`op_traits.is_product`) take long enough to hide a transfer behind; what leads to the end fuses or is a view.

On the global graph a transfer is an edge (reader, operand), of which the layouts make some move; before layouts are
known, no edge is taken to move. On a rank's graph a transfer is a collective, which reads its operand.

A collective hides if nothing waits for it while its phase computes: its `TransferRole` is "at hand" or "ending". What
is awaited, a partial sum between two products for example, counts in full; and so do two kinds that have a role but
nothing to hide behind:

    what the caller gives, for ops that run before any product    the input of the first layer, the loss's tangent
    what the caller waits for                                     everything that ends the forward

`passes.schedule.overlap` orders a rank's graph so that what may hide does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from torch import __version__ as torch_version
from torch import fx

from passes.ir.joint import InputKind, JointGraph, result_index, segments, tensor_operands
from passes.ir.op_traits import fuses, is_collect, is_collective, is_of_piece, is_piece, is_product, is_view
from passes.ir.torch_dispatch import input_nodes
from passes.layout.layout import Assignment, Layout
from passes.lower.op_on_rank import possible_interiors
from passes.plan.describe import end_names, op_counts, shapes_of
from passes.plan.planned_graph import NodeRecord, PlannedGraph, Transfer, Turn
from passes.strategies.cuts import ops_of

_PARTS = ("forward", "backward")
_PARTS_OF_PIECES = (
    "part before the pieces",
    "forward of a piece",
    "backward of a piece",
    "part after the pieces",
)


def graph_problems(planned: PlannedGraph, joint: JointGraph) -> Iterator[str]:
    """Where a graph whose records are whole (`autoshard.plan.plan_check`) is not of `joint`, with what runs again, in
    sentences."""
    yield from _records_that_differ(planned.nodes, joint)
    assignment = planned.layouts
    unknown = list(_unknown_factors(joint, assignment))
    yield from unknown
    names = _PARTS if joint.pieces == 1 else _PARTS_OF_PIECES
    for number, (_, moves) in enumerate(by_segment(joint, transfers(joint, assignment))):
        for move in moves:
            phase = planned.turns[move.transfer][0]
            if phase != number:
                reader, position = move.transfer
                said = names[phase] if phase < len(names) else f"part {phase} of the step"
                yield f"operand {position} of node {reader} has a turn in the {said}"
    if unknown or not planned.interiors:
        return
    possible = {p.node.name: p.factor for p in possible_interiors(joint, assignment, planned.steps)}
    for name, factor in planned.interiors.items():
        if possible.get(name) != factor:
            yield f"node {name} cannot be computed in parts along {factor}"


def _unknown_factors(joint: JointGraph, assignment: Assignment) -> Iterator[str]:
    for node, rule in ops_of(joint):
        factors = [split.factor for split in assignment[node.name].splits]
        if not any(all(factor in way.sizes for factor in factors) for way in rule.ways):
            yield f"node {node.name} is split along {', '.join(factors)}, and its op has no such factor"


def _records_that_differ(records: Sequence[NodeRecord], joint: JointGraph) -> Iterator[str]:
    """Where `records` are not of `joint`, in sentences. Its hash, stored beside them, does not cover them."""
    by_name = {record.name: record for record in records}
    for node in joint.graph.nodes:
        if node.op not in ("placeholder", "call_function") or result_index(node)[0] is not node:
            continue
        record = by_name.pop(node.name, None)
        if record is None:
            yield f"the model's node {node.name} is missing"
        elif [(r.shape, r.dtype) for r in record.results] != [(tuple(s), d) for s, d in shapes_of(node)]:
            yield f"node {node.name} has results {', '.join(map(str, record.results))}, and not those of the model"
        elif [(o.source, o.result) for o in record.operands] != [
            (producer.name, index) for producer, index in map(result_index, tensor_operands(node))
        ]:
            yield f"node {node.name} reads {', '.join(o.source for o in record.operands)}, and not what the model does"
    ends = [(p.name, i) for p, i in map(result_index, tensor_operands(joint.output_node))]
    output = by_name.pop("output", None)
    if output is None or [(o.source, o.result) for o in output.operands] != ends:
        yield "its output is not the model's"
    elif output.ends not in ((), end_names(joint)):
        yield f"its output is {', '.join(output.ends)}, and not what the model returns"
    yield from (f"the model has no node {name}" for name in by_name)


def differences(records: Sequence[NodeRecord], joint: JointGraph, made_on: str) -> list[str]:
    """In what the graph of the records and `joint` differ, a line each: their ends, else their ops. made_on: device and
    versions that the records were made with."""
    mine = {(r.op, r.text): r.results[0] for r in records if r.op in ("param", "buffer", "input")}
    theirs = {
        (spec.kind, f"{spec.kind} {spec.name}"): tuple(node.meta["val"].shape)
        for node, spec in joint.given
        if spec.kind in ("param", "buffer", "input")
    }
    lines = [f"  {text}: in the plan, not in the model" for _, text in mine.keys() - theirs.keys()]
    lines += [f"  {text}: in the model, not in the plan" for _, text in theirs.keys() - mine.keys()]
    lines += [
        f"  {key[1]}: {tuple(mine[key].shape)} in the plan, {shape} in the model"
        for key, shape in theirs.items()
        if key in mine and tuple(mine[key].shape) != shape
    ]
    return sorted(lines) or [
        "  parameters and inputs agree; the computation differs",
        *_ops_that_differ(records, joint),
        f"  plan: {made_on}; here: {joint.device.type}, torch {torch_version}",
    ]


def _ops_that_differ(records: Sequence[NodeRecord], joint: JointGraph) -> list[str]:
    ends = ("param", "buffer", "constant", "input", "tangent", "seed", "output")
    mine = Counter(f"{r.op} {r.results[0].dtype}" for r in records if r.op not in ends)
    here = op_counts(joint)
    return [
        f"  only {where}: " + ", ".join(f"{count} {op}" for op, count in more.most_common(6))
        for where, more in (("in the plan", mine - here), ("here", here - mine))
        if more
    ]


@dataclass(frozen=True, eq=False)
class Move:
    """A transfer. moves: whether it needs a collective (of some rank). start, end: places in its phase's ops
    of the op that computes the operand (-1: at hand from the start) and of the reader (their number: the
    end of the phase)."""

    reader: fx.Node
    index: int
    operand: fx.Node
    held: Layout
    wanted: Layout
    moves: bool
    start: int = -1
    end: int = 0

    @property
    def transfer(self) -> Transfer:
        return self.reader.name, self.index


def transfers(joint: JointGraph, assignment: Assignment) -> list[Move]:
    """What `assignment` asks for, in the order of the graph; not yet placed in a phase."""
    found: list[Move] = []
    for reader in joint.graph.nodes:
        if reader.op == "placeholder" or result_index(reader)[0] is not reader:
            continue
        wanted = assignment[reader.name].operands
        for index, (operand, layout) in enumerate(zip(tensor_operands(reader), wanted, strict=True)):
            producer, result = result_index(operand)
            held = assignment[producer.name].results[result]
            if held != layout:
                found.append(Move(reader, index, operand, held, layout, not _is_local(held, layout)))
    return found


def _is_local(held: Layout, wanted: Layout) -> bool:
    """Whether every rank has its part already: it slices, or starts a pending sum."""
    for dim, (mine, theirs, *sizes) in enumerate(
        zip(held.dims, wanted.dims, held.sizes, wanted.sizes, strict=True)
    ):
        if held.halos[dim] != wanted.halos[dim] and mine:
            return False
        nested = mine == theirs[: len(mine)] and sizes == [None, None]
        if mine and not nested and (mine, sizes[0]) != (theirs, sizes[1]):
            return False
    return set(held.partial) <= set(wanted.partial)


_FORWARD, _AFTER = 1, 3
"""Of a batch in pieces."""


def _late_transfers(joint: JointGraph, moves: Sequence[Move], forward: set[fx.Node]) -> set[Move]:
    """Those of the backward: only gradients depend on what they deliver. forward: its ops."""
    kinds = [spec.kind for spec, result in joint.returned if result is not None]
    at_end = lambda move: kinds[move.index] == "grad"
    return {m for m in moves if (at_end(m) if m.reader.op == "output" else m.reader not in forward)}


def by_segment(joint: JointGraph, moves: Sequence[Move]) -> list[tuple[Sequence[fx.Node], list[Move]]]:
    """Per part of a step in which transfers have an order of their own, in order, its ops and its transfers: those of
    the backward bring what only gradients depend on."""
    parts = joint.known("segments", lambda: segments(joint))
    if joint.pieces == 1:
        late = _late_transfers(joint, moves, set(parts.forward))
        return [
            (parts.forward, [m for m in moves if m not in late]),
            (parts.backward, [m for m in moves if m in late]),
        ]
    ordered: tuple[Sequence[fx.Node], ...] = (parts.before, parts.forward, parts.backward, parts.after)
    place = {node: number for number, ops in enumerate(ordered) for node in ops}
    part = {move: _part(move, place) for move in moves}
    return [(ops, [m for m in moves if part[m] == number]) for number, ops in enumerate(ordered)]


def _part(move: Move, place: Mapping[fx.Node, int]) -> int:
    if move.reader.op != "output":
        return 0 if is_piece(move.reader) else place.get(move.reader, _AFTER)
    # What a stage of a pipeline sends is brought to where it is sent from in every piece.
    if not is_of_piece(move.operand):
        return _AFTER
    return place.get(result_index(move.operand)[0], _FORWARD)


def ring_turns(joint: JointGraph, planned: PlannedGraph) -> Mapping[str, tuple[int, ...]]:
    """Of ops that exchange within themselves: behind the last transfer that they are computed from, in the graph's
    order. So all that is computed from them has later turns."""
    rings = planned.rings
    if not rings:
        return {}
    moves = transfers(joint, planned.layouts)
    moving = {move.transfer for move in moves if move.moves}
    phase = {node: number for number, (ops, _) in enumerate(by_segment(joint, moves)) for node in ops}
    last: dict[fx.Node, Turn] = {}
    found: dict[str, tuple[int, ...]] = {}
    for place, node in enumerate(joint.graph.nodes):
        operands = tensor_operands(node)
        own = (planned.turns[read] for i, _ in enumerate(operands) if (read := (node.name, i)) in moving)
        last[node] = max((*(last[operand] for operand in operands), *own), default=(-1, 0))
        if node.name in rings:
            before = last[node] if last[node][0] == phase[node] else (phase[node], -1)
            found[node.name] = *before, place
    return found


TransferRole = Literal["at hand", "awaited", "ending"]

Read = tuple[fx.Node, fx.Node]
"""(reader, operand)."""


class PhaseRoles:
    """The roles of one phase's transfers. ops: those of the phase, in an order that may run. moved: reads that need a
    collective, if known: what is computed from their results is not at hand.

    closing: `ops_that_end`.
    """

    def __init__(self, ops: Sequence[fx.Node], moved: AbstractSet[Read] = frozenset()) -> None:
        arrives = lambda node: is_collective(node) or any((node, n) in moved for n in input_nodes(node))
        before_products = _ops_before(ops, is_product)
        self._ops = frozenset(ops)
        self._at_hand = set(_ops_before(ops, lambda node: is_product(node) or arrives(node)))
        self._ending_alone = ops_that_end(before_products)
        self.closing = ops_that_end(ops)

    def given(self, operand: fx.Node) -> bool:
        """Whether the value exists before any product of the phase has run: another phase or the caller made it, or
        ops at hand do."""
        return operand not in self._ops or operand in self._at_hand

    def of(self, reader: fx.Node, operand: fx.Node) -> TransferRole:
        if reader.op == "output" or reader in self._ending_alone:
            return "ending"
        if self.given(operand):
            return "at hand"
        return "ending" if reader in self.closing else "awaited"


def ops_that_end(ops: Sequence[fx.Node]) -> set[fx.Node]:
    """Views, collectives and ops that fuse, among `ops`, that only the output and ops that end read, and what pieces
    add to the whole, which is read behind all of them. Other ops, the gradient of an embedding for example, take time
    of their own: their operands are awaited."""
    found: set[fx.Node] = set()
    for node in reversed(ops):
        light = fuses(node) or is_view(node) or is_collective(node)
        read_last = all(user.op == "output" or user in found for user in node.users)
        if is_collect(node) or (light and read_last):
            found.add(node)
    return found


def _ops_before(ops: Sequence[fx.Node], stops: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Those of `ops` that neither stop nor come after one that does."""
    after: set[fx.Node] = set()
    for node in ops:
        if stops(node) or any(n in after for n in input_nodes(node)):
            after.add(node)
    return [node for node in ops if node not in after]


@dataclass(frozen=True)
class HiddenReads:
    """Reads, each (name of the reader, position among its tensor operands); the reader "output" is the end of
    the graph. hides: whose redistribution may run behind computation.

    ending: what only the end of the backward needs, reductions of gradients. Small ones travel
    together (`passes.schedule.bucket_plan`) and are priced so.
    """

    hides: frozenset[tuple[str, int]]
    ending: frozenset[tuple[str, int]]


def hidden_reads(joint: JointGraph) -> HiddenReads:
    """The reads of `joint` for which nothing waits, whatever the layouts."""
    parts = segments(joint)
    early, late = _with_roles(joint, parts.forward, "input"), _with_roles(joint, parts.backward, "tangent")
    ends = (spec for spec, result in joint.returned if result is not None)
    ending = {read for read, role in late if role == "ending"}
    at_hand = {read for read, role in (*early, *late) if role == "at hand"}
    at_end = {("output", place) for place, spec in enumerate(ends) if spec.kind == "grad"}
    # What is done once, behind the pieces of a batch, has nothing left to hide behind.
    hides = at_hand | ending | (at_end if joint.pieces == 1 else set())
    return HiddenReads(frozenset(hides), frozenset(ending | at_end))


def _with_roles(
    joint: JointGraph, ops: Sequence[fx.Node], given: InputKind
) -> list[tuple[tuple[str, int], TransferRole]]:
    """Reads of the ops of a phase. given: the kind of input that the caller gives it; reads of those before any
    product are left out."""
    roles = PhaseRoles(ops)
    callers = set(joint.given_as(given))
    found: list[tuple[tuple[str, int], TransferRole]] = []
    for node in ops:
        first = all(map(roles.given, node.all_input_nodes))
        if first and any(n in callers for n in node.all_input_nodes):
            callers.add(node)
        if result_index(node)[0] is node and not is_piece(node):
            for position, operand in enumerate(tensor_operands(node)):
                if not (first and operand in callers):
                    found.append(((node.name, position), roles.of(node, operand)))
    return found
