"""What the search offers beside an op's own rule: along which dims ops that move data (slice, cat, pad, flip, roll) are
split, what a tensor that no op makes may look like, and where the order of its axes is free.

Ops that move data can be split along any dim. That is offered only along one that can be split together with a window
(convolution, pooling, resizing, neighbourhood attention): space. Elsewhere it would cost the search time and has no
use: the halves of rotary embeddings would offer the channels of a head, at 3 % more strategies of a Llama layer on
three axes and half as long again to price its edges, for the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from networkx.utils import UnionFind
from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, result_index, tensor_operands
from passes.ir.op_traits import is_cast, is_use
from passes.layout.layout import Layout
from passes.rules.core.rule import OpRule


def out_of_space(ops: Sequence[tuple[fx.Node, OpRule]]) -> Mapping[fx.Node, frozenset[str]]:
    """Node -> factors along which it moves data, and along which no window of the graph can be split with it.

    ops: with their rules (`ops_of`).
    """
    if not any(rule.moved for _, rule in ops):
        return {}
    together = UnionFind()  # of (node, factor) and (node, result, dim): what is split together
    for node, rule in ops:
        _connect(together, node, rule)
    space = {
        together[node, rule.operands_and_results[t][d][0]]
        for node, rule in ops
        for t, d in rule.windows
        if rule.operands_and_results[t][d][0] not in rule.moved
    }
    return {
        node: frozenset(f for f in rule.moved if together[node, f] not in space)
        for node, rule in ops
        if rule.moved
    }


def _connect(together: UnionFind, node: fx.Node, rule: OpRule) -> None:
    """Each factor that may be split, with the dims that it splits."""
    values = [result_index(operand) for operand in tensor_operands(node)]
    values += [(node, i) for i in range(len(rule.results))]
    for (producer, result), dims in zip(values, rule.operands_and_results, strict=True):
        for d, dim in enumerate(dims):
            if dim and dim[0] not in rule.whole:
                together.union((node, dim[0]), (producer, result, d))


def tensor_rule(shape: Sequence[int]) -> OpRule:
    """The rule of a tensor that simply is: every dim a factor of its own."""
    names = [f"d{i}" if length > 1 else "" for i, length in enumerate(shape)]
    dims = tuple((name,) if name else () for name in names)
    return OpRule((), (dims,), {n: length for n, length in zip(names, shape, strict=True) if n})


def is_storable(layout: Layout, shape: Sequence[int], mesh: MeshSpec) -> bool:
    """DTensor states an axis order other than the mesh's only where the split is even."""
    for length, axes in zip(shape, layout.dims, strict=True):
        in_order = sorted(axes, key=mesh.index) == list(axes)
        if not in_order and length % mesh.size(*axes):
            return False
    return True


def free_axis_order(joint: JointGraph) -> set[fx.Node]:
    """Nodes that only pass a parameter or a gradient along: there the order of axes matters."""
    found: set[fx.Node] = set()
    parameters = {
        node for node, spec in zip(joint.placeholders, joint.inputs, strict=True) if spec.kind == "param"
    }
    for node in joint.graph.nodes:
        passes_on = is_use(node) or is_cast(node)
        if passes_on and tensor_operands(node)[0] in parameters | found:
            found.add(node)
    for node in reversed(joint.graph.nodes):
        passes_on = is_use(node) or is_cast(node)
        if passes_on and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    return found
