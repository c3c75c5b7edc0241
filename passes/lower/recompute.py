"""Which values the forward saves for the backward: an exact minimum cut over bytes."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import lru_cache

import networkx as nx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx

from passes.ir.op_traits import fuses, is_cheap, is_collective, is_reduction, is_whole_view, numel, op_name
from passes.strategies.traffic import STORED_ALONE, reads_little


def choose_saved(
    candidates: Sequence[fx.Node],
    forward: Set[fx.Node],
    backward: Set[fx.Node],
    pinned: Set[fx.Node],
    returned: Set[fx.Node],
    *,
    fused: bool,
) -> list[fx.Node]:
    """The nodes among `candidates` (in graph order) to save, at the least total bytes, or few more that are stored
    in any case.

    candidates: every op that may run in the forward: those it needs, and cheap ones that only the
                backward reads but that depend on no tangent (a boolean mask may be smaller than
                what it is computed from).
    forward:    the candidates that the forward runs in any case.
    backward:   the ops that run in the backward only.
    pinned:     candidates that must not be run again.
    returned:   candidates that are outputs of the forward: in memory anyway, so free to save.
    fused:      whether a compiler runs cheap ops in their readers' loops, and stores none that only those read.

    A candidate is either available in the backward (it descends only from graph inputs and saved
    values, through cheap ops) or in the cut. Of cuts that weigh the same the one nearest the backward wins: fewest ops
    run again, the same on every run.
    """
    place = {node: i for i, node in enumerate(candidates)}
    kept = [
        node in forward and (node in pinned or not _is_free_to_repeat(node, backward)) for node in candidates
    ]
    # What a kept value is computed from is there in the forward, whichever way the cut goes.
    readers = [
        [place[user] for user in node.users if user in place and not kept[place[user]]] for node in candidates
    ]
    saved: list[int] = []
    for group in _connected(readers):
        local = {i: number for number, i in enumerate(group)}
        ops = tuple(
            (
                1 if candidates[i] in returned else _bytes_saved(candidates[i], forward, fused),
                kept[i],
                any(user in backward for user in candidates[i].users),
                tuple(local[reader] for reader in readers[i]),
            )
            for i in group
        )
        saved += [group[number] for number in _cut(ops)]
    return [candidates[i] for i in sorted(saved)]


def _connected(readers: Sequence[Sequence[int]]) -> list[list[int]]:
    """The parts of a network that no edge connects, each in order."""
    beside: list[list[int]] = [list(each) for each in readers]
    for i, each in enumerate(readers):
        for reader in each:
            beside[reader].append(i)
    found: list[list[int]] = []
    seen: set[int] = set()
    for first in range(len(beside)):
        if first not in seen:
            seen.add(first)
            group = [first]
            for i in group:  # which grows meanwhile
                new = [other for other in beside[i] if other not in seen]
                seen.update(new)
                group += dict.fromkeys(new)
            found.append(sorted(group))
    return found


_Op = tuple[int | None, bool, bool, tuple[int, ...]]
"""What saving it costs, if it can be; whether the forward computes it for good; whether an op of the backward reads it;
and which others of its network do."""


@lru_cache(maxsize=1024)
def _cut(ops: tuple[_Op, ...]) -> tuple[int, ...]:
    """Which ops to save; found once for equal layers."""
    if not any(kept for _, kept, _, _ in ops) or not any(read for _, _, read, _ in ops):
        return ()
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    for i, (capacity, kept, read, readers) in enumerate(ops):
        limits = {} if capacity is None else {"capacity": capacity}
        network.add_edge((i, "in"), (i, "out"), **limits)
        if kept:
            network.add_edge("source", (i, "in"))
        if read:
            network.add_edge((i, "out"), "sink")
        for reader in readers:
            network.add_edge((i, "out"), (reader, "in"))
    # Of shallow networks with many ends this algorithm is the fastest; the cut nearest the sink is one, whichever runs.
    _, (near_source, _) = nx.minimum_cut(network, "source", "sink", flow_func=boykov_kolmogorov)
    return tuple(i for i in range(len(ops)) if (i, "in") in near_source and (i, "out") not in near_source)


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


def _bytes_saved(node: fx.Node, forward: Set[fx.Node], fused: bool) -> int | None:
    """What saving `node` costs; None where it cannot be saved (or its base is the one to save).

    Bytes weigh first, then the number of tensors. One that is stored for this alone, though its loop reads little,
    weighs `STORED_ALONE` of its bytes.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or is_whole_view(node):
        return None
    if is_collective(node) and "wait_tensor" not in op_name(node):
        return None
    nbytes = numel(node) * value.element_size()
    alone = fused and reads_little(node) and not _is_stored(node, forward)
    return (int(STORED_ALONE * nbytes if alone else nbytes) << 16) + 2 + alone


def _is_stored(node: fx.Node, forward: Set[fx.Node]) -> bool:
    """Whether the forward stores it in any case."""
    return any(
        _is_stored(user, forward) if is_whole_view(user) else not (fuses(user) or is_reduction(user))
        for user in node.users
        if user in forward
    )
