"""What of a plan follows from its layouts: its ends, its records, and those of pieces of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoshard.plan.judged import Judged
from autoshard.plan.plan_memory import MemoryTimeline
from cost_model.deadline import Deadline
from passes.capture import Captured
from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.layout.layout import Layout
from passes.micro_batches.other_sizes import first_of_each_size, layouts_like
from passes.plan.decide import decide_lowering
from passes.plan.describe import describe
from passes.plan.records import NodeRecord
from passes.search.find import find_assignment
from passes.search.graph_ends import Boundary
from passes.states.compute_again import compute_again, copies_in
from passes.strategies.prices import Prices


def parameter_layouts(joint: JointGraph, assignment: Assignment, captured: Captured) -> dict[str, Layout]:
    """By every name that a parameter has."""
    layouts: dict[str, Layout] = {}
    for spec, node in zip(joint.inputs, joint.placeholders, strict=True):
        if spec.kind == "param":
            for name in (spec.name, *captured.aliases.get(spec.name, ())):
                layouts[name] = assignment[node.name].results[0]
    return layouts


def output_layouts(joint: JointGraph, assignment: Assignment) -> dict[int, Layout | None]:
    """None where an output is no tensor."""
    layouts = result_layouts(joint.results, assignment)
    ends = zip(joint.outputs, layouts, strict=True)
    return {spec.index: layout for spec, layout in ends if spec.kind == "output"}


def result_layouts(results: Iterable[fx.Node | None], assignment: Assignment) -> list[Layout | None]:
    """Of every result of a graph, by position."""
    ends = iter(assignment["output"].operands)
    return [None if result is None else next(ends) for result in results]


@dataclass(frozen=True)
class CallLayouts:
    """How a call's tensors are laid out: by position, the layout of inputs that are not global and
    of outputs that are not; None leaves an output to the search. free: outputs that are left to it even where they
    get no gradient."""

    inputs: Mapping[int, Layout]
    outputs: Mapping[int, Layout | None]
    free: frozenset[int] = frozenset()

    def settled(self, found: Mapping[int, Layout | None]) -> CallLayouts:
        """With the layouts that were found for what is free."""
        free = {i: layout for i, layout in found.items() if i in self.free}
        return CallLayouts(self.inputs, {**self.outputs, **free})


def program_fields(
    joint: JointGraph,
    judged: Judged,
    captured: Captured,
    inputs: Mapping[int, Layout],
    boundary: Callable[[JointGraph], Boundary],
    time_limit: float,
) -> dict[str, Any]:
    """Of a plan, by name: all that its layouts say of its program. joint: with what runs again. inputs: as the call has
    them. boundary, time_limit: as of `_other_sizes`."""
    assignment, prices, memory = judged.assignment, judged.prices, judged.memory
    return {
        "records": describe(joint, assignment, judged.lowering, judged.moved, prices),
        "parameter_layouts": parameter_layouts(joint, assignment, captured),
        "inputs": inputs,
        "outputs": output_layouts(joint, assignment),
        "other_sizes": _other_sizes(joint, assignment, prices, boundary, time_limit),
        "memory": None if memory is None else MemoryTimeline.of(memory),
    }


def _other_sizes(
    joint: JointGraph,
    assignment: Assignment,
    prices: Prices,
    boundary: Callable[[JointGraph], Boundary],
    time_limit: float,
) -> tuple[tuple[NodeRecord, ...], ...]:
    """Per size of pieces besides the first's, in order, the plan of the step with one of that size.

    assignment: of the first, whose ops that run again do so in all. time_limit: seconds. Raises InfeasibleError where
    its ends do not fit, and OutOfTime.
    """
    deadline = Deadline.after(time_limit)
    found: list[tuple[NodeRecord, ...]] = []
    again = copies_in(joint)
    graphs = joint, *joint.others
    for place in sorted(set(first_of_each_size(graphs)))[1:]:
        graph = compute_again(graphs[place], again)
        like = layouts_like(assignment, graph)
        held = find_assignment(graph, prices, boundary(graph), narrowing=like, deadline=deadline).assignment
        lowering, moved = decide_lowering(graph, held, prices)
        found.append(describe(graph, held, lowering, moved, prices))
    return tuple(found)
