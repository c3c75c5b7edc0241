"""The strategies of offered states that have the layouts of a known plan."""

from __future__ import annotations

from passes.ir.joint import result_index, tensor_operands
from passes.ir.op_traits import is_either
from passes.layout.assignment import Assignment, NodeLayouts
from passes.search.search_space import SearchSpace
from passes.states.offers import Offers


def known_layouts(offers: Offers, space: SearchSpace, known: Assignment) -> list[set[int]]:
    """Per search node the positions of the strategies with the layouts of `known`, in every state; all, if there are
    none. A copy has those of what it is of."""
    nodes = {node.name: node for node in offers.joint.graph.nodes}

    def allowed(name: str, strategy: NodeLayouts) -> bool:
        node = nodes.get(name)
        if node is not None and is_either(node):
            producer, result = result_index(tensor_operands(node)[0])
            held = known.get(producer.name)
            return held is not None and strategy.results[0] == held.results[result]
        held = known.get(offers.copies.get(name, name))
        return held is not None and same_layouts(strategy, held)

    found: list[set[int]] = []
    for name, strategies in zip(space.names, space.strategies, strict=True):
        present = [i for i, strategy in enumerate(strategies) if strategy.results]
        kept = {i for i in present if allowed(name, strategies[i])} or set(present)
        found.append(kept | (set(range(len(strategies))) - set(present)))
    return found


def same_layouts(one: NodeLayouts, other: NodeLayouts) -> bool:
    """Whether two strategies have the same layouts, whatever is stored for them."""
    return (one.operands, one.results, one.splits) == (other.operands, other.results, other.splits)
