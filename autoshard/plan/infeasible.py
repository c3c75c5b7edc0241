"""Where nothing fits the memory, or the time: what the smallest plan holds at its peak, and what else could fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autoshard.plan.judged import Judged
from autoshard.plan.plan_memory import MemoryTimeline, kind_lines
from cost_model.errors import InfeasibleError, few
from cost_model.memory import enough_bytes, format_bytes
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_values
from passes.layout.layout import Assignment, Layout
from passes.micro_batches.cut_batch import Uncut, cut_batch
from passes.micro_batches.time_axis import batch_length
from passes.predict.prediction import LiveValue, MemoryWalk
from passes.search.find import Found

_OF_A_PARAMETER = ("parameters", "optimizer", "gradients")


@dataclass(frozen=True)
class Asked:
    """What was to be planned. pins: the parameters' by name. reserve: bytes of the limit that a plan needs besides its
    step. links: the whole mesh, of which `mesh` is one stage."""

    joint: JointGraph
    mesh: MeshSpec
    memory_limit: int | None
    time_limit: float
    pins: Mapping[str, Layout]
    recompute: str
    reserve: Callable[[Judged], int]
    links: MeshSpec | None = None


def told(
    reason: InfeasibleError | None, asked: Asked, judged: Collection[Judged], anyway: Collection[Judged]
) -> InfeasibleError:
    """`reason`; None: time ended. Where it is the memory limit, also what lives at the peak of the smallest plan that
    was judged, by kind and module, and what to change, as estimates. anyway: those that are judged within any limit,
    one at least: what states of one limit led to, a larger one may not, and what was left when time ended, neither."""
    needs = lambda one: one.peak.nbytes + asked.reserve(one)
    smallest, limit = min(judged, key=needs, default=None), asked.memory_limit
    if reason is None:
        over = None if smallest is None or limit is None else (limit, needs(smallest))
        reason, anyway = out_of_time(asked.mesh, asked.time_limit, over), ()
    if limit is None or smallest is None or smallest.memory is None:
        return reason
    case = _Case(asked, smallest.planned.layouts, smallest.memory, limit - asked.reserve(smallest))
    if case.missing <= 0:
        return reason
    said, remedies = str(reason), list(_remedies(case))
    if anyway:
        enough = min(map(needs, anyway))
        of = "the smallest plan" if enough == needs(smallest) else "another plan"
        fits = f"memory_limit={enough_bytes(enough)}"
        within = f"{fits}, which {of} that was judged fits"
        if asked.links is not None:
            within = f"{fits}, within which that plan of this stage is; other stages may need more"
        else:
            said = said.replace("try: a larger memory_limit", f"try: {within}", 1)
        remedies = [*([] if within in said else [within]), *remedies]
    peak = case.walk.peak
    lines = [
        f"  the smallest plan that was judged holds {format_bytes(peak.nbytes)} at {peak.node}, in the {peak.phase}:",
        *(f"    {line}" for line in kind_lines(MemoryTimeline.of(case.walk))),
        *(f"  try as well: {remedy}" for remedy in remedies),
    ]
    return InfeasibleError("\n".join([said, *lines]))


@dataclass(frozen=True)
class _Case:
    """room: bytes of the limit for tensors. assignment, walk: of the smallest plan."""

    asked: Asked
    assignment: Assignment
    walk: MemoryWalk
    room: int

    @property
    def missing(self) -> int:
        return self.walk.peak.nbytes - self.room

    @cached_property
    def alive(self) -> list[LiveValue]:
        """At the peak."""
        return self.walk.alive(self.walk.peak.place)

    @cached_property
    def given(self) -> Mapping[str, Layout]:
        """Of parameters and inputs, by name."""
        held = self.assignment
        return {
            spec.name: held[node.name].results[0]
            for node, spec in self.asked.joint.given
            if spec.kind != "tangent"
        }

    @cached_property
    def splits(self) -> Mapping[str, float]:
        """Axis -> of the bytes of all values inside the model, the share that it splits."""
        total, by_axis = 0, dict.fromkeys(self.asked.mesh.names, 0)
        for node in self.asked.joint.graph.nodes:
            layouts = self.assignment.get(node.name)
            if node.op == "call_function" and layouts is not None:
                for value, layout in zip(node_values(node), layouts.results, strict=False):
                    nbytes = 0 if value is None else value.numel() * value.element_size()
                    total += nbytes
                    for axis in layout.axes:
                        by_axis[axis] += nbytes
        return {axis: nbytes / max(1, total) for axis, nbytes in by_axis.items()}


def _remedies(case: _Case) -> Iterator[str]:
    """What is not in every such error: a larger limit, more devices and a smaller batch are."""
    if case.asked.recompute == "user":
        yield 'recompute="auto", which also computes again what the model does not run under `checkpoint`'
    yield from _more_pieces(case.asked)
    yield from _without_pins(case)
    yield from _longer_axis(case)


def _more_pieces(asked: Asked) -> Iterator[str]:
    """Of a batch that has so many samples and can be cut; that of stages is."""
    joint = asked.joint
    more = min(2 * joint.pieces, batch_length(joint)) if joint.trains else 1
    if more <= joint.pieces:
        return
    if joint.pieces > 1:
        yield f'micro_batches={more}, or "auto"'
    elif asked.links is not None or _can_be_cut(joint):
        yield 'micro_batches="auto", which runs the batch in as few pieces as fit, one after the other'


def _can_be_cut(joint: JointGraph) -> bool:
    try:
        cut_batch(joint, 2)
    except Uncut:
        return False
    return True


def _without_pins(case: _Case) -> Iterator[str]:
    """Pinned parameters, by what less of them there would be if they were split over all axes."""
    held: dict[str, int] = {}
    for value in case.alive:
        if value.kind in _OF_A_PARAMETER and value.name in case.asked.pins:
            free = [
                axis for axis in case.asked.mesh.real_axes() if axis not in case.asked.pins[value.name].axes
            ]
            held[value.name] = held.get(value.name, 0) + _saved(value.nbytes, case.asked.mesh.size(*free))
    # Share of what is missing that a pin must hold to be named.
    worth = {name: nbytes for name, nbytes in held.items() if nbytes >= 0.05 * case.missing}
    if not worth:
        return
    names = sorted(worth, key=lambda name: (-worth[name], name))
    total = sum(worth.values())
    enough = "which is enough" if total >= case.missing else f"of the {format_bytes(case.missing)} missing"
    yield (
        f"without the pins of {few(names, 3)} in `constraints`: split over all axes they take "
        f"{format_bytes(total)} less, {enough}"
    )


def _saved(nbytes: int, parts: int) -> int:
    return nbytes - math.ceil(nbytes / parts)


def _longer_axis(case: _Case) -> Iterator[str]:
    """The axis that must grow least, and which of several leaves least."""
    found = [
        (times, nbytes, axis)
        for axis in case.asked.mesh.names
        if (case.asked.links or case.asked.mesh).size(axis) == case.asked.mesh.size(axis)
        for times, nbytes in [_enough(axis, case)]
        if nbytes <= case.room
    ]
    if found:
        times, nbytes, axis = min(found)
        size = case.asked.mesh.size(axis)
        yield (
            f"a mesh with {axis}={times * size} in place of {axis}={size}: of this plan each device would hold about "
            f"{format_bytes(nbytes)}"
        )


def _enough(axis: str, case: _Case) -> tuple[int, int]:
    """(how many times as long it must be, bytes then): what is split over it shrinks as it grows."""
    shares = [(value.nbytes, _split_share(value, axis, case)) for value in case.alive]
    times, left = 1, case.walk.peak.nbytes
    # An axis is not said to be enough that had to be more than 64 times as long.
    while times < 2**6 and left > case.room:
        times *= 2
        left = math.ceil(sum(nbytes * (1.0 - share + share / times) for nbytes, share in shares))
    return times, left


def _split_share(value: LiveValue, axis: str, case: _Case) -> float:
    """1 of what the axis splits, 0 of what it does not: inputs that every rank is given whole. Of values inside the
    model the share of all values that it splits; of an axis of one device all. What transfers gather stays as it is."""
    if value.kind == "moved":
        return 0.0
    if case.asked.mesh.size(axis) == 1:
        return 1.0
    if value.kind in (*_OF_A_PARAMETER, "inputs") and value.name in case.given:
        return float(axis in case.given[value.name].axes)
    return case.splits[axis]


def too_much(limit: int, found: Found) -> InfeasibleError:
    """found: the plan that holds least."""
    return InfeasibleError(
        f"no plan was found that fits memory_limit={format_bytes(limit)} per device: the smallest that was "
        f"found holds {format_bytes(found.peak_nbytes)} at {found.peak_node}\n"
        "  try: a larger memory_limit, more devices, or a smaller batch"
    )


def out_of_time(mesh: MeshSpec, time_limit: float, over: tuple[int, int] | None = None) -> InfeasibleError:
    """over: the memory limit, and what of the plans that were found the smallest needs; None: no plan was found."""
    axes = len(mesh.real_axes())
    fewer = f", or a mesh of fewer axes than {axes}" if axes > 1 else ""
    within = f"on {mesh} was found within time_limit={time_limit:g} seconds"
    if over is None:
        return InfeasibleError(
            f"no plan {within}: they ended before its layouts and the ways between them were listed\n"
            f"  try: a larger `time_limit`{fewer}"
        )
    limit, needed = map(format_bytes, over)
    return InfeasibleError(
        f"no plan that fits memory_limit={limit} per device {within}: of those that were found the smallest needs "
        f"{needed}\n  try: a larger `time_limit`, a larger `memory_limit`, `micro_batches`{fewer}"
    )
