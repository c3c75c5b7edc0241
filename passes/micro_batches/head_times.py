"""Which ops of a model's head and loss run in pieces over tokens: the fewest with which no large value is whole.

The search is that of a batch in pieces (`passes.micro_batches.run_times`) under other weights: a large value weighs
what it stores where it is whole, any other what it stores where it is in pieces. So the pieces begin at what is
small before the head, and end at what is small after the loss and at the head's gradients.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.ir.joint import JointGraph, dependents, node_values, result_index, results_nbytes
from passes.ir.op_traits import is_product, is_view
from passes.micro_batches.run_times import RunTimes, Weights, find_run_times

_LARGE = 0.5
"""Share of the largest value's elements above which a value is large."""
_SMALL = 1 / 32
"""Share of the largest value's elements up to which the forward may put values together: losses of tokens, not what the
next layer reads."""
_TOGETHER = 1e-3
"""Weight of a byte of a small value that is put together."""
_READ_PART = 1e-3
"""Bytes that reading a part of the last dim costs: of two dims that can be cut the later is, as the first is that of
samples, which ranks share."""


def may_have_head(joint: JointGraph) -> bool:
    """Whether what is large is made by few of the forward's products, which is known without a search."""
    large = _large(joint)
    products = [n.name for n in joint.graph.nodes if is_product(n) and n.meta["phase"] == "forward"]
    return bool(large) and 2 * len(large.intersection(products)) <= len(products)


def head_times(joint: JointGraph, count: int) -> RunTimes | None:
    """When every op runs where all that is large does so in `count` pieces; None if that cannot be: if it is in the
    midst of the model, or returned. `joint` has no `use`."""
    large = _large(joint)
    stored = lambda node: 0.0 if is_view(node) else float(results_nbytes(node))
    weights = Weights(
        lambda node: stored(node) if node.name in large else 0.0,
        lambda node: 0.0 if node.name in large else stored(node),
        lambda dim, ndim: (ndim - dim) * _READ_PART,
        lambda value: results_nbytes(value) * (1.0 if result_index(value)[0].name in large else _TOGETHER),
    )
    times = find_run_times(joint, count, weights)
    return times if large and _is_head(joint, large, times) else None


def _large(joint: JointGraph) -> set[str]:
    """Ops with a result that is more than half as large as the largest of the forward, both made of the call's tensors.
    What is like a parameter, as its gradient is, does not count."""
    given = [n for n, spec in zip(joint.placeholders, joint.inputs, strict=True) if spec.kind == "input"]
    shapes = {tuple(node.meta["val"].shape) for node in joint.trained}
    of_call = dependents(joint.graph.nodes, given)
    elements = {
        node: max((value.numel() for value in _values(node) if tuple(value.shape) not in shapes), default=0)
        for node in joint.graph.nodes
        if node in of_call and node.op == "call_function" and result_index(node)[0] is node
    }
    limit = _LARGE * max((n for node, n in elements.items() if node.meta["phase"] == "forward"), default=0)
    return {node.name for node, n in elements.items() if n > limit}


def _values(node: fx.Node) -> list[torch.Tensor]:
    return [value for value in node_values(node) if value is not None]


def _is_head(joint: JointGraph, large: set[str], times: RunTimes) -> bool:
    """Whether all of `large` is in pieces, most products are not, and little is put together of the pieces."""
    nodes = [n for n in joint.graph.nodes if n.op == "call_function"]
    if any(times.of[name] != "piece" for name in large):
        return False
    products = [n.name for n in nodes if is_product(n)]
    if 2 * sum(times.of[name] == "piece" for name in products) > len(products):
        return False
    largest = max(
        n.meta["val"].numel() for n in nodes if n.name in large and isinstance(n.meta["val"], torch.Tensor)
    )
    limit = {"forward": _SMALL * largest, "backward": _LARGE * largest}
    together = [n for n in nodes if _is_put_together(n, times)]
    return all(n.meta["val"].numel() <= limit[n.meta["phase"]] for n in together)


def _is_put_together(node: fx.Node, times: RunTimes) -> bool:
    """Whether its parts are read side by side by what is not in pieces."""
    producer, index = result_index(node)
    if times.of[producer.name] != "piece" or times.layouts[producer.name].results[index].partial:
        return False
    readers = (user for user in node.users if user.op == "output" or result_index(user)[0] is user)
    return any(user.op == "output" or times.of[user.name] != "piece" for user in readers)
