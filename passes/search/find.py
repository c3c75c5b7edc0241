"""Search a graph for its fastest assignment of layouts, with proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from cost_model.deadline import NEVER, Deadline
from cost_model.errors import InfeasibleError
from cost_model.memory import floor_bytes, format_bytes
from cost_model.mesh import MeshSpec
from passes.ir.joint import GraphInput, JointGraph, node_value, repeats, result_index, tensor_operands
from passes.ir.op_traits import read_repeats
from passes.layout.layout import Assignment, JoinedAxes, Layout, NodeLayouts
from passes.predict.workspaces import least_nbytes
from passes.search.agree import Agreed, agreed
from passes.search.bucket_starts import bucket_starts
from passes.search.judged_choice import Judgement
from passes.search.offered import LimitedBuilder
from passes.search.search_space import SearchSpace
from passes.search.search_terms import ALL, COLD, Boundary, Narrowing, SearchStart
from passes.search.step_kinds import PhaseOverlap, StepKinds
from passes.search.strategy_space import SpaceBuilder
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
    bound is of assignments that do so. step, overlaps: how the seconds are counted (`passes.search.step_kinds`).
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


@dataclass(frozen=True)
class Sought:
    """reserve: bytes of the limit that no tensor can have (`cost_model.memory`); not part of the peak.
    narrowing: as `SpaceBuilder` takes it; nothing is proven of what it leaves out.
    judge: what an assignment takes on the timeline (`passes.search.agree`); None: the objective alone decides.
    hear: told of every plan that is judged, and of the best when more is proven of it.
    """

    joint: JointGraph
    prices: Prices
    boundary: Boundary
    memory_limit: int | None = None
    reserve: int = 0
    narrowing: Narrowing = ALL
    judge: JudgeUnder | None = None
    start: SearchStart = COLD
    hear: Callable[[Found], object] = lambda _: None


def find_assignment(sought: Sought, deadline: Deadline = NEVER) -> Found:
    """The assignment of least total seconds whose peak memory stays within `memory_limit` less `reserve` bytes.

    Only of those that use the axes `prices.joined` together.

    Raises InfeasibleError, naming the nodes at which the pins contradict each other or the tensors
    that bind the memory limit, and OutOfTime where there is no time left for a search.
    """
    joint, prices, limit, judge = sought.joint, sought.prices, sought.memory_limit, sought.judge
    room = None if limit is None else _room(limit, sought.reserve, prices.mesh)
    given = joint, prices, sought.boundary, sought.narrowing, deadline.share(_LISTING_SHARE)
    space = (SpaceBuilder if room is None else LimitedBuilder)(*given).built(room)
    deadline.check()
    told = lambda one: sought.hear(_found(one, space, joint, prices))
    try:
        own = None if judge is None else lambda assignment: judge(assignment, prices)
        starts = lambda overlaps, least: bucket_starts(space, joint, prices, overlaps, least)
        found = agreed(space, prices.overlap_efficiency, own, deadline, sought.start, told, starts)
    except Infeasible as reason:
        raise explained(reason, joint, space, prices, (limit or 0, sought.reserve)) from None
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
    kinds = {node.name: spec for node, spec in joint.given}
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
    ends = [node for end, node in joint.returned if end.kind == "output"]
    values = [node_value(node) for node in ends if node is not None]
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


MOST = 6
"""That are told of an op."""


@dataclass(frozen=True)
class Alternative:
    """seconds: of the op itself; moved: of the transfers in front of it and behind it, where its neighbours stay as
    they are. more: of both, beyond what the plan's own layouts take."""

    layouts: NodeLayouts
    seconds: float
    moved: float
    more: float


def alternatives(
    joint: JointGraph,
    assignment: Assignment,
    prices: Prices,
    boundary: Boundary,
    names: Iterable[str],
    deadline: Deadline = NEVER,
) -> dict[str, list[Alternative]]:
    """By name the cheapest others of each op, those that would take least first. OutOfTime."""
    builder = SpaceBuilder(joint, prices, boundary, deadline=deadline)
    builder.add_nodes()
    wanted, finder = set(names), _Finder(builder, assignment)
    nodes = [node for node in builder.index if node.name in wanted and node.op == "call_function"]
    return {node.name: finder.of(node) for node in nodes}


@dataclass
class _Finder:
    builder: SpaceBuilder
    assignment: Assignment
    readers: dict[fx.Node, list[tuple[fx.Node, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Readers by what they read: a result of several is read through its `getitem`."""
        for reader in (*self.builder.index, self.builder.joint.output_node):
            for position, operand in enumerate(tensor_operands(reader)):
                self.readers.setdefault(result_index(operand)[0], []).append((reader, position))

    def of(self, node: fx.Node) -> list[Alternative]:
        own = self.assignment[node.name]
        option = self.builder.options[self.builder.index[node]]
        strategies = [own, *(one for one in option.strategies if one != own)]
        alone = dict(zip(map(id, option.strategies), option.seconds, strict=True))
        mine = repeats(node) * self.builder.prices.op_seconds(node, own)
        seconds = [mine, *(float(alone[id(one)]) for one in strategies[1:])]
        moved = self._moved(node, strategies)
        every = [
            Alternative(layouts, s, float(m), (s - seconds[0]) + float(m - moved[0]))
            for layouts, s, m in zip(strategies, seconds, moved, strict=True)
        ]
        others = sorted((one for one in every[1:] if np.isfinite(one.moved)), key=lambda one: one.more)
        return [every[0], *others[: MOST - 1]]

    def _moved(self, node: fx.Node, strategies: Sequence[NodeLayouts]) -> np.ndarray:
        found = np.zeros(len(strategies))
        for i, operand in enumerate(tensor_operands(node)):
            source, result = result_index(operand)
            held = self.assignment[source.name].results[result]
            ways = self._seconds(operand, node, i, [held], [one.operands[i] for one in strategies])
            found += ways[0]
        for reader, i in self.readers.get(node, ()):
            operand = tensor_operands(reader)[i]
            wanted = self.assignment[reader.name].operands[i]
            held = [one.results[result_index(operand)[1]] for one in strategies]
            found += self._seconds(operand, reader, i, held, [wanted])[:, 0]
        return found

    def _seconds(
        self, operand: fx.Node, reader: fx.Node, i: int, held: list[Layout], wanted: list[Layout]
    ) -> np.ndarray:
        merges = (reader.name, i) in self.builder.reads.ending
        times = read_repeats(reader, operand)
        return times * np.add.reduce(
            self.builder.priced(held, wanted, node_value(operand), merges, frozenset())
        )
