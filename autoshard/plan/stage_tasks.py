"""The planning task of one stage: its graph, on the ranks of a stage, beside what earlier stages decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.plan.equal_stages import AlikeStage
from autoshard.plan.plan import Plan
from autoshard.plan.task import CallLayouts, Task
from autoshard.plan.task_prices import prices_as_in
from passes.ir.joint import JointGraph
from passes.layout.layout import Layout
from passes.predict.memory_record import MemoryWalk
from passes.predict.predict_stage import StageFigures, kept_by_a_piece, predict_stage
from passes.stages.stage_graph import StageGraph
from passes.states.compute_again import compute_again
from passes.strategies.prices import local_nbytes


@dataclass(frozen=True)
class PlannedStage:
    """A stage's graph, its task, what it takes, and its plan. outputs, parameter_layouts: of that. runs: its graph with
    what is computed again, of the one that was searched. make: the plan, once it is asked for. like: the stage whose
    plan it has; None: it was searched."""

    graph: StageGraph
    task: Task
    figures: StageFigures
    outputs: Mapping[int, Layout | None]
    parameter_layouts: Mapping[str, Layout]
    runs: JointGraph
    make: Callable[[], Plan]
    like: PlannedStage | None = None

    @staticmethod
    def of(graph: StageGraph, task: Task, plan: Plan) -> PlannedStage:
        joint = compute_again(graph.joint, plan.lowering.again)
        received = {crossing.name for crossing in graph.received}
        prices = prices_as_in(plan, task.prices)
        figures = predict_stage(joint, plan.assignment, plan.lowering, prices, received)
        return PlannedStage(graph, task, figures, plan.outputs, plan.parameter_layouts, joint, lambda: plan)

    def alike(self, graph: StageGraph, task: Task) -> PlannedStage | None:
        """Another stage with the plan of this one, which was searched; None if it computes something else."""
        found = AlikeStage.of(task, self.plan, self.graph.joint, self.runs)
        if found is None:
            return None
        ends = found.outputs, found.parameter_layouts
        return PlannedStage(graph, task, self.figures, *ends, self.runs, found.plan, like=self)

    @cached_property
    def plan(self) -> Plan:
        return self.make()

    def needs(self, flight: int) -> int:
        """Bytes per device, with so many pieces in flight."""
        return self.figures.peak + (flight - 1) * self.figures.kept + self.plan.reserve

    @property
    def sent_layouts(self) -> list[Layout]:
        own = len(self.graph.outputs)
        layouts = [self.outputs[own + i] for i in range(len(self.graph.sent))]
        assert None not in layouts
        return [layout for layout in layouts if layout is not None]


def stage_task(
    task: Task, axis: str, graph: StageGraph, earlier: Sequence[PlannedStage], flight: int = 1
) -> Task:
    """task: of the call on the whole mesh. earlier: the stages before, in order. flight: pieces that it keeps at once.

    What it receives comes in the layouts in which the stage before sends it; a parameter that an earlier stage holds
    has the layout that it has there.
    """
    names = {crossing.name for crossing in graph.received}

    def beside(memory: MemoryWalk | None) -> int:
        return 0 if memory is None else (flight - 1) * kept_by_a_piece(memory, names)

    return replace(
        task,
        captured=replace(task.captured, joint=replace(graph.joint, in_flight=flight)),
        mesh=task.mesh.resized(axis, 1),
        links=task.mesh,
        call=_call(task.call, graph, earlier[-1].sent_layouts if earlier else ()),
        pins={**task.pins, **_held_before(graph.joint, earlier)},
        beside=beside if flight > 1 else None,
    )


def sending(task: Task, graph: StageGraph, layouts: Sequence[Layout]) -> Task:
    """With what the stage sends in these layouts."""
    sent = dict(enumerate(layouts, len(graph.outputs)))
    call = replace(task.call, outputs={**task.call.outputs, **sent}, free=task.call.free - sent.keys())
    return replace(task, call=call)


def sending_as_received(task: Task, graph: StageGraph) -> Task:
    """With what the stage sends in the layouts in which it receives, if it receives the like."""
    looks = lambda crossings: [(one.shape, one.dtype, one.gradient, one.value) for one in crossings]
    if looks(graph.received) != looks(graph.sent):
        return task
    first = len(graph.inputs)
    return sending(task, graph, [task.call.inputs[first + i] for i in range(len(graph.received))])


def sent_nbytes(stage: PlannedStage) -> tuple[int, int]:
    """Bytes that one rank sends for a piece: to the stage after, and what comes back of it."""
    mesh = stage.task.mesh
    found = [0, 0]
    own = len(stage.graph.outputs)
    results = {
        spec.index: node
        for spec, node in zip(stage.graph.joint.outputs, stage.graph.joint.results, strict=True)
        if spec.kind == "output"
    }
    for index, (crossing, layout) in enumerate(zip(stage.graph.sent, stage.sent_layouts, strict=True), own):
        node = results[index]
        assert node is not None
        nbytes = local_nbytes(layout, node, 0, mesh)
        found[0] += nbytes * crossing.value
        found[1] += nbytes * crossing.gradient
    return found[0], found[1]


def _call(call: CallLayouts, graph: StageGraph, received: Sequence[Layout]) -> CallLayouts:
    inputs = {i: call.inputs[place] for i, place in enumerate(graph.inputs) if place in call.inputs}
    inputs.update(enumerate(received, len(graph.inputs)))
    outputs: dict[int, Layout | None] = {
        i: call.outputs[place] for i, place in enumerate(graph.outputs) if place in call.outputs
    }
    sent = range(len(graph.outputs), len(graph.outputs) + len(graph.sent))
    outputs.update(dict.fromkeys(sent))
    return CallLayouts(inputs, outputs, free=frozenset(sent))


def _held_before(joint: JointGraph, earlier: Sequence[PlannedStage]) -> Mapping[str, Layout]:
    own = {spec.name for spec in joint.inputs if spec.kind == "param"}
    return {
        name: layout
        for stage in reversed(earlier)
        for name, layout in stage.parameter_layouts.items()
        if name in own
    }
