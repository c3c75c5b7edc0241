"""What ops have for themselves while they run, in a search within a memory limit.

A node is resident as long as its result is. What an op has for itself is there for its own step only, so it is a search
node beside the op: one strategy per number of bytes, and the op's strategies go with those of their bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import fx

from passes.ir.joint import JointGraph, node_value, node_values, tensor_operands
from passes.ir.op_schema import op_signature
from passes.layout.assignment import NodeLayouts
from passes.layout.layout import Layout
from passes.predict.workspaces import Workspaces, workspaces_on
from passes.search.search_space import Edge, SearchSpace
from passes.strategies.prices import Prices

_NOTHING = NodeLayouts((), ())


def with_workspaces(space: SearchSpace, joint: JointGraph, prices: Prices) -> SearchSpace:
    """`space` of `joint` with a node beside each op that needs bytes besides its operands and results."""
    workspaces = workspaces_on(prices.mesh.device_type, prices.traffic)
    place = {name: i for i, name in enumerate(space.names)}
    known: dict[Hashable, _Rows] = {}
    beside: list[tuple[int, int, _Rows]] = []
    for step, node in enumerate(joint.graph.nodes):
        if node.op != "call_function" or node.name not in place or not workspaces.of_op(node):
            continue
        op = place[node.name]
        key = id(space.strategies[op]), op_signature(node)
        if key not in known:
            known[key] = _Rows.of(_nbytes(node, space.strategies[op], workspaces, prices))
        if known[key].usage.any():
            beside.append((op, step, known[key]))
    return _extended(space, beside) if beside else space


@dataclass(frozen=True)
class _Rows:
    """usage: each number of bytes once; matrix: 0 where a strategy of the op has it, inf elsewhere. Ops that are alike
    share them."""

    usage: np.ndarray
    matrix: np.ndarray
    strategies: tuple[NodeLayouts, ...]

    @staticmethod
    def of(nbytes: np.ndarray) -> _Rows:
        usage = np.unique(nbytes)
        matrix = np.where(nbytes[:, None] == usage[None, :], 0.0, np.inf)
        return _Rows(usage, matrix, (_NOTHING,) * len(usage))


def _nbytes(
    node: fx.Node, strategies: Sequence[NodeLayouts], workspaces: Workspaces, prices: Prices
) -> np.ndarray:
    """int64[strategies]: on the rank with the largest shards; 0 where it does not run."""
    operands, made = tensor_operands(node), node_values(node)[0] is not None

    def of_strategy(strategy: NodeLayouts) -> int:
        if not strategy.results:
            return 0
        held = dict(zip(operands, strategy.operands, strict=True))
        if made:
            held[node] = strategy.results[0]
        local = {one: _local(one, layout, prices) for one, layout in held.items()}
        return workspaces.of_op(node, local.__getitem__)

    return np.array([of_strategy(strategy) for strategy in strategies], dtype=np.int64)


def _local(node: fx.Node, layout: Layout, prices: Prices) -> torch.Tensor:
    value = node_value(node)
    return torch.empty(layout.max_local_shape(value.shape, prices.mesh), dtype=value.dtype, device="meta")


def _extended(space: SearchSpace, beside: Sequence[tuple[int, int, _Rows]]) -> SearchSpace:
    """beside: of each new node the op that it is beside, that op's step, and its rows."""
    ops, steps, rows = zip(*beside, strict=True)
    problem, first = space.problem, len(space.names)
    places = range(first, first + len(ops))
    names = tuple(f"beside {space.names[op]}" for op in ops)
    problem = replace(
        problem,
        node_costs=(*problem.node_costs, *(np.zeros(len(one.usage)) for one in rows)),
        edges=(*problem.edges, *zip(ops, places, strict=True)),
        edge_costs=(*problem.edge_costs, *(one.matrix for one in rows)),
        intervals=(*problem.intervals, *((step, step + 1) for step in steps)),
        usages=(*problem.usages, *(one.usage for one in rows)),
    )
    return replace(
        space,
        problem=problem,
        names=(*space.names, *names),
        strategies=(*space.strategies, *(one.strategies for one in rows)),
        edges=(*space.edges, *(Edge(op, 0, place, None) for op, place in zip(ops, places, strict=True))),
        reads=(*space.reads, *((name, 0) for name in names)),
    )
