"""How long a step of a plan will take: the program that runs, on a timeline of two streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from cost_model.mesh import MeshSpec
from cost_model.timeline import Timeline
from passes.ir.collector import collector_paused
from passes.ir.joint import CPU, JointGraph
from passes.layout.assignment import Assignment
from passes.lower.phases import Phases
from passes.lower.piecewise import split_pieces
from passes.lower.rank_program import Schedule, rank_program
from passes.plan.planned_graph import PlannedGraph
from passes.predict.memory_walk import memory_walk
from passes.predict.predict_pieces import predict_pieces
from passes.predict.prediction import PredictedCollective, PredictedPhase, Prediction
from passes.predict.step_events import Axes, AxesOf, StepEvents
from passes.predict.workspaces import workspaces_of
from passes.schedule.schedule import scheduled
from passes.simulate.lockstep import simulated_group_axes, simulated_groups
from passes.strategies.prices import Prices
from passes.strategies.traffic import eager_traffic

__all__ = [
    "PredictedCollective",
    "PredictedPhase",
    "Prediction",
    "predict_phases",
    "predicted_step",
    "slowest_ranks",
    "slowest_step",
]


@collector_paused()
def predicted_step(
    joint: JointGraph,
    planned: PlannedGraph,
    prices: Prices,
    *,
    schedule: Schedule | None = None,
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
        of_phases = lambda phases: predict_phases(phases, prices, simulated_group_axes)
        if joint.pieces > 1:
            parts = split_pieces(program)
            return predict_pieces(
                program,
                parts.joined() if eager else parts,
                joint.pieces,
                prices,
                of_phases,
                simulated_group_axes,
            )
        return of_phases((program.joined() if eager else program).usual())

    return slowest_step(of_rank(rank) for rank in slowest_ranks(planned.layouts, mesh))


def slowest_step(ranks: Iterable[Prediction]) -> Prediction:
    """The step of the slowest of the ranks, with the memory of the fullest."""
    found = list(ranks)
    fullest = max(found, key=lambda p: p.peak.nbytes)
    return replace(max(found, key=lambda p: p.seconds), memory=fullest.memory)


def predict_phases(phases: Phases, prices: Prices, axes_of: AxesOf) -> Prediction:
    """The step of the rank whose programs `phases` are, in the order of their nodes.

    axes_of: name of a process group in the graphs -> its mesh axes.
    """
    step = StepEvents(prices, axes_of)
    step.add_graph(phases.forward, "forward")
    if phases.backward is not None:
        step.add_graph(phases.backward.module, "backward")
        step.add_kernel("optimizer", _update_seconds(phases, prices), "optimizer")
    timeline = Timeline.of(step.events, prices.overlap_efficiency)
    late = {collective: timeline.events[wait].seconds for collective, wait in step.late.items()}
    collectives = tuple(
        PredictedCollective(
            issued.phase,
            issued.node,
            issued.serves,
            issued.kind,
            issued.axes,
            issued.nbytes,
            timeline.events[issued.event].seconds,
            timeline.start[issued.event],
            timeline.exposed[issued.event] + late.get(issued.event, 0.0),
            timeline.end[issued.event],
        )
        for issued in step.collectives
    )
    workspaces = workspaces_of(prices, axes_of)
    memory = memory_walk(phases, prices.traffic, prices.optimizer, workspaces, step.flows)
    return Prediction(timeline.seconds, tuple(_phases(step, timeline)), collectives, memory)


def slowest_ranks(assignment: Assignment, mesh: MeshSpec) -> tuple[int, ...]:
    """Ranks of which one is the slowest.

    Rank 0 has the largest shard of everything split in torch's sizes. For every split with sizes of
    its own, the rank that holds its largest piece may be slower.
    """
    found = {0}
    for layouts in assignment.values():
        for layout in (*layouts.operands, *layouts.results):
            for axes, sizes, halo in zip(layout.dims, layout.sizes, layout.halos, strict=True):
                sizes = sizes if halo is None else halo.sizes
                if sizes is not None:
                    found.add(_rank_at(mesh, axes, sizes.index(max(sizes))))
    return tuple(sorted(found))


def _rank_at(mesh: MeshSpec, axes: Axes, index: int) -> int:
    """The first rank whose place along `axes`, major to minor, is `index`."""
    return next(rank for rank in range(mesh.device_count) if mesh.linear_index(rank, axes) == index)


def _update_seconds(phases: Phases, prices: Prices) -> float:
    """Seconds of the optimizer's update of this rank's shards."""
    assert phases.backward is not None
    placeholders = [n for n in phases.forward.graph.nodes if n.op == "placeholder"]
    *_, output = phases.backward.module.graph.nodes
    seconds = 0.0
    for end, gradient in zip(phases.backward.gradients, output.args[0], strict=True):
        if gradient is not None and phases.inputs[end.index].kind == "param":
            value = placeholders[end.index].meta["val"]
            seconds += prices.optimizer_seconds(value.numel() * value.element_size())
    return seconds


def _phases(step: StepEvents, timeline: Timeline) -> Iterable[PredictedPhase]:
    """Where ranks are late the step is longer for communication, and not for kernels."""
    first, begun, waits = 0, 0.0, frozenset(step.late.values())
    for name, last in step.ends:
        members = range(first, last)
        late = sum(timeline.events[i].seconds for i in members if i in waits)
        compute = sum(timeline.events[i].seconds for i in members if timeline.events[i].stream == "compute")
        comm = sum(timeline.events[i].seconds for i in members if timeline.events[i].stream == "comm")
        end = max((timeline.end[i] for i in members), default=begun)
        exposed = sum(timeline.exposed[i] for i in members)
        yield PredictedPhase(name, end - begun, compute - late, comm, exposed + late)
        first, begun = last, end
