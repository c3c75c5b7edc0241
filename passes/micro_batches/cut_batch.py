"""A joint graph as the graphs of its pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from passes.ir.joint import JointGraph, node_value, result_shapes, tensor_operands
from passes.lower.missing_tangents import without_usually_missing
from passes.micro_batches.in_pieces import in_pieces, without_uses
from passes.micro_batches.run_times import RunTimes, find_run_times
from passes.micro_batches.time_axis import TIME, time_mesh, trains
from passes.micro_batches.uncut import check_cut, check_long_enough


def cut_batch(joint: JointGraph, count: int, *, sizes_only: bool = False) -> JointGraph:
    """The step of a canonical `joint`, its batch in `count` pieces: the graph of the first, with those of the others.

    sizes_only: of pieces of one size there is one graph, which is enough to plan them.

    All hold what runs before and after the pieces, alike; the loss alone gets a gradient, where there is one scalar.
    Raises Uncut, an InfeasibleError that says which op needs the whole batch at once.
    """
    if count == 1:
        return joint
    check_long_enough(joint, count)
    plain = without_uses(without_usually_missing(joint))
    times = find_run_times(plain, count)
    check_cut(plain, times)
    first, *others = (
        in_pieces(plain, times, index)
        for index in (_first_of_each_size(plain, times) if sizes_only else range(count))
    )
    return replace(first, others=tuple(others))


def _first_of_each_size(joint: JointGraph, times: RunTimes) -> list[int]:
    """The pieces of which all before have other sizes: of what is cut, as it is cut."""
    firsts: dict[tuple[int, ...], int] = {}
    for place, sizes in enumerate(zip(*sorted(set(_cut_sizes(joint, times))), strict=True)):
        firsts.setdefault(sizes, place)
    return list(firsts.values()) or [0]


def _cut_sizes(joint: JointGraph, times: RunTimes) -> Iterator[tuple[int, ...]]:
    """Per dim that is cut the sizes that pieces have of it."""
    mesh = time_mesh(times.count)
    for node in joint.graph.nodes:
        if node.name not in times.layouts:
            continue
        layouts = times.layouts[node.name]
        shapes = [*(tuple(node_value(n).shape) for n in tensor_operands(node)), *result_shapes(node)]
        for shape, layout in zip(shapes, (*layouts.operands, *layouts.results), strict=True):
            dim = layout.dim_of(TIME)
            if dim is not None:
                yield layout.split_sizes(shape, mesh, dim)


def cut_for_stages(joint: JointGraph, count: int, *, sizes_only: bool = False) -> JointGraph:
    """The graph of a call of which the stages of a pipeline are cut: if it trains, in `count` pieces, with a gradient
    for the loss alone where there is one scalar; else as it is. Raises Uncut.

    sizes_only: as in `cut_batch`."""
    if not trains(joint):
        return joint
    if count == 1:
        return without_usually_missing(joint)
    return cut_batch(joint, count, sizes_only=sizes_only)
