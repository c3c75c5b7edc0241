"""How long a step of a plan will take: the program that runs, of its slowest rank, in each order of its transfers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from msgspec import Struct, structs
from torch import fx

from cost_model.errors import Count, Seconds
from cost_model.mesh import MeshSpec, simulated_group_axes, simulated_groups
from passes.ir.graph_pass import duplicate_module
from passes.ir.joint import CPU, JointGraph
from passes.ir.process_state import collector_paused
from passes.layout.layout import Assignment
from passes.lower.own_rows import behind_ids
from passes.lower.partition import order_of
from passes.lower.phases import Backward, Phases, split_backward
from passes.lower.piecewise import RankPieces, split_pieces
from passes.lower.rank_program import RankProgram, Schedule, rank_program
from passes.plan.planned_graph import PlannedGraph
from passes.plan.transfers import ring_turns
from passes.predict.predict_program import alone, predict_phases, predict_pieces, trained_by, update_seconds
from passes.predict.prediction import MemoryWalk, Prediction
from passes.predict.step_events import Axes
from passes.rules.core.rule_registry import rules_of
from passes.schedule.issue_order import step_places
from passes.schedule.schedule import scheduled
from passes.states.compute_again import compute_again
from passes.strategies.prices import Prices
from passes.strategies.traffic import eager_traffic


class StageFigures(Struct, frozen=True, forbid_unknown_fields=True):
    """Of one stage, on its slowest and on its fullest rank.

    forward, backward: seconds of one piece. input, weight: of the halves of its backward as two programs. before,
    after: once in a step, before the first piece and after the last. update: of the optimizer.
    held: bytes from the first piece to the end of the step, whatever runs; kept: those that a piece leaves in its
    forward for its backward, and what it received; peak: the most while one piece runs, all of these included.
    """

    forward: Seconds
    backward: Seconds
    input: Seconds
    weight: Seconds
    before: Seconds
    after: Seconds
    update: Seconds
    held: Count
    kept: Count
    peak: Count

    @property
    def running(self) -> int:
        """Bytes that are there only while a piece runs."""
        return self.peak - self.held - self.kept

    def of_piece(self, pieces: int) -> float:
        """Seconds of a piece, with its share of what runs once."""
        return self.forward + self.backward + (self.before + self.after + self.update) / pieces


@collector_paused()
def predict_stage(
    joint: JointGraph, planned: PlannedGraph, prices: Prices, received: Collection[str]
) -> StageFigures:
    """joint: of the stage. received: names of the values that come from the stage before."""
    joint = replace(joint, device=CPU)  # it is never run
    mesh = prices.mesh
    groups = simulated_groups(mesh)
    found = [
        _of_rank(joint, rank_program(joint, planned, mesh, rank, groups), prices, frozenset(received))
        for rank in slowest_ranks(planned.layouts, mesh, joint)
    ]
    slowest = max(found, key=lambda one: one.forward + one.backward)
    fullest = max(found, key=lambda one: one.peak)
    return structs.replace(slowest, held=fullest.held, kept=fullest.kept, peak=fullest.peak)


def kept_by_a_piece(walk: MemoryWalk, received: Collection[str]) -> int:
    """Bytes that a piece leaves in its forward for its backward; what it received is taken to be among them."""
    turn = next((i for i, (phase, _) in enumerate(walk.steps) if phase == "backward"), len(walk.steps))
    at_turn = [v for v in walk.values if v.kind == "kept" and v.first <= turn <= v.last]
    inputs = [v for v in walk.values if v.kind == "inputs" and v.name in received]
    return sum(value.nbytes for value in (*at_turn, *inputs))


def _of_rank(
    joint: JointGraph, program: RankProgram, prices: Prices, received: frozenset[str]
) -> StageFigures:
    eager = prices.traffic is eager_traffic
    predict = lambda phases: predict_phases(phases, prices, simulated_group_axes)
    if joint.pieces == 1:
        phases = (program.joined() if eager else program).complete()
        step = predict(phases)
        before = after = 0.0
        given_back = received
    else:
        parts = split_pieces(program)
        parts = parts.joined() if eager else parts
        step = predict_pieces(program, parts, joint.pieces, prices, simulated_group_axes)
        before, after = (predict(alone(module)).seconds for module in (parts.before, parts.after))
        phases = parts.piece.complete()
        given_back = _given_back(phases, parts)
    piece = predict(phases).phase_seconds
    halves = _halves(phases.backward, given_back, predict)
    walk = step.memory
    assert walk is not None
    return StageFigures(
        forward=piece[0],
        backward=piece[1],
        input=halves[0],
        weight=halves[1],
        before=before,
        after=after,
        update=update_seconds(trained_by(program), prices),
        held=_held(walk),
        kept=kept_by_a_piece(walk, received),
        peak=walk.peak.nbytes,
    )


def _given_back(phases: Phases, parts: RankPieces) -> set[str]:
    """Names of the gradients of what is received: of a piece's, those that it leaves for another stage."""
    if phases.backward is None:
        return set()
    left = zip(phases.backward.gradients, parts.left[len(phases.outputs) :], strict=True)
    return {end.name for end, one in left if one.how == "own"}


def _halves(
    backward: Backward | None, received: Collection[str], predict: Callable[[Phases], Prediction]
) -> tuple[float, float]:
    """Seconds of what the stage before waits for, and of the gradients of parameters."""
    if backward is None:
        return 0.0, 0.0
    halves = split_backward(backward, received)
    return predict(alone(halves.input)).seconds, predict(alone(halves.weight)).seconds


def _held(walk: MemoryWalk) -> int:
    """Of what is there to the end: what was there before the pieces, and gradients."""
    end = len(walk.steps) - 1
    forward = [i for i, (phase, _) in enumerate(walk.steps) if phase == "forward"]
    early = max(forward, default=0)
    return sum(
        value.nbytes
        for value in walk.values
        if value.last == end and (value.kind == "gradients" or value.first <= early)
    )


@collector_paused()
def predicted_step(
    joint: JointGraph, planned: PlannedGraph, prices: Prices, *, schedule: Schedule | None = None
) -> Prediction:
    """The step of the slowest rank: the program that runs, under `prices`.

    schedule: the order in which each phase runs; None: `scheduled`.
    """
    mesh = prices.mesh
    joint = replace(joint, device=CPU)  # it is never run
    groups = simulated_groups(mesh)
    order = schedule or partial(scheduled, calls=joint.calls)

    def of_rank(rank: int) -> Prediction:
        program = rank_program(joint, planned, mesh, rank, groups, schedule=order)
        eager = prices.traffic is eager_traffic
        if joint.pieces > 1:
            parts = split_pieces(program)
            parts = parts.joined() if eager else parts
            return predict_pieces(program, parts, joint.pieces, prices, simulated_group_axes)
        program = program.joined() if eager else program
        return predict_phases(program.usual(), prices, simulated_group_axes)

    return _slowest_step(of_rank(rank) for rank in slowest_ranks(planned.layouts, mesh, joint))


class StepInOrders:
    """`predicted_step` of programs that differ in the order of their transfers, each of which is made but once."""

    def __init__(self, joint: JointGraph) -> None:
        self._joint = replace(joint, device=CPU)
        self._orders: dict[int, Orders] = {}

    @collector_paused()
    def predicted(self, planned: PlannedGraph, prices: Prices) -> Prediction:
        """Of the slowest rank. planned: under `prices`."""
        if self._joint.pieces > 1:
            return predicted_step(self._joint, planned, prices)
        return _slowest_step(
            predict_phases(
                self._of_rank(rank, planned, prices).program(planned).usual(), prices, simulated_group_axes
            )
            for rank in slowest_ranks(planned.layouts, prices.mesh, self._joint)
        )

    def _of_rank(self, rank: int, planned: PlannedGraph, prices: Prices) -> Orders:
        known = self._orders.get(rank)
        if known is not None and known.has(planned):
            return known
        mesh, joined = prices.mesh, prices.traffic is eager_traffic
        self._orders[rank] = Orders(self._joint, planned, mesh, rank, simulated_groups(mesh), joined=joined)
        return self._orders[rank]


@dataclass
class Orders:
    """Programs of one rank that differ in turns, and in how many transfers are in flight, and in nothing else.

    planned: the first. joined: with the kernels that a program has which runs op by op. Others as of
    `rank_program`.
    """

    joint: JointGraph
    planned: PlannedGraph
    mesh: MeshSpec
    rank: int
    groups: Mapping[tuple[str, ...], str]
    joined: bool

    def __post_init__(self) -> None:
        self._joint = compute_again(self.joint, self.planned.again)
        program = rank_program(self._joint, self.planned, self.mesh, self.rank, self.groups)
        self._program = program.joined() if self.joined else program

    def has(self, planned: PlannedGraph) -> bool:
        """Whether that is the same program in another order: what moves, and in which phase, is the same."""
        phases = lambda one: {transfer: turn[0] for transfer, turn in one.turns.items()}
        content = lambda one: (phases(one), one.steps, one.interiors, one.layouts)
        return content(planned) == content(self.planned)

    def program(self, planned: PlannedGraph) -> RankProgram:
        """In the order of `planned`, which it `has`."""
        places, rings = step_places(self._joint, planned), ring_turns(self._joint, planned)

        def ordered(module: fx.GraphModule) -> fx.GraphModule:
            module = duplicate_module(module)
            for node in module.graph.nodes:
                if "transfer" in node.meta:
                    transfer = self._program.local.transfers[node.meta["transfer"]]
                    order = ("ahead", "places", "starts")
                    kept = {name: value for name, value in node.meta.items() if name not in order}
                    node.meta = kept | order_of(transfer, planned, places)
                elif "ring" in node.meta:
                    node.meta["turn"] = rings[node.meta["ring"]]
            behind_ids(module.graph)
            return module

        backward = self._split.backward
        split = replace(
            self._split,
            forward=ordered(self._split.forward),
            backward=None if backward is None else replace(backward, module=ordered(backward.module)),
        )
        return replace(self._program, split=split)

    @cached_property
    def _split(self) -> Phases:
        return self._program.in_phases()


def _slowest_step(ranks: Iterable[Prediction]) -> Prediction:
    """The step of the slowest of the ranks, with the memory of the fullest."""
    found = list(ranks)
    fullest = max(found, key=lambda p: p.peak.nbytes)
    return replace(max(found, key=lambda p: p.seconds), memory=fullest.memory)


def slowest_ranks(assignment: Assignment, mesh: MeshSpec, joint: JointGraph | None = None) -> tuple[int, ...]:
    """Ranks of which one is the slowest.

    Rank 0 has the largest shard of everything split in torch's sizes. For every split with sizes of
    its own, the rank that holds its largest piece may be slower; of an op of `joint` whose parts take more work than
    others of their size, the rank that has the most.
    """
    found = {0} if joint is None else {0, *_busiest_ranks(assignment, mesh, joint)}
    for layouts in assignment.values():
        for layout in layouts.tensors:
            for axes, sizes, halo in zip(layout.dims, layout.sizes, layout.halos, strict=True):
                sizes = sizes if halo is None else halo.sizes
                if sizes is not None:
                    found.add(_rank_at(mesh, axes, sizes.index(max(sizes))))
    return tuple(sorted(found))


def _busiest_ranks(assignment: Assignment, mesh: MeshSpec, joint: JointGraph) -> Iterator[int]:
    for node, rule in rules_of(joint).items():
        for split in assignment[node.name].splits if rule.work else ():
            way = rule.splitting([split.factor])
            if split.factor in way.work:
                parts = split.parts(way.sizes[split.factor], mesh)
                work = [sum(way.work[split.factor](*part)) for part in parts]
                yield _rank_at(mesh, split.axes, work.index(max(work)))


def _rank_at(mesh: MeshSpec, axes: Axes, index: int) -> int:
    """The first rank whose place along `axes`, major to minor, is `index`."""
    return next(rank for rank in range(mesh.device_count) if mesh.linear_index(rank, axes) == index)
