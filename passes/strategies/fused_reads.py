"""Until when ops read their operands where compilers fuse: an op that is not stored runs with each of its readers.

%a = exp(%x)            // fused into %b and %c: %x is read again for each, and is there until %c has run
%b = sum(%a)
...
%c = contract(%a, %w)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from passes.ir.op_traits import is_collective, is_either, is_use
from passes.strategies.pricing import TrafficModel

__all__ = ["last_runs"]


def last_runs(order: Mapping[fx.Node, int], traffic: TrafficModel) -> dict[fx.Node, int]:
    """Node -> the last step at which it runs: its own, or its readers' if nothing of it is stored. order: step by node,
    in order. Views and `use` run with their readers; what an `either` reads is alive through it."""
    found: dict[fx.Node, int] = {}
    for node, step in list(order.items())[::-1]:
        found[node] = step
        if node.op == "call_function" and not _is_there(node, traffic):
            readers = [found[user] for user in node.users if user in found and not is_either(user)]
            found[node] = max([step, *readers])
    return found


def _is_there(node: fx.Node, traffic: TrafficModel) -> bool:
    return is_either(node) or is_collective(node) or (not is_use(node) and traffic(node).writes)
