"""Is a plan whole? Everything in it refers to something in it, fits its mesh and its shapes, and has a price."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.plan.plan_content import Part, PlanContent
from cost_model.errors import InfeasibleError
from cost_model.mesh import MeshSpec
from passes.layout.layout import JoinedAxes, Layout, joining_problems, keeps_together
from passes.plan.planned_graph import NodeRecord, OperandRecord, ResultRecord, Turn
from passes.redistribution.steps import Step
from passes.redistribution.universe import step_problems
from passes.schedule.overlap import NO_TURN
from passes.stages.pipeline_orders import pipeline_order

_FIELD = re.compile(r"\{(\d{1,6})\}")


def plan_problems(plan: PlanContent) -> Iterator[str]:
    """What is wrong with a plan as it was read, in sentences; nothing if it is whole. Only the shapes' own sizes are
    not of it: whether it is of a certain model is for `Plan.check_graph`."""
    yield from _prices(plan)
    unknown = list(joining_problems(plan.joined_axes, plan.mesh))
    yield from unknown
    yield from _nodes(plan.records, plan.mesh, () if unknown else plan.joined_axes)
    yield from turn_problems(plan.records)
    yield from _ends(plan)
    yield from _memory(plan)
    yield from _timeline(plan)
    for records in plan.other_sizes:
        for problem in plan_problems(replace(plan, records=records, other_sizes=())):
            yield f"micro-batches of another size: {problem}"


def _prices(plan: PlanContent) -> Iterator[str]:
    prices = [("cost", plan.cost), ("lower_bound", plan.lower_bound), ("step", plan.step_time)]
    prices += [(record.name, record.seconds) for record in plan.records]
    prices += [(r.name, t.seconds) for r in plan.records for o in r.operands for t in o.transfers]
    for name, seconds in prices:
        if not 0.0 <= seconds < math.inf:
            yield f"the price of {name} is {seconds} seconds; a price is finite and not negative"
        elif seconds > 1e30:
            yield f"the price of {name} is {seconds:.3g} seconds, which nothing takes"


def _nodes(records: Sequence[NodeRecord], mesh: MeshSpec, joined: JoinedAxes) -> Iterator[str]:
    known: dict[str, NodeRecord] = {}
    ways = Ways(mesh, joined)
    for record in records:
        if record.name in known:
            yield f"two nodes are called {record.name}"
        for problem in (*_node(record, known, mesh, ways), *_apart(record, joined)):
            yield f"node {record.name}: {problem}"
        known[record.name] = record
    if [record.name for record in records if record.op == "output"] != ["output"]:
        yield "there is not one node `output`"
    elif records[-1].op != "output":
        yield "the node `output` is not the last"


def _node(record: NodeRecord, known: Mapping[str, NodeRecord], mesh: MeshSpec, ways: Ways) -> Iterator[str]:
    plain = record.text.replace("{{", "").replace("}}", "")
    indices = [int(index) for index in _FIELD.findall(plain)]
    if re.search(r"[{}]", _FIELD.sub("", plain)) or any(index >= len(record.operands) for index in indices):
        yield f"its text {record.text!r} does not fit {len(record.operands)} operands"
    if record.op == "use" and len(record.operands) != 1:
        yield f"a use has one operand, and it has {len(record.operands)}"
    if not record.results and record.op != "output":
        yield "it has no result"
    if len(record.ends) not in (0, len(record.operands)) or (record.ends and record.op != "output"):
        yield f"it names {len(record.ends)} ends, and has {len(record.operands)} operands"
    for result in record.results:
        yield from _fits(result.layout, result.shape, mesh)
    for operand in record.operands:
        source = known.get(operand.source)
        if source is None or operand.result >= len(source.results):
            yield f"it reads result {operand.result} of {operand.source}, which is no node before it"
            continue
        value = source.results[operand.result]
        unfit = list(_fits(operand.layout, value.shape, mesh))
        # A source that fits nothing has been said already.
        fits = not unfit and not any(_fits(value.layout, value.shape, mesh))
        yield from unfit if unfit else ways.problems(operand, value) if fits else ()
    for split in record.splits:
        yield from _axes(split.axes, mesh)
        if split.spans is not None and len(split.spans) != math.prod(_sizes(split.axes, mesh)):
            yield f"factor {split.factor} has {len(split.spans)} spans over {split.axes}"
        if any(low > high for low, high in split.spans or ()):
            yield f"a span of factor {split.factor} ends before it begins"


def _apart(record: NodeRecord, joined: JoinedAxes) -> Iterator[str]:
    """Layouts that use joined axes apart."""
    layouts = [value.layout for value in (*record.operands, *record.results)]
    layouts += [transfer.after for operand in record.operands for transfer in operand.transfers]
    for run in joined:
        for one, two in itertools.pairwise(run):
            for layout in layouts:
                if not keeps_together(layout, one, two):
                    yield f"{layout} uses the axes {one} and {two} apart, which are joined"
                    return


def _fits(layout: Layout, shape: Sequence[int], mesh: MeshSpec) -> Iterator[str]:
    if len(layout.dims) != len(shape):
        yield f"a layout of {len(layout.dims)} dims for a tensor of {len(shape)}"
        return
    if math.prod(max(1, length) for length in shape) > 2**50:
        yield f"a tensor of shape {tuple(shape)}, which nothing holds"
    unknown = list(_axes(layout.axes, mesh))
    yield from unknown
    if unknown:
        return
    for dim, length in enumerate(shape):
        parts = math.prod(_sizes(layout.dims[dim], mesh))
        sizes, halo = layout.sizes[dim], layout.halos[dim]
        if sizes is not None and (len(sizes) != parts or sum(sizes) != length):
            yield f"sizes {list(sizes)[:8]} of a dim of {length} in {parts} parts"
        if halo is not None and (len(halo.spans) != parts or not all(_within(s, length) for s in halo.spans)):
            yield f"spans {[list(s) for s in halo.spans[:4]]} of a dim of {length} in {parts} parts"


def _within(span: tuple[int, int], length: int) -> bool:
    """A periodic window reads at most once around, before and after."""
    low, high = span
    return -length <= low <= high <= 2 * length


def _axes(axes: Sequence[str], mesh: MeshSpec) -> Iterator[str]:
    for axis in axes:
        if axis not in mesh.names:
            yield f"the mesh has no axis {axis!r}"


def _sizes(axes: Sequence[str], mesh: MeshSpec) -> list[int]:
    return [mesh.size(axis) for axis in axes if axis in mesh.names]


def _ends(plan: PlanContent) -> Iterator[str]:
    """Layouts of parameters, inputs and outputs are those of the nodes that they stand for."""
    held = {r.parameter: r.results[0] for r in plan.records if r.op == "param" and r.results}
    for name, layout in plan.parameter_layouts.items():
        result = held.get(name)
        unknown = list(_axes(layout.axes, plan.mesh))
        yield from (f"parameter {name}: {problem}" for problem in unknown)
        if not unknown and result is not None:
            yield from (f"parameter {name}: {problem}" for problem in _fits(layout, result.shape, plan.mesh))
    for kind, layouts in (("input", plan.inputs), ("output", plan.outputs)):
        for position, layout in layouts.items():
            if layout is not None:
                yield from (f"{kind} {position}: {problem}" for problem in _axes(layout.axes, plan.mesh))
    ends = [o.layout for record in plan.records if record.op == "output" for o in record.operands]
    for position, layout in plan.outputs.items():
        if layout is not None and layout not in ends:
            yield f"output {position} has a layout that no result of the graph is left in"


def _memory(plan: PlanContent) -> Iterator[str]:
    """The timeline is the peak's, and what it names adds up to it."""
    memory = plan.memory
    if memory is None:
        return
    places = [step.place for step in memory.steps]
    if places != sorted(set(places)) or places[-1] >= memory.count:
        yield f"the steps of its memory are not in order, or beyond {memory.count}"
    if memory.peak.nbytes != plan.peak_memory:
        yield f"its memory is at most {memory.peak.nbytes} bytes, and its peak {plan.peak_memory}"
    for kind, nbytes in memory.by_kind.items():
        named = sum(row.nbytes for row in memory.at_peak if row.kind == kind)
        if named != nbytes:
            yield f"what is alive at its peak has {named} bytes of kind {kind}, and the peak {nbytes}"


def _timeline(plan: PlanContent) -> Iterator[str]:
    for part in plan.ran:
        spans = [(one.start, one.end) for one in (*part.kernels, *part.moved)]
        if any(not start <= end <= part.seconds * (1.0 + 1e-6) for start, end in spans):
            yield "what its timeline says ends before it begins, or beyond its part"
        if part.times not in (1, plan.micro_batches):
            yield f"a part of its timeline runs {part.times} times, and a batch in {plan.micro_batches} pieces"


def pipeline_problems(
    *,
    mesh: MeshSpec,
    axis: str,
    schedule: str,
    micro_batches: int,
    cut: Sequence[str],
    parts: Sequence[Part],
    **_others: Any,
) -> Iterator[str]:
    """What is wrong with a plan with stages, its stages' own plans aside."""
    if axis not in mesh.names:
        yield f"its stages are along {axis!r}, and {mesh} has no such axis"
        return
    count, ranks = len(parts), mesh.size(axis)
    if not count or count % ranks:
        yield f"it has {count} stages for {ranks} ranks"
        return
    if len(cut) != count - 1:
        yield f"it is cut at {len(cut)} places into {count} stages"
    if count * micro_batches > 10_000_000:
        yield f"{micro_batches} micro-batches on {count} stages, which nothing runs"
        return
    try:
        pipeline_order(schedule, ranks, micro_batches, stages_per_rank=count // ranks)
    except InfeasibleError as error:
        yield str(error).partition("\n")[0]
    returned = [position for part in parts for position in part.returns]
    if len(set(returned)) != len(returned):
        yield "two of its stages return one output of the call"


def stage_problems(parts: Sequence[Part], mesh: MeshSpec, micro_batches: int) -> Iterator[str]:
    """Where stages on the ranks of `mesh` each do not belong together."""
    layouts: dict[str, Layout] = {}
    for number, part in enumerate(parts):
        stage: PlanContent = part.plan
        if stage.mesh != mesh:
            yield f"stage {number} is planned for {stage.mesh}, and not for {mesh}"
        if any(place not in stage.outputs for place in range(len(part.returns))):
            yield f"stage {number} does not have the outputs that it returns"
        if stage.micro_batches != micro_batches:
            yield f"stage {number} runs {stage.micro_batches} micro-batches, and not {micro_batches}"
        for name, layout in stage.parameter_layouts.items():
            if layouts.setdefault(name, layout) != layout:
                yield f"parameter {name} has two layouts, {layouts[name]} and {layout}"


@dataclass(frozen=True)
class Ways:
    """Ways from layout to layout on a mesh, axes `joined` moved together; layers repeat, so each is looked at once."""

    mesh: MeshSpec
    joined: JoinedAxes
    seen: dict[tuple[Layout, Layout, tuple[Step, ...], tuple[int, ...]], tuple[str, ...]] = field(
        default_factory=dict
    )

    def problems(self, operand: OperandRecord, value: ResultRecord) -> Sequence[str]:
        """What is wrong with the transfers of `operand`, which reads `value`; both layouts fit the mesh."""
        if bool(operand.transfers) != (operand.turn is not None):
            count = len(operand.transfers)
            return [f"it reads {operand.source} through {count} steps, with turn {operand.turn}"]
        if operand.starts and not _starts_in_time(operand):
            return [
                f"it reads {operand.source} in turn {operand.turn}, with collectives from {operand.starts}"
            ]
        try:
            steps = operand.steps(value.layout)
        except ValueError as error:
            return [str(error)]
        unknown = [axis for step in steps for axis in step.axes if axis not in self.mesh.names]
        if unknown:
            return [f"the mesh has no axis {unknown[0]!r}"]
        key = (value.layout, operand.layout, steps, value.shape)
        if key not in self.seen:
            self.seen[key] = tuple(step_problems(*key, self.mesh, self.joined))
        return self.seen[key]


def turn_problems(records: Sequence[NodeRecord]) -> Iterator[str]:
    """Transfers that communicate, with a turn that is not after those of all transfers that their operand is computed
    from: the members of a bucket, too, may not wait for one another. What a rank cuts from its own part waits in no
    turn."""
    latest: dict[str, Turn] = {}
    for record in records:
        mine = NO_TURN
        for operand in record.operands:
            before = latest[operand.source]
            if operand.turn is not None and operand.turn <= before and _communicates(operand):
                yield (
                    f"node {record.name}: it reads {operand.source} in turn {operand.turn}, and that is computed from "
                    f"what comes in turn {before}"
                )
            mine = max(mine, before, operand.turn or NO_TURN)
        latest[record.name] = mine


def _starts_in_time(operand: OperandRecord) -> bool:
    """Whether all collectives but the last have a place, one before the next, and room for one in flight."""
    moving = sum(transfer.step.kind is not None for transfer in operand.transfers)
    places = [*(place for place, _ in operand.starts), operand.turn[1] if operand.turn else -1]
    rising = all(before < after for before, after in itertools.pairwise(places))
    return rising and len(places) == moving and all(most > 0 for _, most in operand.starts)


def _communicates(operand: OperandRecord) -> bool:
    return any(transfer.step.kind for transfer in operand.transfers)
