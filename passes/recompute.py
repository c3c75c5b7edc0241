"""Which values the forward saves for the backward: an exact minimum cut over bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence, Set

import networkx as nx
import torch
from torch import fx

__all__ = ["choose_saved", "is_cheap", "is_collective", "is_reshape"]


def _overloads(namespace: str, names: str) -> frozenset[str]:
    return frozenset(f"{namespace}.{name}" for name in names.split())


# Results that alias their operand and have at least as many elements: never worth saving themselves.
_RESHAPES = _overloads(
    "aten",
    """view.default reshape.default permute.default transpose.int t.default expand.default alias.default
    unsqueeze.default squeeze.default squeeze.dim squeeze.dims detach.default""",
)
# Ops without the pointwise tag that a compiler computes inside their readers' loops all the same.
_CHEAP = (
    _overloads(
        "aten",
        """slice.Tensor select.int split_with_sizes.default split.Tensor _unsafe_view.default clone.default
        _to_copy.default full.default full_like.default zeros.default zeros_like.default ones.default
        ones_like.default empty.memory_format arange.default arange.start arange.start_step
        scalar_tensor.default constant_pad_nd.default cat.default flip.default roll.default tril.default
        triu.default index.Tensor gather.default as_strided.default repeat.default lift_fresh_copy.default
        new_zeros.default new_ones.default new_full.default""",
    )
    | _overloads("prims", "convert_element_type.default iota.default")
    | _overloads("autoshard", "uniform.default use.default circular_pad.default")
)
_REDUCTIONS = _overloads(
    "aten",
    """sum.dim_IntList sum.default amax.default amin.default any.default any.dim any.dims all.default
    all.dim argmax.default mean.dim mean.default var.correction""",
)
_COLLECTIVE_NAMESPACES = ("_c10d_functional.", "autoshard_c10d_functional.")
# A reduction is recomputed only if it reads at most this many times what it writes, as torch.compile's
# partitioner has it: beyond that, saving the small result beats reading the large operand again.
_REDUCTION_RATIO = 4


def is_collective(node: fx.Node) -> bool:
    """Functional collectives and their waits."""
    return str(node.target).startswith(_COLLECTIVE_NAMESPACES)


def is_reshape(node: fx.Node) -> bool:
    """The result aliases the operand and holds all of its elements."""
    return str(node.target) in _RESHAPES


def is_cheap(node: fx.Node) -> bool:
    """Whether the backward may run `node` again: local, and fused into its readers by a compiler.

    Pointwise, view, cast, creation and indexing ops, counter-based random numbers, and reductions of
    little input. Never collectives, products, attention, convolutions, sorts, scans or anything unknown.
    """
    name = str(node.target)
    if name in _RESHAPES or name in _CHEAP or node.target is operator.getitem:
        return True
    if name in _REDUCTIONS:
        read = max((_numel(n) for n in node.all_input_nodes), default=0)
        return read <= _REDUCTION_RATIO * _numel(node)
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


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
    values, through cheap ops) or in the cut. Of equal cuts the one nearest the backward is taken:
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
    _, (near_source, _) = nx.minimum_cut(network, "source", "sink")
    return [n for n in candidates if (n.name, "in") in near_source and (n.name, "out") not in near_source]


def _is_free_to_repeat(node: fx.Node, backward: Set[fx.Node]) -> bool:
    if node.meta.get("halo"):
        # A rank's part with its halo around it: a copy of the part, which is often saved anyway. Saving both would
        # hold every activation twice, where splitting space is for want of memory.
        return True
    return is_cheap(node) and (is_reshape(node) or not _read_whole(node, backward))


def _read_whole(node: fx.Node, backward: Set[fx.Node]) -> bool:
    """Whether an op of the backward needs the value in memory: computing it again is then not free."""
    return any(
        (user in backward and not is_cheap(user)) or (is_reshape(user) and _read_whole(user, backward))
        for user in node.users
    )


def _bytes_saved(node: fx.Node) -> int | None:
    """What saving `node` costs; None where it cannot be saved (or its base is the one to save).

    Bytes weigh first, then the number of tensors.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or is_reshape(node):
        return None
    if is_collective(node) and "wait_tensor" not in str(node.target):
        return None
    return (_numel(node) * value.element_size() << 16) + 1


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    values: Sequence[object] = value if isinstance(value, (tuple, list)) else (value,)
    return sum(math.prod(v.shape) for v in values if isinstance(v, torch.Tensor))
