"""What each transfer of a phase is for: the one analysis behind prices, turns, buckets, order; which may hide.

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

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from torch import fx

from passes.ir.joint import InputKind, JointGraph, result_index, segments, tensor_operands
from passes.ir.op_traits import fuses, is_collect, is_collective, is_piece, is_product, is_view
from passes.ir.torch_dispatch import input_nodes

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
