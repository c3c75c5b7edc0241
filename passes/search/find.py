"""Search a graph for its fastest assignment of layouts, with proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cost_model.deadline import NEVER, Deadline
from cost_model.errors import InfeasibleError
from cost_model.memory import floor_bytes, format_bytes
from cost_model.mesh import MeshSpec
from passes.ir.joint import GraphInput, JointGraph, node_value
from passes.layout.joined_axes import JoinedAxes
from passes.layout.layout import Assignment
from passes.predict.least_memory import least_nbytes
from passes.search.agree import Agreed, agreed
from passes.search.bucket_starts import bucket_starts
from passes.search.judged_choice import Judgement
from passes.search.offered import build_limited
from passes.search.phase_paths import PhaseOverlap
from passes.search.search_space import SearchSpace
from passes.search.search_terms import COLD, Boundary, Narrowing, SearchStart
from passes.search.step_kinds import StepKinds
from passes.search.strategy_space import build_space
from passes.solver.problem import Infeasible
from passes.strategies.prices import Prices

JudgeUnder = Callable[[Assignment, Prices], Judgement]
"""`passes.search.judged_choice.Judge` under prices."""

_LISTING_SHARE = 0.5
"""Share of the time left in which layouts and the ways between them must be listed: the rest is for the search."""


@dataclass(frozen=True)
class Found:
    """seconds: price of one training step under the assignment; lower_bound: no assignment is
    faster; gap: (seconds - lower_bound) / seconds; peak_nbytes: predicted resident bytes on the
    fullest rank; peak_node: the graph node at which it is reached. joined: axes that the search used together: the
    bound is of assignments that do so. step, overlaps: how the seconds are counted (`passes.search.phase_paths`).
    rivals: what else the search found and judged, the fastest first."""

    assignment: Assignment
    seconds: float
    lower_bound: float
    gap: float
    status: str
    peak_nbytes: int
    peak_node: str
    step: StepKinds
    overlaps: tuple[PhaseOverlap, ...]
    joined: JoinedAxes = ()
    rivals: tuple[Found, ...] = ()
    most_gain: float | None = None


def find_assignment(
    joint: JointGraph,
    prices: Prices,
    boundary: Boundary,
    *,
    memory_limit: int | None = None,
    reserve: int = 0,
    deadline: Deadline = NEVER,
    narrowing: Narrowing | None = None,
    judge: JudgeUnder | None = None,
    start: SearchStart = COLD,
    hear: Callable[[Found], object] = lambda _: None,
) -> Found:
    """The assignment of least total seconds whose peak memory stays within `memory_limit` less `reserve` bytes.

    Only of those that use the axes `prices.joined` together.

    reserve: bytes of the limit that no tensor can have (`cost_model.memory`); not part of the peak.
    narrowing: as `build_space` takes it; nothing is proven of what it leaves out.
    judge: what an assignment takes on the timeline (`passes.search.agree`); None: the objective alone decides.
    hear: told of every plan that is judged, and of the best when more is proven of it.

    Raises InfeasibleError, naming the nodes at which the pins contradict each other or the tensors
    that bind the memory limit, and OutOfTime where there is no time left for a search.
    """
    room = None if memory_limit is None else _room(memory_limit, reserve, prices.mesh)
    listing = deadline.share(_LISTING_SHARE)
    if room is None:
        space = build_space(joint, prices, boundary, narrowing=narrowing, deadline=listing)
    else:
        space = build_limited(
            joint, prices, boundary, memory_limit=room, narrowing=narrowing, deadline=listing
        )
    deadline.check()
    told = lambda one: hear(_found(one, space, joint, prices))
    try:
        own = None if judge is None else lambda assignment: judge(assignment, prices)
        starts = lambda overlaps, least: bucket_starts(space, joint, prices, overlaps, least)
        found = agreed(space, prices.overlap_efficiency, own, deadline, start, told, starts)
    except Infeasible as reason:
        raise explained(reason, joint, space, prices, (memory_limit or 0, reserve)) from None
    return _found(found, space, joint, prices)


def _found(agreed: Agreed, space: SearchSpace, joint: JointGraph, prices: Prices) -> Found:
    peak, step = space.problem.peak(agreed.choice)
    order = list(joint.graph.nodes)
    return Found(
        assignment=agreed.assignment,
        seconds=agreed.seconds,
        lower_bound=agreed.lower_bound,
        gap=(agreed.seconds - agreed.lower_bound) / max(agreed.seconds, 1e-300),
        status="feasible" if prices.joined else agreed.status,
        peak_nbytes=int(peak),
        peak_node=order[min(step, len(order) - 1)].name,
        step=space.step,
        overlaps=agreed.overlaps,
        most_gain=None if space.alone is None else space.alone.most_gain,
        joined=prices.joined,
        rivals=tuple(_found(rival, space, joint, prices) for rival in agreed.rivals),
    )


def _room(limit: int, reserve: int, mesh: MeshSpec) -> int:
    """Bytes for tensors. InfeasibleError if there are none."""
    if limit > reserve:
        return limit - reserve
    raise InfeasibleError(
        f"no plan fits memory_limit={format_bytes(limit)} per device on {mesh}\n"
        f"  CUDA's context and the communicators alone take {format_bytes(reserve)}\n"
        "  try: a memory_limit near what the device has"
    )


def explained(
    reason: Infeasible, joint: JointGraph, space: SearchSpace, prices: Prices, limit: tuple[int, int]
) -> InfeasibleError:
    """Why the search found nothing, for users. limit: the memory limit, and what of it no plan's tensors can have."""
    mesh = prices.mesh
    if reason.kind == "memory":
        return _memory_error(reason, joint, space, prices, limit)
    if reason.kind == "time":
        within = f" within memory_limit={format_bytes(limit[0])} per device" if limit[0] else ""
        return InfeasibleError(
            f"the search found no plan{within} on {mesh} in its time limit, and did not prove that there is none\n"
            "  try: a larger `time_limit` (seconds), a larger `memory_limit`, or fewer pins"
        )
    names = ", ".join(space.names[i] for i in reason.nodes[:6])
    return InfeasibleError(
        f"no plan satisfies the constraints on {mesh}\n"
        f"  they contradict each other around: {names}\n"
        "  try: fewer pins in `constraints`, or pins that agree with `in_placements` and `out_placements`"
    )


def _memory_error(
    reason: Infeasible, joint: JointGraph, space: SearchSpace, prices: Prices, limit: tuple[int, int]
) -> InfeasibleError:
    """That none fits is said where that is proven of programs (`least_nbytes`): the search may count more than they
    hold."""
    whole, reserve = limit
    usages = space.problem.usages
    counted = {i: int(usages[i].min()) for i in reason.nodes}
    largest = sorted(counted, key=lambda i: (-counted[i], i))[:8]
    kinds = {node.name: spec for node, spec in zip(joint.placeholders, joint.inputs, strict=True)}
    lines = [f"    {_readable(space.names[i], kinds)}: {format_bytes(counted[i])}" for i in largest]
    least = least_nbytes(joint, dict(zip(space.names, space.strategies, strict=True)), prices)
    fits = f"fits memory_limit={format_bytes(whole)} per device on {prices.mesh}"
    proven = least + reserve > whole
    kept = f", and {floor_bytes(reserve)} for CUDA's context and communicators" if reserve else ""
    if joint.in_flight > 1:
        kept += f", besides room for the {joint.in_flight - 1} other pieces in flight"
    return InfeasibleError(
        (f"no plan {fits}\n" if proven else f"no plan was found that {fits}, nor proven that there is none\n")
        + f"  any plan needs at least {floor_bytes(least)}{kept}; the largest of what the search counts at "
        f"{_step_name(joint, reason.step)}:\n"
        + "\n".join(lines)
        + f"\n  try: a larger memory_limit, more devices, or a smaller batch{_or_keep(joint, reason.bound)}"
    )


def _or_keep(joint: JointGraph, bound: float) -> str:
    """What to try as well, where outputs are much of the peak: by default every rank gets them whole."""
    ends = zip(joint.outputs, joint.results, strict=True)
    values = [node_value(node) for end, node in ends if end.kind == "output" and node is not None]
    nbytes = sum(math.prod(value.shape) * value.element_size() for value in values)
    return f', or out_placements="keep" for {format_bytes(nbytes)} of outputs' if 10 * nbytes > bound else ""


def _step_name(joint: JointGraph, step: int | None) -> str:
    """The node whose turn it is at `step`: intervals count positions in the graph's order."""
    order = list(joint.graph.nodes)
    return "its peak" if step is None else f"node {order[min(step, len(order) - 1)].name}"


def _readable(name: str, kinds: Mapping[str, GraphInput]) -> str:
    spec = kinds.get(name)
    if spec is None:
        return name
    return f"{spec.name} (with gradient and optimizer state)" if spec.kind == "param" else spec.name
