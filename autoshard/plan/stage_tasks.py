"""The planning task of one stage: its graph, on the ranks of a stage, beside what earlier stages decided.

And where a call's graph is cut into stages: ops are priced as if split evenly over a stage's ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from msgspec import structs
from torch import fx

import passes.ops.layer_ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::uniform)
from autoshard.plan.judged import judged, prices_as_in
from autoshard.plan.plan import Plan
from autoshard.plan.plan_ends import output_layouts, parameter_layouts
from autoshard.plan.task import CallLayouts, Task
from cost_model.errors import InfeasibleError
from cost_model.memory import format_bytes
from passes.ir.joint import JointGraph, node_values, repeats, results_nbytes, tensor_operands
from passes.ir.op_traits import is_view, op_signature
from passes.layout.layout import Assignment, Layout
from passes.plan.describe import graph_hash
from passes.predict.predict_step import StageFigures, kept_by_a_piece, predict_stage
from passes.predict.prediction import MemoryWalk
from passes.search.search_terms import Narrowing
from passes.stages.cut_costs import (
    ChosenCut,
    CutCosts,
    CutPlace,
    Fits,
    Segment,
    alike_places,
    choose_cut,
    cut_costs,
    narrow_places,
    places_between_products,
)
from passes.stages.stage_graph import StageGraph
from passes.states.compute_again import compute_again
from passes.strategies.prices import local_nbytes, local_work

_META = ("phase", "runs", "repeats")


def names_alike(one: JointGraph, two: JointGraph) -> dict[str, str] | None:
    """Name of every node of `one` -> of the node of `two` that does the same; None if they are not alike.

    Alike are graphs of the same ops, shapes and ends in the same order: names of parameters and lines of the model do
    not count, nor which random numbers are drawn, nor the number of a call under `torch.utils.checkpoint`.
    """
    ends = lambda joint: [(end.kind, end.index) for end in (*joint.inputs, *joint.outputs)]
    if len(one.graph.nodes) != len(two.graph.nodes) or ends(one) != ends(two):
        return None
    if _regions(one) != _regions(two):
        return None
    names: dict[str, str] = {}
    for mine, other in zip(one.graph.nodes, two.graph.nodes, strict=True):
        if not _alike(mine, other, names):
            return None
        names[mine.name] = other.name
    return names


def _regions(joint: JointGraph) -> list[int]:
    """Of every node the call under `torch.utils.checkpoint` that it is of, in the order in which they come."""
    found: dict[object, int] = {}
    return [found.setdefault(node.meta.get("checkpoint"), len(found)) for node in joint.graph.nodes]


def _alike(mine: fx.Node, other: fx.Node, names: dict[str, str]) -> bool:
    read = [names[node.name] for node in tensor_operands(mine)]
    if mine.op != other.op or read != [node.name for node in tensor_operands(other)]:
        return False
    if [mine.meta.get(key) for key in _META] != [other.meta.get(key) for key in _META]:
        return False
    if mine.op == "output":
        return [node is None for node in mine.args[0]] == [node is None for node in other.args[0]]  # type: ignore[union-attr]
    if mine.op == "placeholder":
        return _looks(mine) == _looks(other)
    if mine.target is torch.ops.autoshard.uniform.default:
        return mine.target == other.target and _looks(mine) == _looks(other)
    return op_signature(mine) == op_signature(other)


def _looks(node: fx.Node) -> list[object]:
    return [None if value is None else (value.shape, value.dtype) for value in node_values(node)]


def _plan_alike(first: Plan, task: Task, joint: JointGraph, assignment: Assignment) -> Plan:
    """What is proven of the first holds of it, where the ends of both graphs are the same."""
    found = judged(joint, assignment, prices_as_in(first, task.prices))
    return replace(
        first,
        memory_limit=task.memory_limit,
        step_time=found.seconds,
        peak_memory=found.peak.nbytes,
        peak_node=found.peak.node,
        origin=structs.replace(first.origin, graph_hash=graph_hash(task.joint)),
        again=task.again(),
        **task.program_fields(joint, found),
    )


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
        joint = compute_again(graph.joint, plan.planned.again)
        received = {crossing.name for crossing in graph.received}
        prices = prices_as_in(plan, task.prices)
        figures = predict_stage(joint, plan.planned, prices, received)
        return PlannedStage(graph, task, figures, plan.outputs, plan.parameter_layouts, joint, lambda: plan)

    def alike(self, graph: StageGraph, task: Task) -> PlannedStage | None:
        """Another stage with the plan of this one, which was searched; None if it computes something else."""
        first, names, joint = self.plan, names_alike(self.graph.joint, task.joint), task.joint
        if names is not None and first.planned.again:
            joint = compute_again(joint, [names[name] for name in first.planned.again])
            names = names_alike(self.runs, joint)
        if names is None:
            return None
        assignment = {names[name]: layouts for name, layouts in first.planned.layouts.items()}
        ends = output_layouts(joint, assignment), parameter_layouts(joint, assignment, task.captured)
        make = lambda: _plan_alike(first, task, joint, assignment)
        return PlannedStage(graph, task, self.figures, *ends, self.runs, make, like=self)

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
        narrowing=_of_ops(task.narrowing, names),
        beside=beside if flight > 1 else None,
        sizes=None,
    )


def _of_ops(narrowing: Narrowing, received: set[str]) -> Narrowing:
    """What is received has the name of the op that makes it, in another stage."""
    allowed = {name: choose for name, choose in narrowing.allowed.items() if name not in received}
    return replace(narrowing, allowed=allowed)


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
    results = {spec.index: node for spec, node in stage.graph.joint.returned if spec.kind == "output"}
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


_EVEN = 0.02
"""Share by which the longest stage may be longer than it must be, where stages are more even for that."""
_SHORTER = 0.2
"""Share by which the longest stage must be shorter for a cut at places where more passes."""


def transfer_price(task: Task, axis: str) -> Callable[[float], float]:
    """Bytes of one rank -> seconds in which all ranks of a stage send so much to the next."""
    prices = task.prices.redistributor
    return lambda nbytes: prices.collective_seconds("point_to_point", (axis,), math.ceil(nbytes))


@dataclass(frozen=True)
class StageCutter:
    """joint: of the call, in pieces. task: of the whole mesh, of which `axis` holds stages.

    An op's seconds are those of its share of operations and bytes, were it split evenly over the ranks of a stage:
    equal layers get equal seconds, whatever layouts each stage's search will choose, and the embedding and the head,
    which are uneven, are weighed against them. What stages communicate inside is not counted.
    """

    task: Task
    joint: JointGraph
    axis: str

    @cached_property
    def ranks(self) -> int:
        """Of one stage."""
        return self.task.mesh.device_count // self.task.mesh.size(self.axis)

    @cached_property
    def costs(self) -> CutCosts:
        return cut_costs(self.joint, self._op_seconds)

    @cached_property
    def places(self) -> tuple[CutPlace, ...]:
        return narrow_places(self.costs)

    def cut(self, stages: int, costs: CutCosts | None = None) -> ChosenCut:
        """At narrow places, and of those between equal layers, unless that makes the longest stage longer by more than
        `_EVEN`: stages that are alike are planned once. Between any two products, or anywhere, where that makes it
        shorter by `_SHORTER`, or there are too few. costs: in place of the estimated ones. Raises InfeasibleError."""
        try:
            return self._best(stages, costs or self.costs)
        except InfeasibleError as error:
            raise InfeasibleError(f"{self._asked()}: {error}") from None

    def _asked(self) -> str:
        """The arguments that a cut has to do with."""
        limit = self.task.memory_limit
        within = "" if limit is None else f", memory_limit={format_bytes(limit)}"
        return f"stages={self.axis!r}{within}"

    def _best(self, stages: int, costs: CutCosts) -> ChosenCut:
        best: ChosenCut | None = None
        for places in (self.places, places_between_products(self.costs), self.costs.places):
            enough = best is not None and best.gap <= _SHORTER
            if enough or (len(places) < stages - 1 and places is not self.costs.places):
                continue
            found = self._cut(stages, costs, places)
            if best is None or max(found.seconds) < (1.0 - _SHORTER) * max(best.seconds):
                best = found
        assert best is not None
        alike = self._cut_alike(stages, costs)
        even = alike is not None and max(alike.seconds) <= (1.0 + _EVEN) * max(best.seconds)
        return alike if alike is not None and even else best

    def _cut_alike(self, stages: int, costs: CutCosts) -> ChosenCut | None:
        places = alike_places(self.costs)
        if len(places) < stages - 1:
            return None
        with suppress(InfeasibleError):
            return self._cut(stages, costs, places)
        return None

    def _cut(self, stages: int, costs: CutCosts, places: Sequence[CutPlace]) -> ChosenCut:
        price = transfer_price(self.task, self.axis)
        return choose_cut(
            costs,
            stages,
            lambda nbytes: price(nbytes / self.ranks),
            within=_EVEN,
            places=places,
            fits=self._fits,
        )

    def learned(self, cut: Sequence[str], seconds: Sequence[float]) -> CutCosts:
        """The costs with which the stages of a cut take so many seconds for a piece, as their plans say: ops of one
        stage are all as much more expensive than estimated."""
        known = self.costs.seconds
        at = {place.op: place.position for place in self.costs.places}
        ends = [0, *(at[op] for op in cut), len(known) - 1]
        found = [0.0]
        for (start, stop), wanted in zip(itertools.pairwise(ends), seconds, strict=True):
            whole, base = known[stop] - known[start], found[-1]
            share = [(known[i] - known[start]) / whole if whole else 0.0 for i in range(start + 1, stop + 1)]
            found += [base + wanted * part for part in share]
        return replace(self.costs, seconds=tuple(found))

    def _op_seconds(self, node: fx.Node) -> float:
        if is_view(node):
            return 0.0
        prices = self.task.prices
        work = local_work(node, prices.flow(node))
        share = replace(
            work,
            flops=work.flops / self.ranks,
            nbytes=work.nbytes / self.ranks,
            stored=work.stored / self.ranks,
        )
        return repeats(node) / self.joint.pieces * prices.compute.work_seconds(share)

    @cached_property
    def _fits(self) -> Fits | None:
        """By what every plan of a stage holds: parameters, gradients and the optimizer's states, split over all."""
        limit = self.task.memory_limit
        if limit is None:
            return None
        room = limit - self.task.reserve((), None)
        trained, optimizer = self.joint.trained, self.task.prices.optimizer

        def held(node: fx.Node) -> int:
            nbytes = results_nbytes(node)
            size = node.meta["val"].element_size()
            return nbytes + (nbytes + optimizer.state_nbytes(nbytes, size) if node in trained else 0)

        of_parameter = {node: held(node) for node, spec in self.joint.given if spec.kind == "param"}

        known: dict[tuple[int, int], bool] = {}  # several cuts ask about the same segments

        def fits(segment: Segment) -> bool:
            ends = segment.start, segment.stop
            if ends not in known:
                known[ends] = sum(of_parameter.get(node, 0) for node in segment.held) / self.ranks <= room
            return known[ends]

        return fits
