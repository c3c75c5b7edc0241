"""Merge the collectives of one turn into one, over one buffer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from passes.ir.graph_pass import RankPass, ints_at
from passes.ir.graph_properties import COMPUTING, FUNCTIONAL, HasGraph, Property, described
from passes.ir.joint import FakeCalls, on_demand
from passes.redistribution.emit_steps import Emitter, value
from passes.redistribution.lower_redistribute import collective_nodes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def _unmerged(graph: HasGraph) -> str | None:
    for first, second, *_ in _buckets(graph.graph):
        return f"{described(second)}: could go with %{first.name}"
    return None


MERGED = Property("alike collectives of one turn and step are one", _unmerged)


@dataclass(frozen=True)
class Bucket(RankPass):
    """Replace the collectives of a bucket by one.

    A *bucket* is the transfers to which `passes.schedule.bucket_plan` gave one turn; of their collectives, those
    of the same step are merged:

        %r: f32[8, 16] = all_reduce(%g)              %b: f32[192] = cat(view(%g), view(%h))
        %s: f32[64]    = all_reduce(%h)        ->    %t: f32[192] = all_reduce(%b)
                                                     %r: f32[8, 16] = view(slice(%t, 0, 128))
                                                     %s: f32[64]    = slice(%t, 128, 192)

    In place. A gather's buffer is one row a rank, of all its shards; what is gathered is copied out of it.
    A reduce-scatter's is one row a rank too, of the parts that it will hold; what is reduced, as with
    all-reduce, stays where it is: results share the buffer's storage, and a further step of the bucket sends it
    from there. An all-to-all's (of halos) is one message a rank, in which the members' messages to it follow each
    other.

    Ranks of a group merge alike: a turn and the order of its transfers are the same on all ranks, whether
    a group exchanges anything for a transfer is known to all of it, and its ranks' padded operands have the
    same size.

    Requires besides: operands of collectives are contiguous; none of a bucket depends on another step of it but for
    its own. Results are the same bit by bit, each where the dependencies allow.
    """

    requires = (FUNCTIONAL,)
    ensures = (MERGED,)
    keeps = (COMPUTING,)

    calls: FakeCalls | None = field(default=None, repr=False, compare=False)
    """Of the values of the graph, where there are more such graphs."""

    def rewrite(self, graph: fx.Graph) -> None:
        place = {node: i for i, node in enumerate(graph.nodes)}
        calls = self.calls or FakeCalls()
        merged = [
            _merge(graph, sorted(nodes, key=_transfer), max(nodes, key=place.__getitem__), calls)
            for nodes in _buckets(graph)
        ]
        if merged:
            _sort(graph, {node: _ready(node, place) for node in merged})


def _buckets(graph: fx.Graph) -> list[list[fx.Node]]:
    """The collectives to merge."""
    found: dict[Any, list[fx.Node]] = {}
    for node in collective_nodes(graph):
        if node.target in _MERGES and "turn" in node.meta:
            alike = node.args[-1:] if node.target is _ALL_TO_ALL else node.args[1:]
            key = (node.meta["turn"], node.meta.get("step"), node.target, alike, value(node).dtype)
            found.setdefault(key, []).append(node)
    return [nodes for nodes in found.values() if len(nodes) > 1 and all(_is_flat(node) for node in nodes)]


def _is_flat(collective: fx.Node) -> bool:
    """An all-to-all counts rows of its operand: only of flat ones may they be mixed."""
    return collective.target is not _ALL_TO_ALL or value(_operand(collective)).ndim == 1


def _transfer(collective: fx.Node) -> int:
    """The order of a bucket's members: that of the global graph, on all ranks alike, where a rank with nothing to
    compute may have them in any."""
    return collective.meta.get("transfer", 0)


def _merge(graph: fx.Graph, nodes: Sequence[fx.Node], before: fx.Node, calls: FakeCalls) -> fx.Node:
    """Returns the one collective."""
    meta = {k: v for k, v in nodes[0].meta.items() if k != "val"}
    others = len({n.meta.get("serves") for n in nodes}) - 1
    meta["serves"] = f"{meta.get('serves', '')} + {others}" if others else meta.get("serves")
    with graph.inserting_before(before):
        merged, results = _MERGES[nodes[0].target](Emitter(graph, meta, calls), nodes)
    for node, result in zip(nodes, results, strict=True):
        (wait,) = node.users
        result.meta["serves"] = node.meta.get("serves")
        wait.replace_all_uses_with(result)
        graph.erase_node(wait)
        operand = _operand(node)
        graph.erase_node(node)
        _erase_unread(operand)
    return merged.all_input_nodes[0]


_Merged = tuple[fx.Node, list[fx.Node]]
"""(the wait for the one collective, its pieces)."""


def _all_reduce(emit: Emitter, nodes: Sequence[fx.Node]) -> _Merged:
    flat = _joined(emit, nodes)
    reduced = _collective(emit, nodes[0], flat, value(flat).numel())
    return reduced, _cut(emit, reduced, nodes)


def _reduce_scatter(emit: Emitter, nodes: Sequence[fx.Node]) -> _Merged:
    ranks = int(nodes[0].args[2])  # type: ignore[arg-type]
    rows = [emit.view(_operand(n), [ranks, value(n).numel()]) for n in nodes]
    stacked = emit.cat(rows, 1)
    reduced = _collective(emit, nodes[0], _flat(emit, stacked), value(stacked).shape[1])
    return reduced, _cut(emit, reduced, nodes)


def _all_gather(emit: Emitter, nodes: Sequence[fx.Node]) -> _Merged:
    ranks = int(nodes[0].args[1])  # type: ignore[arg-type]
    row = _joined(emit, nodes)
    length = value(row).numel()
    gathered = _collective(emit, nodes[0], row, ranks * length)
    rows = emit.view(gathered, [ranks, length])
    results: list[fx.Node] = []
    start = 0
    for node in nodes:
        size = value(_operand(node)).numel()
        part = emit.contiguous(emit.slice(rows, 1, start, start + size))
        results.append(emit.view(part, value(node).shape))
        start += size
    return gathered, results


def _all_to_all(emit: Emitter, nodes: Sequence[fx.Node]) -> _Merged:
    into, out = ([ints_at(node, i) for node in nodes] for i in (1, 2))
    operands = [_operand(node) for node in nodes]
    sent = emit.cat(_in_turn(emit, operands, out), 0)
    target, group = nodes[0].target, nodes[0].args[3]
    sizes = [[sum(column) for column in zip(*rows, strict=True)] for rows in (into, out)]
    arrived = emit.collective(target, sent, [sum(sizes[0])], *sizes, group)
    pieces: list[list[fx.Node]] = [[] for _ in nodes]
    start = 0
    for column in zip(*into, strict=True):
        for mine, size in zip(pieces, column, strict=True):
            if size:
                mine.append(emit.slice(arrived, 0, start, start + size))
            start += size
    return arrived, [emit.cat(mine, 0) if mine else emit.empty(arrived, [0]) for mine in pieces]


def _in_turn(emit: Emitter, tensors: Sequence[fx.Node], sizes: Sequence[Sequence[int]]) -> list[fx.Node]:
    """The first piece of each tensor, then the second of each, and so on."""
    starts = [list(itertools.accumulate(row, initial=0)) for row in sizes]
    pieces = [
        emit.slice(tensor, 0, starts[t][i], starts[t][i + 1])
        for i in range(len(sizes[0]))
        for t, tensor in enumerate(tensors)
        if sizes[t][i]
    ]
    return pieces or [emit.empty(tensors[0], [0])]


_ALL_TO_ALL = c10d.all_to_all_single.default
_MERGES: Mapping[Any, Callable[[Emitter, Sequence[fx.Node]], _Merged]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_gather_into_tensor.default: _all_gather,
    _ALL_TO_ALL: _all_to_all,
}


def _operand(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _flat(emit: Emitter, x: fx.Node) -> fx.Node:
    return emit.view(x, [value(x).numel()])


def _joined(emit: Emitter, nodes: Sequence[fx.Node]) -> fx.Node:
    """What the collectives move, flat, one after the other: a copy, or what it was cut from in an earlier step."""
    operands = [_operand(node) for node in nodes]
    return _uncut(operands) or emit.cat([_flat(emit, operand) for operand in operands], 0)


def _uncut(parts: Sequence[fx.Node]) -> fx.Node | None:
    """The flat value whose pieces, all of them and in their order, `parts` are."""
    cuts = [cut for part in parts if (cut := _cut_of(part)) is not None]
    if len(cuts) < len(parts) or len({whole for whole, _, _ in cuts}) != 1:
        return None
    wholes, begins, ends = zip(*cuts, strict=True)
    whole: fx.Node = wholes[0]
    return whole if [*begins, value(whole).numel()] == [0, *ends] else None


def _cut_of(part: fx.Node) -> tuple[fx.Node, int, int] | None:
    """(flat value, begin, end) of what a collective of this step has and `_cut` made."""
    node = part
    while node.target is aten.view.default:
        node = _operand(node)
    if node.target is not aten.slice.Tensor or value(_operand(node)).ndim != 1:
        return None
    flat, _, begin, end = node.args
    return cast(tuple[fx.Node, int, int], (flat, begin, end))


def _erase_unread(node: fx.Node) -> None:
    """A piece, looked at through views, that nothing reads any more."""
    while not node.users and node.target in (aten.view.default, aten.slice.Tensor):
        (viewed,) = node.all_input_nodes
        node.graph.erase_node(node)
        node = viewed


def _collective(emit: Emitter, like: fx.Node, x: fx.Node, length: int) -> fx.Node:
    """The collective `like`, of `x`, and the wait for it."""
    return emit.collective(like.target, x, [length], *like.args[1:])


def _cut(emit: Emitter, flat: fx.Node, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """`flat` in pieces of the nodes' shapes."""
    results: list[fx.Node] = []
    start = 0
    for node in nodes:
        size = math.prod(value(node).shape)
        results.append(emit.view(emit.slice(flat, 0, start, start + size), value(node).shape))
        start += size
    return results


def _ready(collective: fx.Node, place: Mapping[fx.Node, int]) -> fx.Node | None:
    """The last op that computes what is moved; None if graph inputs are."""
    found: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack = [collective]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.meta.get("turn") == collective.meta["turn"]:  # of the transfers themselves
            stack.extend(node.all_input_nodes)
        elif node.op != "placeholder":
            found.append(node)
    return max(found, key=place.__getitem__, default=None)


def _sort(graph: fx.Graph, ready: Mapping[fx.Node, fx.Node | None]) -> None:
    """Every node after its operands; otherwise in the order it had, but those of `ready` right after what
    they wait for: a transfer that only the end reads was emitted at the end."""
    *nodes, output = graph.nodes
    after: dict[fx.Node | None, list[fx.Node]] = {}
    for collective, last in ready.items():
        after.setdefault(last, []).append(collective)
    for node in on_demand(itertools.chain.from_iterable((node, *after.get(node, ())) for node in nodes)):
        output.prepend(node)
