"""A graph in which every candidate is offered both ways: kept for the backward, or computed again.

    %h: f32[8, 64] = gelu(%a)
    %y: f32[8, 16] = contract(%h, %w)
    %dw            = contract(%dy, %h)                              // backward
    ->
    %h_again: f32[8, 64]  = gelu(%a)
    %h_either: f32[8, 64] = either(%h, %h_again)
    %dw                   = contract(%dy, %h_either)

Only values that the forward stores may be kept; all others are there again or not at all. What is kept for copies
alone, where the forward is cut, is an `either` of itself twice: kept, or absent as they are. It is for the search,
which chooses a state with the layouts: `either` reads one of its operands, and a copy that nothing reads is absent,
as is what only absent ops read (`passes.search.offered`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

import passes.ops.graph_marks  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::either)
from passes.ir.joint import JointGraph, result_index
from passes.ir.op_traits import is_either, is_use, is_view
from passes.ir.rewrite import duplicate_joint
from passes.states.backward_copies import AGAIN, Copies
from passes.states.cut_points import Place, candidates
from passes.strategies.traffic import TrafficModel

EITHER = "_either"
"""Ends the names of what reads one of two."""


@dataclass(frozen=True)
class Offers:
    """joint: the graph with copies. copies: copy -> the op of the forward that it repeats.
    optional: nodes that may be absent: copies, `either`, and every `use` that one of those reads or makes.
    pinned: ops of which there is a copy in any case."""

    joint: JointGraph
    copies: dict[str, str]
    optional: frozenset[str]
    pinned: tuple[str, ...] = ()


def offered(joint: JointGraph, kept: Sequence[Place], traffic: TrafficModel) -> Offers:
    """Offers for every op that may be computed again if what is alive at the places `kept` is kept.

    traffic: which values are stored. `joint` is left as it is; `kept` are of it.
    """
    wanted = candidates(joint, kept)
    stored = {node.name for node in wanted if traffic(node).writes}
    copied = duplicate_joint(joint)
    writer = _Offers(copied, [node.name for node in wanted], stored)
    writer.write()
    copies = {copy.name: node.name for node, copy in writer.copies.items()}
    return Offers(copied, copies, _optional(copied, copies))


class _Offers(Copies):
    """Copies, of which those of stored values are read through an `either`."""

    def __init__(self, joint: JointGraph, names: Collection[str], stored: Collection[str]) -> None:
        super().__init__(joint, names)
        self._stored = stored
        self._eithers: dict[fx.Node, fx.Node] = {}

    def read(self, node: fx.Node) -> fx.Node:
        if result_index(node)[0].name not in self._stored or not isinstance(node.meta["val"], torch.Tensor):
            return self.copies[node]
        if node not in self._eithers:
            self._eithers[node] = self._either(node, self.copies[node])
        return self._eithers[node]

    def served(self) -> None:
        """What is kept for copies alone need not be kept where there are none: it is kept, or nothing reads it."""
        copies = list(self.copies.values())
        first: dict[fx.Node, fx.Node] = {}
        for copy in copies:
            for operand in copy.all_input_nodes:
                first.setdefault(operand, copy)
        order = {node: place for place, node in enumerate(self.joint.graph.nodes)}
        for operand in first:
            readers = [user for user in operand.users if user in set(copies)]
            if self._is_for_copies(operand, readers):
                before = min(readers, key=order.__getitem__)
                with operand.graph.inserting_before(before):
                    either = self._new_either(operand, operand)
                either.meta = {**operand.meta, "phase": "backward", "again": True}
                for reader in readers:
                    reader.replace_input_with(operand, either)

    def _is_for_copies(self, node: fx.Node, copies: Collection[fx.Node]) -> bool:
        """Whether it is an op of the forward of which the backward has copies alone."""
        if node not in self.forward or node in self.chosen or is_view(node) or is_use(node):
            return False
        others = (user for user in _readers(node) if user not in copies)
        return not any(user in self.backward or user.meta.get("again") for user in others)

    def _new_either(self, kept: fx.Node, again: fx.Node) -> fx.Node:
        operation = torch.ops.autoshard.either.default
        return kept.graph.create_node("call_function", operation, (kept, again), {}, name=kept.name + EITHER)

    def _either(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        with node.graph.inserting_after(copy):
            either = self._new_either(node, copy)
        either.meta = dict(copy.meta)
        return either


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads the value, or a view of it."""
    for user in node.users:
        yield user
        if is_view(user):
            yield from _readers(user)


def without_either(name: str, again: Collection[str]) -> str:
    """What a node of a graph of offers is called where the ops `again` are copied and no others.

    "h_either_use_again" is "h_again_use_again" if h is computed again, and "h_use_again" if it is kept."""
    value, found, rest = name.partition(EITHER)
    return name if not found else value + (AGAIN if value in again else "") + rest


def _optional(joint: JointGraph, copies: Collection[str]) -> frozenset[str]:
    found = {node for node in joint.graph.nodes if node.name in copies or is_either(node)}
    uses = [n for n in joint.graph.nodes if is_use(n)]
    found |= {n for n in uses if not found.isdisjoint((*n.users, *n.all_input_nodes))}
    return frozenset(node.name for node in found)
