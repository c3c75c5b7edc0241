"""Forward ops that the backward runs once more, instead of reading what the forward kept; and which values it
reads all the same: an exact minimum cut over bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache

import networkx as nx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx

from passes.ir.graph_pass import duplicate_joint, erase_dead
from passes.ir.joint import JointGraph, after_tangents, map_operands, ops_by_phase, tensor_operands
from passes.ir.op_traits import (
    fuses,
    is_cheap,
    is_collective,
    is_reduction,
    is_use,
    is_view,
    is_whole_view,
    numel,
    op_name,
    when_read,
)
from passes.rules.core.rule_registry import rows_passed_on
from passes.strategies.traffic import STORED_ALONE, reads_little

AGAIN, _USE = "_again", "_use_again"
"""End the names of copies, and of what their readers share."""


def copied_ops(names: Iterable[str]) -> tuple[str, ...]:
    """The ops of which copies are among `names`: all there are, of the nodes of a graph with copies."""
    found = (name for name in names if name.endswith(AGAIN) and not name.endswith(_USE))
    return tuple(name.removesuffix(AGAIN) for name in found)


def copies_in(joint: JointGraph) -> tuple[str, ...]:
    """The ops of which there are copies in a graph."""
    return copied_ops(node.name for node in joint.graph.nodes)


class Copies:
    """Writes copies of the forward ops `names` into `joint`, in place. `copies`: op -> its copy."""

    def __init__(self, joint: JointGraph, names: Collection[str]) -> None:
        self.joint = joint
        self.forward, self.backward = map(set, ops_by_phase(joint))
        self.order = {node: place for place, node in enumerate(joint.graph.nodes)}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.chosen: set[fx.Node] = set()
        tangents = after_tangents(joint)
        for node in self.order:
            viewed = is_view(node) and node not in tangents and self._is_of_chosen(node)
            if node.op == "call_function" and not is_use(node) and (node.name in names or viewed):
                self.chosen.add(node)

    def _is_of_chosen(self, view: fx.Node) -> bool:
        """Whether it shows what is copied: views share a value through a `use` as other readers do."""
        return any(self._base(operand) in self.chosen for operand in view.all_input_nodes)

    def write(self) -> None:
        for node in self.order:
            if node.op == "call_function" and node in self.backward and node not in self.chosen:
                self._serve(node)
        self.served()
        place = {node: place for place, node in enumerate(self.joint.graph.nodes)}
        new = frozenset(self.copies.values())
        for node in list(place):
            if _shareable(node):
                self._share(node, place, new)
        erase_dead(self.joint.graph)
        self.joint.graph.lint()

    def served(self) -> None:
        """Called once every reader has its copies, and none shares yet."""

    def _serve(self, reader: fx.Node) -> None:
        """Let `reader` read copies where there are, made right before it."""
        wanted = {operand: self._base(operand) for operand in reader.all_input_nodes}
        again = {operand: base for operand, base in wanted.items() if base in self.chosen}
        for node in sorted(self._missing(again.values()), key=self.order.__getitem__):
            self.copies[node] = self._copy(node, reader)
        for operand, base in again.items():
            reader.replace_input_with(operand, self.read(base))

    def read(self, node: fx.Node) -> fx.Node:
        """What the backward reads instead of `node`, which was copied."""
        return self.copies[node]

    def _base(self, operand: fx.Node) -> fx.Node:
        """What a `use` of the forward is of: copies have uses of their own, if not of one that pieces share."""
        base = operand
        while is_use(base) and base in self.forward:
            (base,) = base.all_input_nodes
        return operand if _is_before(operand) and base not in self.chosen else base

    def _missing(self, bases: Iterable[fx.Node]) -> set[fx.Node]:
        """The ops among `bases`, and what they need, that are to be copied and are not yet."""
        found: set[fx.Node] = set()
        stack = list(bases)
        while stack:
            node = stack.pop()
            if node in self.chosen and node not in self.copies and node not in found:
                found.add(node)
                stack.extend(map(self._base, node.all_input_nodes))
        return found

    def _copy(self, node: fx.Node, before: fx.Node) -> fx.Node:
        operands = [self._base(operand) for operand in tensor_operands(node)]
        args, kwargs = map_operands(node, [self.read(x) if x in self.copies else x for x in operands])
        with node.graph.inserting_before(before):
            copy = node.graph.create_node("call_function", node.target, args, kwargs, name=node.name + AGAIN)
        copy.meta = {**node.meta, "phase": "backward", "again": True}
        return copy

    def _share(self, value: fx.Node, place: Mapping[fx.Node, int], new: Collection[fx.Node]) -> None:
        """One `use` for the readers of a value in the backward, where a copy is one of them. new: the copies."""
        readers = [user for user in value.users if user in new or user in self.backward]
        if len(readers) < 2 or not any(reader in new for reader in readers):
            return
        use = next((reader for reader in readers if is_use(reader)), None)
        first = min(readers, key=place.__getitem__)
        if use is None:
            with value.graph.inserting_before(first):
                use = value.graph.create_node(
                    "call_function", torch.ops.autoshard.use.default, (value,), {}, name=value.name + _USE
                )
            origin = first if value.op == "placeholder" else value
            use.meta = {key: origin.meta[key] for key in ("module", "source") if key in origin.meta}
            use.meta.update(rows_passed_on(value, 1))
            use.meta.update(val=value.meta["val"], phase="backward", **when_read(value, readers))
        elif use is not first:
            first.prepend(use)
        for reader in readers:
            if reader is not use:
                reader.replace_input_with(value, use)


def _is_before(use: fx.Node) -> bool:
    """Whether pieces of a batch share it."""
    return is_use(use) and use.meta.get("runs") == "before"


def _shareable(node: fx.Node) -> bool:
    """A constant can be had in any layout for nothing."""
    if (
        node.op not in ("placeholder", "call_function")
        or node.target is torch.ops.aten.full.default
        or (is_use(node) and not _is_before(node))
    ):
        return False
    return isinstance(node.meta.get("val"), torch.Tensor)


def compute_again(joint: JointGraph, names: Collection[str]) -> JointGraph:
    """A new joint graph in which the backward reads no value of the forward ops `names`, but copies of them.

        %h: f32[8, 64] = gelu(%a)                                   names: h
        %y: f32[8, 16] = contract(%h, %w)
        %dw            = contract(%dy, %h)                          // backward
        ->
        %h: f32[8, 64] = gelu(%a)
        %y: f32[8, 16] = contract(%h, %w)
        %h_again: f32[8, 64] = gelu(%a)                             // backward
        %dw            = contract(%dy, %h_again)

    A copy stands right before its first reader and reads what the backward has: copies, or values that are kept. It
    is an op like any other, with layouts and a price of its own. Views of a copied value are copied with it. Readers
    in the backward share a `use`, as everywhere; so a weight is gathered once for an op that runs again and for its
    gradient.

    names: ops of the forward. `joint` is left as it is, and one that has these copies is returned.
    """
    missing = set(names) - set(copies_in(joint)) if names else set[str]()
    if not missing:
        return joint
    copied = duplicate_joint(joint)
    Copies(copied, names).write()
    return copied


def runs_again(node: fx.Node) -> bool:
    """Whether `node` is a copy, or was made for one: the backward runs it, whatever else may."""
    return bool(node.meta.get("again"))


def choose_saved(
    candidates: Sequence[fx.Node],
    forward: Set[fx.Node],
    backward: Set[fx.Node],
    pinned: Set[fx.Node],
    returned: Set[fx.Node],
    *,
    fused: bool,
) -> list[fx.Node]:
    """The nodes among `candidates` (in graph order) to save, at the least total bytes, or few more that are stored
    in any case.

    candidates: every op that may run in the forward: those it needs, and cheap ones that only the
                backward reads but that depend on no tangent (a boolean mask may be smaller than
                what it is computed from).
    forward:    the candidates that the forward runs in any case.
    backward:   the ops that run in the backward only.
    pinned:     candidates that must not be run again.
    returned:   candidates that are outputs of the forward: in memory anyway, so free to save.
    fused:      whether a compiler runs cheap ops in their readers' loops, and stores none that only those read.

    A candidate is either available in the backward (it descends only from graph inputs and saved
    values, through cheap ops) or in the cut. Of cuts that weigh the same the one nearest the backward wins: fewest ops
    run again, the same on every run.
    """
    place = {node: i for i, node in enumerate(candidates)}
    kept = [
        node in forward and (node in pinned or not _is_free_to_repeat(node, backward)) for node in candidates
    ]
    # What a kept value is computed from is there in the forward, whichever way the cut goes.
    readers = [
        [place[user] for user in node.users if user in place and not kept[place[user]]] for node in candidates
    ]
    saved: list[int] = []
    for group in _connected(readers):
        local = {i: number for number, i in enumerate(group)}
        ops = tuple(
            (
                1 if candidates[i] in returned else _bytes_saved(candidates[i], forward, fused),
                kept[i],
                any(user in backward for user in candidates[i].users),
                tuple(local[reader] for reader in readers[i]),
            )
            for i in group
        )
        saved += [group[number] for number in _cut(ops)]
    return [candidates[i] for i in sorted(saved)]


def _connected(readers: Sequence[Sequence[int]]) -> list[list[int]]:
    """The parts of a network that no edge connects, each in order."""
    beside: list[list[int]] = [list(each) for each in readers]
    for i, each in enumerate(readers):
        for reader in each:
            beside[reader].append(i)
    found: list[list[int]] = []
    seen: set[int] = set()
    for first in range(len(beside)):
        if first not in seen:
            seen.add(first)
            group = [first]
            for i in group:  # which grows meanwhile
                new = [other for other in beside[i] if other not in seen]
                seen.update(new)
                group += dict.fromkeys(new)
            found.append(sorted(group))
    return found


_Op = tuple[int | None, bool, bool, tuple[int, ...]]
"""What saving it costs, if it can be; whether the forward computes it for good; whether an op of the backward reads it;
and which others of its network do."""


@lru_cache(maxsize=1024)
def _cut(ops: tuple[_Op, ...]) -> tuple[int, ...]:
    """Which ops to save; found once for equal layers."""
    if not any(kept for _, kept, _, _ in ops) or not any(read for _, _, read, _ in ops):
        return ()
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    for i, (capacity, kept, read, readers) in enumerate(ops):
        limits = {} if capacity is None else {"capacity": capacity}
        network.add_edge((i, "in"), (i, "out"), **limits)
        if kept:
            network.add_edge("source", (i, "in"))
        if read:
            network.add_edge((i, "out"), "sink")
        for reader in readers:
            network.add_edge((i, "out"), (reader, "in"))
    # Of shallow networks with many ends this algorithm is the fastest; the cut nearest the sink is one, whichever runs.
    _, (near_source, _) = nx.minimum_cut(network, "source", "sink", flow_func=boykov_kolmogorov)
    return tuple(i for i in range(len(ops)) if (i, "in") in near_source and (i, "out") not in near_source)


def _is_free_to_repeat(node: fx.Node, backward: Set[fx.Node]) -> bool:
    if node.meta.get("halo"):
        # A rank's part with its halo around it: a copy of the part, which is often saved anyway. Saving both would
        # hold every activation twice, where splitting space is for want of memory.
        return True
    return is_cheap(node) and (is_whole_view(node) or not _read_whole(node, backward))


def _read_whole(node: fx.Node, backward: Set[fx.Node]) -> bool:
    """Whether an op of the backward needs the value in memory: computing it again is then not free."""
    return any(
        (user in backward and not is_cheap(user)) or (is_whole_view(user) and _read_whole(user, backward))
        for user in node.users
    )


def _bytes_saved(node: fx.Node, forward: Set[fx.Node], fused: bool) -> int | None:
    """What saving `node` costs; None where it cannot be saved (or its base is the one to save).

    Bytes weigh first, then the number of tensors. One that is stored for this alone, though its loop reads little,
    weighs `STORED_ALONE` of its bytes.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or is_whole_view(node):
        return None
    if is_collective(node) and "wait_tensor" not in op_name(node):
        return None
    nbytes = numel(node) * value.element_size()
    alone = fused and reads_little(node) and not _is_stored(node, forward)
    return (int(STORED_ALONE * nbytes if alone else nbytes) << 16) + 2 + alone


def _is_stored(node: fx.Node, forward: Set[fx.Node]) -> bool:
    """Whether the forward stores it in any case."""
    return any(
        _is_stored(user, forward) if is_whole_view(user) else not (fuses(user) or is_reduction(user))
        for user in node.users
        if user in forward
    )
