"""Forward ops that the backward runs once more, instead of reading what the forward kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx

from passes.ir.graph_pass import duplicate_joint, erase_dead
from passes.ir.joint import JointGraph, after_tangents, map_operands, ops_by_phase, tensor_operands
from passes.ir.op_traits import is_use, is_view, when_read
from passes.rules.core.rule_registry import rows_passed_on

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
