"""How many bytes each search node keeps resident, and from when to when."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value, node_values, result_index, tensor_operands
from passes.ir.op_traits import alias_chain, is_collect, is_either, is_use, is_view, storage_root
from passes.layout.layout import NodeLayouts
from passes.lower.rank_program import missing_tangents
from passes.strategies.prices import Prices, local_nbytes
from passes.strategies.traffic import TrafficModel, last_runs


@dataclass(frozen=True)
class InPlace(NodeLayouts):
    """Of what `may_be_another`: it reads the value in the layout in which it is held, and nothing more is stored."""


@dataclass(frozen=True)
class OneOf(NodeLayouts):
    """Of an `either`: it reads one of its operands, as it is held. kept: what the forward made, else the copy."""

    kept: bool = True


def may_be_another(node: fx.Node) -> bool:
    """Whether the node, in another layout than its operand is held in, is a copy that lives as long as its readers: a
    `use`, and a view of the forward that the backward reads. Other views are gone before long."""
    return is_use(node) or (is_view(node) and node.meta.get("phase") == "forward" and _is_read_late(node))


def _is_read_late(view: fx.Node) -> bool:
    aliases = lambda user: is_view(user) or is_use(user)
    return any(
        user.meta.get("phase") == "backward" or (aliases(user) and _is_read_late(user)) for user in view.users
    )


@dataclass(frozen=True)
class Residency:
    """intervals: per search node, half-open steps (positions in the graph's order) it is resident;
    nbytes: per search node, int64 bytes on the fullest rank per strategy.

    A parameter is resident throughout with its gradient and optimizer state. An op's result lives from its step to its
    last reader's; views alias their operand, fused results are never stored. A `use` counts what it gathered, and so
    does a view that the backward reads. Values the backward reads are live across the phases, tangents from the begin
    of the backward on, outputs until the forward ends. Where a batch is run in pieces, what they read of before lives
    as long as there are pieces, and so does what they leave behind. What a piece keeps for its backward is there
    throughout, once for every piece in flight, where several are.
    """

    intervals: tuple[tuple[int, int], ...]
    nbytes: tuple[np.ndarray, ...]

    @staticmethod
    def of(
        joint: JointGraph,
        nodes: Sequence[fx.Node | None],
        strategies: Sequence[tuple[NodeLayouts, ...]],
        prices: Prices,
    ) -> Residency:
        traffic, optimizer = prices.flow, prices.optimizer
        order = {node: step for step, node in enumerate(joint.graph.nodes)}
        end = len(order)
        first = next((step for node, step in order.items() if _in_piece(node)), 0)
        trained, absent = joint.trained, missing_tangents(joint)
        last = _last_reads(joint, order, traffic)
        tangents = set(joint.given_as("tangent"))
        backward = _forward_ends(order) + 1
        held_by = _HeldBytes(prices.mesh)
        intervals: list[tuple[int, int]] = []
        nbytes: list[np.ndarray] = []
        for node, options in zip(nodes, strategies, strict=True):
            if node is None:
                intervals.append((0, 0))
                nbytes.append(np.zeros(len(options), dtype=np.int64))
            elif node in tangents:
                # What no step is given takes nothing.
                intervals.append((backward, last.get(node, backward - 1) + 1))
                nbytes.append(held_by(node, options) * (node not in absent))
            elif node.op == "placeholder":
                # The value, its gradient and the optimizer's states.
                intervals.append((0, end))
                held = held_by(node, options)
                size = node_value(node).element_size()
                states = [optimizer.state_nbytes(int(n), size) for n in held] if node in trained else 0
                nbytes.append(held * (1 + (node in trained)) + np.array(states))
            elif is_either(node):
                kept, _ = tensor_operands(node)
                owner = storage_root(kept)
                # What is stored in any case is counted until the forward has read it.
                begin = last.get(owner, order[owner]) + 1 if traffic(owner).writes else order[owner]
                intervals.append((begin, last.get(node, order[node]) + 1))
                stays = np.array([isinstance(option, OneOf) and option.kept for option in options])
                nbytes.append(held_by(node, options) * stays)
            else:
                begin = first if is_collect(node) else order[node]
                intervals.append((begin, last.get(node, order[node]) + 1))
                moved = np.array([not isinstance(option, InPlace) for option in options])
                # Without a limit all strategies of a view stand for both.
                another = is_view(node) and not moved.all()
                held = held_by.read(node, options) if another else held_by(node, options)
                stored = is_use(node) or another or (traffic(node).writes and not is_view(node))
                nbytes.append(held * moved if stored else np.zeros_like(held))
        if joint.in_flight > 1:
            for place, node in enumerate(nodes):
                begin, stop = intervals[place]
                if node is not None and _is_kept(node) and begin < backward < stop:
                    intervals[place], nbytes[place] = (0, end), joint.in_flight * nbytes[place]
        return Residency(tuple(intervals), tuple(nbytes))


def _last_reads(joint: JointGraph, order: dict[fx.Node, int], traffic: TrafficModel) -> dict[fx.Node, int]:
    """Per node that owns storage, the last step at which it or a view of it is read (`last_runs`).

    A trained parameter counts its gradient: what was made of it is gone once it is read. Outputs are the caller's when
    the forward ends.
    """
    last: dict[fx.Node, int] = {}
    pieces = max((step for node, step in order.items() if _in_piece(node)), default=0)

    def read(value: fx.Node, step: int, late: int = 0) -> None:
        """late: until when, if another phase made it. Compilers write results over what a phase made itself."""
        for owner in _owners(value):
            crosses = is_either(owner) or owner.meta.get("phase") == "forward"
            last[owner] = max(last.get(owner, 0), step, late if crosses else 0)

    runs, trained = last_runs(order, traffic), joint.trained
    for node, step in order.items():
        if node.op != "output" and not is_either(node):
            late = runs[node] if node.meta.get("phase") == "backward" else 0
            for operand in tensor_operands(node):
                outlives = _in_piece(node) and not _in_piece(operand)
                read(operand, pieces if outlives else step, late)
    placeholders, ends = joint.placeholders, _forward_ends(order)
    for spec, result in joint.returned:
        if result is None:
            continue
        if spec.kind != "grad":
            read(result, ends)
        elif placeholders[spec.index] not in trained:
            read(result, len(order))
    return last


def _forward_ends(order: dict[fx.Node, int]) -> int:
    """The last step of the forward."""
    return max((step for node, step in order.items() if node.meta.get("phase") == "forward"), default=0)


def _is_kept(node: fx.Node) -> bool:
    """Whether it is what a piece may leave for its backward: a value that is kept or made again, one received, or one
    that was brought into another layout."""
    return _in_piece(node) and (is_either(node) or node.op == "placeholder" or may_be_another(node))


def _in_piece(node: fx.Node) -> bool:
    return node.meta.get("runs") == "piece"


def _owners(operand: fx.Node) -> Iterator[fx.Node]:
    """The chain of aliases. What an `either` keeps is counted as its own; what is computed again lives on in it."""
    for owner in alias_chain(operand):
        yield owner
        if is_either(owner):
            kept, again = tensor_operands(owner)
            if again is not kept:
                yield from _owners(again)
            return


class _HeldBytes:
    """Bytes of a node's results per strategy, or of its first operand as it reads it; nodes that share strategies and
    look alike share the array."""

    def __init__(self, mesh: MeshSpec) -> None:
        self._mesh = mesh
        self._known: dict[Hashable, np.ndarray] = {}

    def __call__(self, node: fx.Node, options: Sequence[NodeLayouts]) -> np.ndarray:
        values = node_values(node)
        looks = tuple(None if v is None else (v.shape, v.element_size()) for v in values)
        present = [i for i, v in enumerate(values) if v is not None]
        nbytes = lambda o: sum(local_nbytes(o.results[i], node, i, self._mesh) for i in present)
        return self._of((id(options), looks), options, nbytes)

    def read(self, node: fx.Node, options: Sequence[NodeLayouts]) -> np.ndarray:
        operand = tensor_operands(node)[0]
        value, (producer, index) = node_value(operand), result_index(operand)
        nbytes = lambda o: local_nbytes(o.operands[0], producer, index, self._mesh)
        return self._of((id(options), "read", value.shape, value.element_size()), options, nbytes)

    def _of(
        self, key: Hashable, options: Sequence[NodeLayouts], nbytes: Callable[[NodeLayouts], int]
    ) -> np.ndarray:
        """The ids in keys stay those of `options`, which outlive this object."""
        if key not in self._known:
            totals = [nbytes(option) if option.results else 0 for option in options]
            self._known[key] = np.array(totals, dtype=np.int64)
        return self._known[key]
