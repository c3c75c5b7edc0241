"""Along which dims the search offers to split ops that move data (slice, cat, pad, flip, roll).

They can be split along any dim. It is offered only along one that can be split together with a window (convolution,
pooling, resizing, neighbourhood attention): space. Elsewhere it would cost the search time and has no use: the halves
of rotary embeddings would offer the channels of a head, at 3 % more strategies of a Llama layer on three axes and
half as long again to price its edges, for the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from networkx.utils import UnionFind
from torch import fx

from passes.ir.joint import result_index, tensor_operands
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
