"""The plan of a call whose mesh has an axis that holds stages: where to cut, each stage's plan, and their schedule.

The cut balances estimates (`stage_cut`); stages are planned in their order, each receiving what the one before sends in
the layouts in which it is sent. Then every schedule is put on one timeline, and the fastest that fits the memory limit
is kept (`stage_search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoshard.plan.answer import Answer
from autoshard.plan.judged import plan_reserve
from autoshard.plan.plan import PipelinePlan
from autoshard.plan.plan_content import Part, PlanOrigin
from autoshard.plan.stage_schedule import Scheduled, orders_of
from autoshard.plan.stage_search import WORTH, StageSearch
from autoshard.plan.stage_tasks import PlannedStage, StageCutter
from autoshard.plan.task import Task
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError, ShardingError
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.micro_batches.cut_batch import cut_for_stages
from passes.stages.pipeline_orders import ORDERS, PipelineOrder, pipeline_order

_STAGES_PER_RANK = (1, 2, 4)
"""Stages a rank that are tried: more make the bubble smaller, and send more often. Several only where as many cuts pass
no more than their neighbours: between layers, and not inside of one."""


def plan_stages(
    task: Task,
    axis: str,
    pieces: int,
    deadline: Deadline | None = None,
    schedule: str | None = None,
    stages_per_rank: int | None = None,
) -> PipelinePlan:
    """The fastest plan of `task`, of the whole call on the whole mesh, with stages along `axis`, in `pieces` pieces.

    schedule: the only one that may run it; None: the fastest. stages_per_rank: likewise. A call that trains nothing
    runs forward alone, whole.
    Raises ShardingError for an axis that cannot hold stages, InfeasibleError where the batch or the graph cannot be
    cut, or a stage does not fit.
    """
    check_stages(task.mesh, axis)
    _check_layouts(task, axis)
    _check_states(task.joint)
    until = deadline or Deadline.after(task.time_limit)
    joint = cut_for_stages(task.joint, pieces, sizes_only=True)
    cutter = StageCutter(task, joint, axis)
    names = _names(schedule, task.joint.trains)
    ranks = task.mesh.size(axis)
    best: PipelinePlan | None = None
    reason: InfeasibleError | None = None
    is_cut_well = lambda count: len(cutter.places) >= count * ranks - 1
    for count in (stages_per_rank,) if stages_per_rank else _counts(names, is_cut_well):
        orders = list(orders_of(ranks, joint.pieces, count, names))
        enough = best is not None and best.gap <= WORTH
        ended = until.left <= 0.0 and (best is not None or reason is not None)
        if not orders or enough or ended or (best is not None and not is_cut_well(count)):
            continue
        try:
            best = _fastest_cut(cutter, orders, until, best)
        except InfeasibleError as error:
            reason = reason or error
    if best is not None:
        return best
    if reason is None:
        pipeline_order(names[0], ranks, joint.pieces, stages_per_rank=stages_per_rank or 1)  # says why not
        raise AssertionError("a schedule runs, and none was tried")
    raise reason


def _fastest_cut(
    cutter: StageCutter, orders: Sequence[PipelineOrder], until: Deadline, best: PipelinePlan | None
) -> PipelinePlan | None:
    """The fastest plan of the cut by estimates, of the cut by what the stages of that one take, and of `best`."""
    chosen = cutter.cut(orders[0].stages)
    tried: set[tuple[str, ...]] = set()
    # Cuts into as many stages that are planned: one by estimates, one by what its stages take.
    while chosen.cut not in tried and len(tried) < 2 and (best is None or until.left > 0.0):
        tried.add(chosen.cut)
        search = StageSearch(
            cutter.task, cutter.axis, cutter.joint, chosen.cut, until if best is None else until.firm
        )
        found = search.best(orders, math.inf if best is None else best.step_time)
        if found is not None:
            best = pipeline_plan(cutter.task, cutter.axis, chosen.cut, chosen.gap, *found)
            until.tell(Answer.of(best))
        seconds = [stage.figures.of_piece(cutter.joint.pieces) for stage in search.free]
        if max(seconds) > (1.0 + WORTH) * sum(seconds) / len(seconds):
            chosen = cutter.cut(orders[0].stages, cutter.learned(chosen.cut, seconds))
    return best


def _counts(names: Sequence[str], is_cut_well: Callable[[int], bool]) -> Sequence[int]:
    """Interleaving is of several stages a rank: with one it is 1F1B with more in flight, and is tried after them."""
    if tuple(names) != ("interleaved",):
        return _STAGES_PER_RANK
    return sorted(_STAGES_PER_RANK, key=lambda count: count == 1 or not is_cut_well(count))


def _names(schedule: str | None, training: bool) -> Sequence[str]:
    if schedule is not None:
        return (schedule,)
    return tuple(ORDERS) if training else ("gpipe",)


def check_stages(mesh: MeshSpec, axis: str) -> None:
    """ShardingError unless `axis` may hold stages."""
    if axis not in mesh.names:
        raise ShardingError(
            f"stages is {axis!r}, and {mesh} has no such axis\n"
            f"  try: one of its axes, {', '.join(map(repr, mesh.names))}"
        )
    if mesh.size(axis) == 1:
        others = " or ".join(map(repr, mesh.real_axes())) or "a mesh with more devices along it"
        raise ShardingError(
            f"stages is {axis!r}, which has one device on {mesh}: that would be one stage\n"
            f"  try: {others}, or stages=None"
        )


def _check_states(joint: JointGraph) -> None:
    """InfeasibleError where the forward changes a parameter that is not trained: only the ranks whose stage reads a
    parameter hold it, and one stage may make the new value of what another reads."""
    ends = [end for end in joint.outputs if end.kind == "buffer" and joint.inputs[end.index].kind == "param"]
    if ends:
        raise InfeasibleError(
            f"stages: forward changes parameter {ends[0].name} in place, and not every stage has it\n"
            "  try: stages=None, or keep the value in a buffer (register_buffer)"
        )


def _check_layouts(task: Task, axis: str) -> None:
    """ShardingError for what is asked to be split over the stages."""
    used = [(f"parameter {name} (constraints)", layout) for name, layout in task.pins.items()]
    used += [(f"input {i} (in_placements)", layout) for i, layout in task.call.inputs.items()]
    used += [(f"output {i} (out_placements)", layout) for i, layout in task.call.outputs.items() if layout]
    for what, layout in used:
        if axis in layout.axes:
            raise ShardingError(
                f"{what} is split over {axis!r}, which holds stages\n"
                f"  try: Replicate() along {axis!r}, or stages along another axis"
            )


def pipeline_plan(
    task: Task,
    axis: str,
    cut: tuple[str, ...],
    bound_of_cut: float | None,
    scheduled: Scheduled,
    stages: Sequence[PlannedStage],
) -> PipelinePlan:
    """What was found, put together."""
    order, prices = scheduled.order, scheduled.prices
    passed = zip((*prices.sent, 0.0), (*prices.returned, 0.0), strict=True)
    parts = tuple(
        Part(stage.graph.inputs, stage.graph.outputs, figures, *seconds, stage.plan)
        for stage, figures, seconds in zip(stages, prices.stages, passed, strict=True)
    )
    return PipelinePlan.of(
        mesh=task.mesh,
        axis=axis,
        schedule=order.name,
        micro_batches=order.pieces,
        cut=cut,
        parts=parts,
        memory_limit=task.memory_limit,
        reserve=plan_reserve(task.mesh, ()),
        bound_of_cut=bound_of_cut,
        inputs=task.call.inputs,
        origin=PlanOrigin.of(task.profile, task.joint, task.optimizer, task.timed),
        again=task.again(),
    )
