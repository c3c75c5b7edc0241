"""Which values the forward saves for the backward: an exact minimum cut over bytes."""

from __future__ import annotations

from collections.abc import Sequence, Set

import networkx as nx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx

from passes.ir.op_traits import is_cheap, is_collective, is_whole_view, numel, op_name


def choose_saved(
    candidates: Sequence[fx.Node],
    forward: Set[fx.Node],
    backward: Set[fx.Node],
    pinned: Set[fx.Node],
    returned: Set[fx.Node],
) -> list[fx.Node]:
    """The nodes among `candidates` (in graph order) to save, at the least total bytes.

    candidates: every op that may run in the forward: those it needs, and cheap ones that only the
                backward reads but that depend on no tangent (a boolean mask may be smaller than
                what it is computed from).
    forward:    the candidates that the forward runs in any case.
    backward:   the ops that run in the backward only.
    pinned:     candidates that must not be run again.
    returned:   candidates that are outputs of the forward: in memory anyway, so free to save.

    A candidate is either available in the backward (it descends only from graph inputs and saved
    values, through cheap ops) or in the cut. The cut nearest the backward wins a tie:
    fewest ops run again, and the same answer on every run.
    """
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    members = set(candidates)
    for node in candidates:
        capacity = 1 if node in returned else _bytes_saved(node)
        limits = {} if capacity is None else {"capacity": capacity}
        network.add_edge((node.name, "in"), (node.name, "out"), **limits)
        if node in forward and (node in pinned or not _is_free_to_repeat(node, backward)):
            network.add_edge("source", (node.name, "in"))
        for user in node.users:
            if user in members:
                network.add_edge((node.name, "out"), (user.name, "in"))
            elif user in backward:
                network.add_edge((node.name, "out"), "sink")
    # Of shallow networks with many ends this algorithm is the fastest; the cut nearest the sink is one, whichever runs.
    _, (near_source, _) = nx.minimum_cut(network, "source", "sink", flow_func=boykov_kolmogorov)
    return [n for n in candidates if (n.name, "in") in near_source and (n.name, "out") not in near_source]


def _is_free_to_repeat(node: fx.Node, backward: Set[fx.Node]) -> bool:
    if node.meta.get("halo"):
        # A rank's part with its halo around it: a copy of the part, which is often saved anyway. Saving both would
        # hold every activation twice, where splitting space is for want of memory.
        return True
    return is_cheap(node) and (is_whole_view(node) or not _read_whole(node, backward))


def _read_whole(node: fx.Node, backward: Set[fx.Node]) -> bool:
    """Whether an op of the backward needs the value in memory: computing it again is then not free."""
    return any(
        (user in backward and not is_cheap(user)) or (is_whole_view(user) and _read_whole(user, backward))
        for user in node.users
    )


def _bytes_saved(node: fx.Node) -> int | None:
    """What saving `node` costs; None where it cannot be saved (or its base is the one to save).

    Bytes weigh first, then the number of tensors.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or is_whole_view(node):
        return None
    if is_collective(node) and "wait_tensor" not in op_name(node):
        return None
    return (numel(node) * value.element_size() << 16) + 1
