"""What ops have for themselves while they run, in a search within a memory limit.

A node is resident as long as its result is. What an op has for itself is there for its own step only, so it is a search
node beside the op: one strategy per number of bytes, and the op's strategies go with those of their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from passes.ir.joint import JointGraph, node_value, node_values, tensor_operands
from passes.layout.assignment import NodeLayouts
from passes.layout.layout import Layout
from passes.predict.workspaces import Workspaces, workspaces_on
from passes.search.search_space import Edge, SearchSpace
from passes.strategies.prices import Prices

__all__ = ["with_workspaces"]

_NOTHING = NodeLayouts((), ())


def with_workspaces(space: SearchSpace, joint: JointGraph, prices: Prices) -> SearchSpace:
    """`space` of `joint` with a node beside each op that needs bytes besides its operands and results."""
    workspaces = workspaces_on(prices.mesh.device_type, prices.traffic)
    place = {name: i for i, name in enumerate(space.names)}
    beside = [
        (place[node.name], step, nbytes)
        for step, node in enumerate(joint.graph.nodes)
        if node.op == "call_function" and node.name in place and workspaces.of_op(node)
        for nbytes in [_nbytes(node, space.strategies[place[node.name]], workspaces, prices)]
        if nbytes.any()
    ]
    for op, step, nbytes in beside:
        space = _added(space, op, step, nbytes)
    return space


def _nbytes(
    node: fx.Node, strategies: Sequence[NodeLayouts], workspaces: Workspaces, prices: Prices
) -> np.ndarray:
    """int64[strategies]: on the rank with the largest shards; 0 where it does not run."""
    operands, found = tensor_operands(node), []
    for strategy in strategies:
        held = dict(zip(operands, strategy.operands, strict=False))
        if strategy.results and node_values(node)[0] is not None:
            held[node] = strategy.results[0]
        local = {one: _local(one, layout, prices) for one, layout in held.items()}
        found.append(workspaces.of_op(node, local.__getitem__) if strategy.results else 0)
    return np.array(found, dtype=np.int64)


def _local(node: fx.Node, layout: Layout, prices: Prices) -> torch.Tensor:
    value = node_value(node)
    return torch.empty(layout.max_local_shape(value.shape, prices.mesh), dtype=value.dtype, device="meta")


def _added(space: SearchSpace, op: int, step: int, nbytes: np.ndarray) -> SearchSpace:
    problem, beside = space.problem, len(space.names)
    distinct = np.unique(nbytes)
    matrix = np.where(nbytes[:, None] == distinct[None, :], 0.0, np.inf)
    name = f"beside {space.names[op]}"
    problem = replace(
        problem,
        node_costs=(*problem.node_costs, np.zeros(len(distinct))),
        edges=(*problem.edges, (op, beside)),
        edge_costs=(*problem.edge_costs, matrix),
        intervals=(*problem.intervals, (step, step + 1)),
        usages=(*problem.usages, distinct),
    )
    return replace(
        space,
        problem=problem,
        names=(*space.names, name),
        strategies=(*space.strategies, (_NOTHING,) * len(distinct)),
        edges=(*space.edges, Edge(op, 0, beside, None)),
        reads=(*space.reads, (name, 0)),
    )
