"""How long one rank's program takes, on a timeline of two streams, and what it holds: of a step that runs whole, or in
pieces of the batch, every piece as long as the largest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from msgspec import structs
from torch import fx

from cost_model.timeline import Timeline
from passes.ir.joint import GraphInput, GraphOutput, results_nbytes
from passes.lower.phases import Phases
from passes.lower.piecewise import RankPieces
from passes.lower.rank_program import RankProgram
from passes.predict.memory_walk import held_values, live_value, memory_walk, placeholders_of, program_values
from passes.predict.prediction import (
    START,
    Kernel,
    LiveValue,
    MemoryWalk,
    Moved,
    PredictedPhase,
    Prediction,
    TimelinePart,
)
from passes.predict.step_events import AxesOf, PredictedCollective, StepEvents
from passes.predict.workspaces import workspaces_of
from passes.strategies.prices import Prices

Trained = dict[int, fx.Node]
"""Placeholders of parameters with a gradient, by position."""


def predict_phases(phases: Phases, prices: Prices, axes_of: AxesOf) -> Prediction:
    """The step of the rank whose programs `phases` are, in the order of their nodes.

    axes_of: name of a process group in the graphs -> its mesh axes.
    """
    step = StepEvents(prices, axes_of)
    step.add_graph(phases.forward, "forward")
    if phases.backward is not None:
        step.add_graph(phases.backward.module, "backward")
        trained = _trained(phases.forward, phases.inputs, phases.backward.gradients, phases.backward.module)
        step.add_kernel("optimizer", update_seconds(trained, prices), "optimizer")
    timeline = Timeline.of(step.events, prices.overlap_efficiency)
    late = {collective: timeline.events[wait].seconds for collective, wait in step.late.items()}
    collectives = tuple(
        replace(
            one, start=timeline.start[i], exposed=timeline.exposed[i] + late.get(i, 0.0), end=timeline.end[i]
        )
        for i, one in step.collectives.items()
    )
    workspaces = workspaces_of(prices, axes_of)
    memory = memory_walk(phases, prices.traffic, prices.optimizer, workspaces, step.flows)
    kernels = (
        Kernel(phase, timeline.events[i].name, of, timeline.start[i], timeline.end[i])  # type: ignore[arg-type]
        for i, phase, of in step.kernels
    )
    part = TimelinePart(1, timeline.seconds, tuple(kernels), tuple(map(Moved.of, collectives)))
    return Prediction(timeline.seconds, tuple(_phases(step, timeline)), collectives, memory, (part,))


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


def predict_pieces(
    program: RankProgram, parts: RankPieces, count: int, prices: Prices, axes_of: AxesOf
) -> Prediction:
    """The step of the rank whose program of the largest of `count` pieces `program` is, cut into `parts`.

    Its forward is what runs before the pieces and the forward of all, its backward that of all and what runs after.
    axes_of: as of `predict_phases`. Collectives of pieces are told once, where the first piece has them; their seconds
    are of one, `times` says of how many.
    """
    piece = parts.piece.complete()
    programs = alone(parts.before), piece, alone(parts.after)
    before, middle, after = (predict_phases(phases, prices, axes_of) for phases in programs)
    trained = trained_by(program)
    first, *others = (phase for phase in middle.phases if phase.name != "optimizer")
    piece_seconds = sum(phase.seconds for phase in (first, *others))
    parts_of_step = [
        *before.timeline,
        *(
            structs.replace(part.without("optimizer"), times=count, seconds=piece_seconds)
            for part in middle.timeline
        ),
        *(part.in_phase("backward") for part in after.timeline),
    ]
    phases = [
        _sum("forward", (before.phases[0], 1), (first, count)),
        _sum("backward", *((phase, count) for phase in others), (after.phases[0], 1)),
    ]
    if trained:
        update = update_seconds(trained, prices)
        phases.append(PredictedPhase("optimizer", update, update, 0.0, 0.0))
        kernel = Kernel("optimizer", "optimizer", "", 0.0, update)
        parts_of_step.append(TimelinePart(1, update, (kernel,), ()))
    moved = (
        *before.collectives,
        *_later(middle.collectives, before.seconds, None, times=count),
        *_later(after.collectives, before.seconds + count * piece_seconds, "backward"),
    )
    return Prediction(
        sum(phase.seconds for phase in phases),
        tuple(phases),
        moved,
        _walk(program, parts, piece, prices, axes_of),
        tuple(parts_of_step),
    )


def alone(module: fx.GraphModule) -> Phases:
    """A program without a backward."""
    return Phases(module, (), (), None)


def _sum(name: str, *phases: tuple[PredictedPhase, int]) -> PredictedPhase:
    total = lambda value: sum(times * value(phase) for phase, times in phases)
    return PredictedPhase(
        name,
        total(lambda p: p.seconds),
        total(lambda p: p.compute),
        total(lambda p: p.communication),
        total(lambda p: p.exposed),
    )


def _later(
    collectives: Sequence[PredictedCollective], seconds: float, phase: str | None, times: int = 1
) -> tuple[PredictedCollective, ...]:
    return tuple(
        replace(c, start=c.start + seconds, end=c.end + seconds, phase=phase or c.phase, times=times)
        for c in collectives
    )


def trained_by(program: RankProgram) -> Trained:
    """The parameters that a program makes gradients of."""
    module = program.local.module
    return _trained(module, program.inputs, program.outputs, module)


def _trained(
    given: fx.GraphModule, inputs: Sequence[GraphInput], ends: Sequence[GraphOutput], made: fx.GraphModule
) -> Trained:
    """Of those that are `given`; `ends` are the results of `made`."""
    results = made.graph.output_node().args[0]
    nodes = {
        place: node
        for place, (spec, node) in enumerate(zip(inputs, placeholders_of(given), strict=True))
        if spec.kind == "param"
    }
    return {
        end.index: nodes[end.index]
        for end, result in zip(ends, results, strict=True)  # type: ignore[arg-type]
        if end.kind == "grad" and result is not None and end.index in nodes
    }


def update_seconds(trained: Trained, prices: Prices) -> float:
    """Of the optimizer's update of this rank's shards."""
    return sum(prices.optimizer_seconds(results_nbytes(node)) for node in trained.values())


def _walk(
    program: RankProgram, parts: RankPieces, piece: Phases, prices: Prices, axes_of: AxesOf
) -> MemoryWalk:
    """What the pieces leave is there from the first on, beside what one piece makes; so is what was made before."""
    steps, values = [START], list[LiveValue]()
    begins: list[int] = []
    workspaces = workspaces_of(prices, axes_of)
    for phases, name in (
        (alone(parts.before), "forward"),
        (piece, "forward"),
        (alone(parts.after), "backward"),
    ):
        begins.append(len(steps))
        more, made = program_values(phases, prices.traffic, len(steps), name, workspaces=workspaces)
        steps += more
        values += made
    last, piecewise = len(steps) - 1, begins[1]
    given = zip(placeholders_of(program.local.module), program.inputs, strict=True)
    values += held_values(given, trained_by(program).keys(), prices.optimizer, last)
    values = [*_without_parts(parts, values), *_whole_tangents(program, parts, last)]
    for node in parts.before.graph.output_node().all_input_nodes:
        values.append(live_value((node, 0), "moved", "", piecewise, last))
    # What a stage of a pipeline sends is not left behind.
    names = {program.local.values[one.name] for one in parts.left if one.how != "own"}
    for node in program.local.module.graph.nodes:
        if node.name in names:
            values.append(live_value((node, 0), "gradients", "", piecewise, last))
    return MemoryWalk(tuple(steps), tuple(values))


def _without_parts(parts: RankPieces, values: Sequence[LiveValue]) -> list[LiveValue]:
    """A piece looks at its part of a gradient that is there as a whole."""
    pairs = zip(parts.given, parts.piece.inputs, strict=True)
    seen = {end.name for one, end in pairs if end.kind == "tangent" and one.part is not None}
    return [value for value in values if value.kind != "inputs" or value.name not in seen]


def _whole_tangents(program: RankProgram, parts: RankPieces, last: int) -> Iterator[LiveValue]:
    """Gradients of outputs, which are there throughout; those that a stage receives are of a piece alone."""
    received = {one.source for one in parts.given if one.part is None}
    for node, end in zip(placeholders_of(program.local.module), program.inputs, strict=True):
        if end.kind == "tangent" and node.users and node.name not in received:
            yield live_value((node, 0), "inputs", end.name, 0, last)
