"""A backward that adds what it makes to what earlier pieces left, each value as soon as it is there."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

ADD = torch.ops.aten.add_.Tensor


def add_early(module: fx.GraphModule, places: Collection[int]) -> fx.GraphModule:
    """`module` with an input more, at the end, for each of the results at `places`, in their order: what is there so
    far, to which the result is added in place and which is returned in its stead.

    Added up by the caller, all results of a piece would live at once: as many bytes as all gradients have, which the
    allocator takes from the system and gives back for every piece.
    """
    nodes = list(module.graph.nodes)
    results = list(nodes[-1].args[0])  # type: ignore[arg-type]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    so_far: dict[int, fx.Node] = {}
    for place in sorted(places):
        so_far[place] = graph.placeholder(f"so_far_{place}")
        so_far[place].meta["val"] = results[place].meta["val"]
    sums: dict[int, fx.Node] = {}

    def add(node: fx.Node) -> None:
        for place, earlier in so_far.items():
            if results[place] is node:
                sums[place] = graph.call_function(ADD, (earlier, copies[node]))
                sums[place].meta = dict(node.meta)

    for node in nodes[:-1]:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
        add(node)
    graph.output(
        tuple(
            sums.get(place, None if result is None else copies[result])
            for place, result in enumerate(results)
        )
    )
    graph.lint()
    return fx.GraphModule(module, graph)
