"""What may be computed again in the backward, and a graph in which all of it is offered both ways.

Recomputation may begin at places of the forward at which little is alive. What is alive there is kept whatever else is
computed again. So copies are made for one part of the graph at a time, and live no longer than the backward of that
part: a transformer is cut at its residual stream, a U-Net at its skips. In a graph of offers every candidate is there
both ways, kept for the backward or computed again:

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

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

import passes.ops.registration  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::either)
from passes.ir.graph_pass import duplicate_joint
from passes.ir.joint import JointGraph, dependents, ops_by_phase, result_index, results_nbytes
from passes.ir.op_traits import draws, is_collect, is_either, is_product, is_use, is_view, storage_root
from passes.rules.core.rule_registry import rows_passed_on
from passes.states.compute_again import AGAIN, Copies
from passes.strategies.traffic import TrafficModel

Place = frozenset[fx.Node]
"""The values alive at one place of the forward."""


_WIDER = 2.0
"""How many times as many bytes may be alive at a place as at the wider one beside it."""


def places(joint: JointGraph) -> tuple[Place, ...]:
    """In the order of the forward: between two products the place with the fewest bytes alive, where that is no
    more than at the places before and behind it. Left out is what is much wider than both of those that are left beside
    it: a low-rank product amid an attention, routed tokens amid a block.

    Values count that depend on a parameter and that the forward still reads; views as what they view.
    """
    forward, _ = ops_by_phase(joint)
    main = _trained_values(joint, forward)
    alive = _alive(forward, main)
    ends = [step for step, node in enumerate(forward) if is_product(node) and node in main]
    lowest: list[tuple[int, Place]] = []
    for first, last in pairwise([0, *ends]):
        inside = [alive[step] for step in range(first, last) if alive[step][1]]
        lowest.extend(sorted(inside, key=lambda found: found[0])[:1])
    found: list[tuple[int, Place]] = []
    for i, (nbytes, place) in enumerate(lowest):
        around = [other for other, _ in lowest[max(0, i - 1) : i + 2]]
        if nbytes <= min(around) and place not in [other for _, other in found[-1:]]:
            found.append((nbytes, place))
    return tuple(place for i, (nbytes, place) in enumerate(found) if nbytes <= _WIDER * _beside(found, i))


def _beside(found: Sequence[tuple[int, Place]], i: int) -> float:
    """Bytes at the wider of the places before and behind; at the ends there is one of them, and alone none."""
    return max((nbytes for nbytes, _ in (*found[max(0, i - 1) : i], *found[i + 1 : i + 2])), default=math.inf)


def candidates(joint: JointGraph, kept: Sequence[Place]) -> list[fx.Node]:
    """The ops of the forward that may be computed again, if what is alive at `kept` is kept."""
    forward, _ = ops_by_phase(joint)
    main = _trained_values(joint, forward)
    stay = frozenset[fx.Node]().union(*kept)
    return [n for n in forward if n in main and n not in stay and _may_run_again(n)]


def _may_run_again(node: fx.Node) -> bool:
    """What runs before or after the pieces of a batch runs once, and what a piece leaves behind is counted once."""
    runs_late = node.meta.get("runs", "piece") == "piece" and not is_collect(node)
    return runs_late and not is_use(node) and not is_view(node) and not draws(node)


def known_ops(joint: JointGraph, names: Collection[str]) -> list[str]:
    """Those of `names` that are ops of the forward and may be computed again."""
    wanted = set(names)
    return [node.name for node in candidates(joint, ()) if node.name in wanted]


def users_choice(joint: JointGraph) -> list[str]:
    """The ops that run under `torch.utils.checkpoint`, but for those whose results are read outside of that call, or
    saved by its policy (`create_selective_checkpoint_contexts`)."""
    forward, _ = ops_by_phase(joint)
    inside = set(forward)

    def read_outside(node: fx.Node, region: int | None) -> bool:
        readers = [user for user in node.users if user.op == "output" or user in inside]
        return any(
            read_outside(user, region) if is_use(user) or is_view(user) else _region(user) != region
            for user in readers
        )

    allowed = candidates(joint, ())
    return [
        node.name
        for node in allowed
        if _region(node) is not None and "saved" not in node.meta and not read_outside(node, _region(node))
    ]


def _region(node: fx.Node) -> int | None:
    return node.meta.get("checkpoint")


def _trained_values(joint: JointGraph, forward: Sequence[fx.Node]) -> set[fx.Node]:
    """Ops of the forward that depend on a trained parameter."""
    return dependents(forward, joint.trained) - joint.trained


def _alive(forward: Sequence[fx.Node], main: set[fx.Node]) -> list[tuple[int, Place]]:
    """After each op: the bytes of what is alive, and what that is."""
    last: dict[fx.Node, int] = {}
    for step, node in enumerate(forward):
        for operand in node.all_input_nodes:
            last[_owner(operand)] = step
    ending: dict[int, list[fx.Node]] = {}
    for node, step in last.items():
        ending.setdefault(step, []).append(node)
    now: dict[fx.Node, int] = {}
    found: list[tuple[int, Place]] = []
    nbytes = 0
    for step, node in enumerate(forward):
        if node in main and _owner(node) is node and last.get(node, -1) > step:
            now[node] = results_nbytes(node)
            nbytes += now[node]
        for gone in ending.get(step, ()):
            nbytes -= now.pop(gone, 0)
        found.append((nbytes, frozenset(now)))
    return found


def _owner(node: fx.Node) -> fx.Node:
    return result_index(storage_root(node))[0]


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
    writer = _Offers(copied, {node.name for node in wanted}, stored)
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
            copy = self.copies[node]
            with node.graph.inserting_after(copy):
                self._eithers[node] = _either(node, copy)
        return self._eithers[node]

    def served(self) -> None:
        """What is kept for copies alone need not be kept where there are none: it is kept, or nothing reads it."""
        copies = dict.fromkeys(self.copies.values())
        order = {node: place for place, node in enumerate(self.joint.graph.nodes)}
        for operand in dict.fromkeys(operand for copy in copies for operand in copy.all_input_nodes):
            readers = [user for user in operand.users if user in copies]
            if self._is_for_copies(operand, readers):
                before = min(readers, key=order.__getitem__)
                with operand.graph.inserting_before(before):
                    either = _either(operand, operand, phase="backward", again=True)
                for reader in readers:
                    reader.replace_input_with(operand, either)

    def _is_for_copies(self, node: fx.Node, copies: Collection[fx.Node]) -> bool:
        """Whether it is an op of the forward of which the backward has copies alone."""
        if node not in self.forward or node in self.chosen or is_view(node) or is_use(node):
            return False
        others = (user for user in _readers(node) if user not in copies)
        return not any(user in self.backward or user.meta.get("again") for user in others)


def _either(kept: fx.Node, copy: fx.Node, **said: Any) -> fx.Node:
    """Its meta is that of `copy`, but for what is said."""
    operands, name = (kept, copy), kept.name + EITHER
    either = kept.graph.create_node("call_function", torch.ops.autoshard.either.default, operands, name=name)
    others = {key: value for key, value in copy.meta.items() if key != "rows"}
    either.meta = others | rows_passed_on(copy, 2) | said
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
