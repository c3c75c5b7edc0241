"""Emit one rank's part of a redistribution: plain ATen ops and functional collectives.

    %b: f32[8, 64] = redistribute(%a)               // %a: f32[8, 64]+tp:sum
    ->
    %1: f32[8, 64] = _c10d_functional.all_reduce(%a, "sum", <group of tp>)
    %b: f32[8, 64] = _c10d_functional.wait_tensor(%1)

Shards of unequal sizes are padded to the longest of their group (all-gather, reduce-scatter) or sent
with split sizes (all-to-all). Everything follows from the layouts: nothing is agreed at run time.

Invariants
  - All ranks of a group emit the same collectives in the same order, with matching sizes.
  - A group that has no element to move emits no collective; all of its ranks know that.
  - A group's axes are always in mesh order: `groups` is asked for no other.
  - The result is contiguous, but for what is cut out of a halo: a view of hardly more. (A part of a whole tensor is
    copied, or whoever saves it would keep the whole.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import FakeCalls
from passes.ir.op_traits import is_collective
from passes.ir.routing import Choice
from passes.layout.layout import Layout, Span
from passes.ops.collective_ops import returned, sent
from passes.ops.halo_op import HaloSite, halo_exchange, halo_reduce, without
from passes.redistribution.emit_steps import (
    COLLECTIVES,
    Cuts,
    Emitter,
    flatten_pieces,
    pad_parts,
    stack_parts,
    trim_parts,
    unflatten_pieces,
    unstack_parts,
    value,
)
from passes.redistribution.steps import (
    STEPS,
    AllGather,
    AllToAll,
    ReduceScatter,
    ReturnRows,
    SendRows,
    Slice,
    Step,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def emit(
    graph: fx.Graph,
    node: fx.Node,
    steps: Sequence[Step],
    shape: Sequence[int],
    mesh: MeshSpec,
    rank: int,
    groups: Mapping[tuple[str, ...], str],
    meta: Mapping[str, Any],
    calls: FakeCalls | None = None,
) -> fx.Node:
    """Emit `steps`, a redistribution of `node`, at the graph's insertion point; returns the node of the result.

    node:   this rank's tensor in the first step's layout; node.meta["val"] is a fake tensor of the
            local shape. With no steps it is returned as it is.
    shape:  the global shape.
    groups: mesh axes, in mesh order -> name of this rank's process group over them.
    meta:   copied to every node emitted; "val" is set to a fake tensor of the node's local result, and
            "step" counts the collective steps, of which some may move nothing in this rank's group.
    calls:  computes those; one for a whole graph computes equal ones once.
    """
    emitter = Emitter(graph, meta, calls or FakeCalls())
    exchanges = 0
    for step in steps:
        if step.kind is not None:
            emitter = replace(emitter, meta={**meta, "step": exchanges})
            exchanges += 1
        site = HaloSite(emitter, step, tuple(shape), mesh, rank, groups)
        expected = step.before.local_shape(shape, mesh, rank)
        assert tuple(value(node).shape) == expected, f"{node}: {value(node).shape}, layout says {expected}"
        node = _EMIT[step.name](site, node)
    if not steps or (not exchanges and steps[0].before.has_halo):
        return node
    return emitter.contiguous(node)


def collective_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that start a collective, in order (not the waits)."""
    return [n for n in graph.nodes if is_collective(n) and n.target in COLLECTIVES]


def _slice(site: HaloSite, x: fx.Node) -> fx.Node:
    step: Slice = site.step
    pieces: list[fx.Node] = []
    end = 0
    for (first, last), (lo, hi) in site.overlaps(step.dim, site.rank, site.rank):
        if hi > end:  # a periodic halo may hold a position twice
            pieces.append(site.emit.slice(x, step.dim, first + max(0, end - lo), last))
            end = hi
    return site.emit.cat(pieces, step.dim) if pieces else site.emit.slice(x, step.dim, 0, 0)


def _to_partial(site: HaloSite, x: fx.Node) -> fx.Node:
    first = site.mesh.linear_index(site.rank, site.step.axes) == 0
    return x if first else site.emit.call(aten.zeros_like.default, x)


def _all_gather(site: HaloSite, x: fx.Node) -> fx.Node:
    step: AllGather = site.step
    if not math.prod(site.result_shape):
        return site.emit.empty(x, site.result_shape)
    runs = _cut_by(step.before, step.after)
    sizes = {dim: site.part_sizes(step.before, dim, run) for dim, run in runs.items()}
    for dim, parts in sizes.items():
        x = site.emit.pad(x, dim, max(parts))
    part, ranks = list(value(x).shape), len(site.ranks)
    target = c10d.all_gather_into_tensor.default
    gathered = site.emit.collective(target, x, [ranks * part[0], *part[1:]], ranks, site.group_name)
    whole = unstack_parts(site.emit, gathered, _cuts(site, runs), site.counts, part)
    for dim, parts in sizes.items():
        whole = trim_parts(site.emit, whole, dim, parts)
    return whole


def _cut_by(finer: Layout, coarser: Layout) -> dict[int, tuple[str, ...]]:
    """The dims that one layout splits further than the other, and the axes by which it does."""
    pairs = enumerate(zip(finer.dims, coarser.dims, strict=True))
    return {dim: axes[len(left) :] for dim, (axes, left) in pairs if axes != left}


def _cuts(site: HaloSite, runs: Mapping[int, Sequence[str]]) -> Cuts:
    return {dim: site.positions(run) for dim, run in runs.items()}


def _all_reduce(site: HaloSite, x: fx.Node) -> fx.Node:
    if not math.prod(site.result_shape):
        return x
    return site.emit.collective(c10d.all_reduce.default, x, site.result_shape, site.step.op, site.group_name)


def _reduce_scatter(site: HaloSite, x: fx.Node) -> fx.Node:
    step: ReduceScatter = site.step
    if not math.prod(value(x).shape):
        return site.emit.empty(x, site.result_shape)
    runs, part = _cut_by(step.after, step.before), list(site.result_shape)
    for dim, run in runs.items():
        sizes = site.part_sizes(step.after, dim, run)
        x, part[dim] = pad_parts(site.emit, x, dim, sizes), max(sizes)
    stacked = stack_parts(site.emit, x, _cuts(site, runs), site.counts)
    target = c10d.reduce_scatter_tensor.default
    reduced = site.emit.collective(target, stacked, part, step.op, len(site.ranks), site.group_name)
    for dim in runs:
        reduced = site.emit.slice(reduced, dim, 0, site.result_shape[dim])
    return reduced


def _send_rows(site: HaloSite, x: fx.Node) -> fx.Node:
    """Gathered, for whoever needs all; the mark says what would do (`passes.ops.collective_ops`)."""
    choice = Choice.of(dict(site.step.after.partial)[site.step.axes[0]])
    return _marked(site, sent, _all_gather, x, choice.count if choice else 1)


def _return_rows(site: HaloSite, x: fx.Node) -> fx.Node:
    return _marked(site, returned, _reduce_scatter, x)


def _marked(
    site: HaloSite, mark: Any, move: Callable[[HaloSite, fx.Node], fx.Node], x: fx.Node, *how: int
) -> fx.Node:
    """Moved, and marked; all nodes say so."""
    site = replace(site, emit=replace(site.emit, meta={**site.emit.meta, "marked": True}))
    moved = move(site, x)
    step: SendRows | ReturnRows = site.step
    split, whole = sorted((step.before, step.after), key=lambda one: sum(map(len, one.dims)), reverse=True)
    runs = sorted(_cut_by(split, whole).items(), key=lambda each: step.axes.index(each[1][0]))
    sizes = [site.part_sizes(split, dim, run) for dim, run in runs]
    index, ways = site.mesh.linear_index(site.rank, step.axes), [site.mesh.size(axis) for axis in step.axes]
    parts = [dim for dim, _ in runs], list(itertools.chain(*sizes)), list(map(len, sizes))
    said = (*parts, index, ways, *how, site.group_name)
    return site.emit.named(mark, value(moved), (moved, x, *said), {})


def _all_to_all(site: HaloSite, x: fx.Node) -> fx.Node:
    step: AllToAll = site.step
    sent = [site.span(step.after, step.to_dim, rank) for rank in site.ranks]
    received = [site.span(step.before, step.from_dim, rank) for rank in site.ranks]
    even = len({hi - lo for lo, hi in sent}) == len({hi - lo for lo, hi in received}) == 1
    if even and math.prod(value(x).shape):
        return _even_all_to_all(site, x)
    return _exchange(site, x, (step.to_dim, sent), (step.from_dim, received))


def _even_all_to_all(site: HaloSite, x: fx.Node) -> fx.Node:
    """Every rank sends every rank a piece of the same shape."""
    step: AllToAll = site.step
    n = len(site.ranks)
    part = list(value(x).shape)
    part[step.to_dim] //= n
    stacked = stack_parts(site.emit, x, {step.to_dim: site.positions(step.axes)}, site.counts)
    splits = [part[0]] * n
    target = c10d.all_to_all_single.default
    moved = site.emit.collective(target, stacked, value(stacked).shape, splits, splits, site.group_name)
    nested = step.before.dims[step.from_dim][-len(step.axes) :]
    return unstack_parts(site.emit, moved, {step.from_dim: site.positions(nested)}, site.counts, part)


def _exchange(
    site: HaloSite, x: fx.Node, sent: tuple[int, Sequence[Span]], received: tuple[int, Sequence[Span]]
) -> fx.Node:
    """Send each rank of the group its span of one dim, put what arrives in a row along another.

    sent, received: (dim, per rank of the group the span, in global coordinates).
    """
    before, after = (site.step.before, site.step.after)
    (cut, out), (joined, into) = sent, received
    out = _shift(out, site.span(before, cut)[0])
    into = _shift(into, site.span(after, joined)[0])
    shape, result = tuple(value(x).shape), site.result_shape
    if not _group_elements(site):
        return site.emit.empty(x, result)
    out_numel = [(hi - lo) * math.prod(without(shape, cut)) for lo, hi in out]
    in_numel = [(hi - lo) * math.prod(without(result, joined)) for lo, hi in into]
    flat = flatten_pieces(site.emit, x, cut, out)
    arrived = site.emit.collective(
        c10d.all_to_all_single.default, flat, [sum(in_numel)], in_numel, out_numel, site.group_name
    )
    return unflatten_pieces(site.emit, arrived, joined, into, result)


def _group_elements(site: HaloSite) -> int:
    """Elements that the group's ranks hold together: the same number on each of them."""
    shapes = (site.step.before.local_shape(site.shape, site.mesh, rank) for rank in site.ranks)
    return sum(math.prod(shape) for shape in shapes)


def _shift(spans: Sequence[Span], origin: int) -> list[Span]:
    return [(lo - origin, hi - origin) for lo, hi in spans]


_EMIT: Mapping[str, Callable[[HaloSite, fx.Node], fx.Node]] = {
    "slice": _slice,
    "to_partial": _to_partial,
    "to_routed": lambda site, x: x,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_rows": _send_rows,
    "return_rows": _return_rows,
    "to_sum": lambda site, x: x,
    "reshard": halo_exchange,
    "halo_exchange": halo_exchange,
    "halo_reduce": halo_reduce,
}
assert _EMIT.keys() == STEPS.keys()
