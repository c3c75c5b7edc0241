"""The call of a plan at other sizes: its graph, its planning task, and what the plan's layouts are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autoshard.global_call import GlobalCall
from autoshard.plan.crossovers import checked_range
from autoshard.plan.derived_plans import carried_plan, carried_stages
from autoshard.plan.families import Ranges
from autoshard.plan.micro_batches import cut_call, most_pieces
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_ends import CallLayouts
from autoshard.plan.plan_fits import check_limit
from autoshard.plan.task import Task
from cost_model.errors import CaptureError, InfeasibleError, PlanError, log, reject
from cost_model.mesh import MeshSpec
from passes.canonicalize.mark_rows import with_routing
from passes.capture import Captured
from passes.capture.call import CallKey, flatten_call
from passes.capture.decomposed_places import laid
from passes.capture.trees import unflatten
from passes.ir.routing import Routing
from passes.ir.size_names import check_size_names, resized_shapes
from passes.layout.layout import Layout
from passes.plan.describe import graph_hash

Capture = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Captured]
"""Captures a call of the model, canonical, as the first was captured: with gradients, autocast and device as then."""
Ends = Callable[[Captured, Mapping[int, Layout]], CallLayouts]
"""Of a captured call, given the layouts of its inputs."""
Shapes = tuple[tuple[int, ...], ...]
_TRY = "\n  try: "


@dataclass(frozen=True)
class OtherSizes:
    """key: of the global call, whose tensors are not kept; layouts: of those of which ranks hold shards. first: its
    graph. ends: of a call that was captured. ranges: at whose ends a plan fits the memory limit
    too; {}: none is asked."""

    model: nn.Module
    mesh: MeshSpec
    key: CallKey
    layouts: Mapping[int, Layout]
    first: Captured
    capture: Capture
    ends: Ends
    ranges: Ranges
    known: dict[Shapes, Captured] = field(default_factory=dict[Shapes, Captured])

    @staticmethod
    def of(
        model: nn.Module,
        mesh: MeshSpec,
        given: GlobalCall,
        first: Captured,
        capture: Capture,
        ends: Ends,
        ranges: Ranges,
    ) -> OtherSizes:
        """ShardingError for a size that the call does not have."""
        key = flatten_call(given.args, given.kwargs)[1]
        found = OtherSizes(model, mesh, key, given.layouts, first, capture, ends, ranges)
        resized_shapes(found.shapes, found.largest)
        return found

    @property
    def shapes(self) -> Shapes:
        """Of the call's tensors, as they were."""
        return tuple(tensor.shape for tensor in self.key.tensors)

    @property
    def largest(self) -> dict[str, int]:
        return {name: last for name, (_, last) in self.ranges.items()}

    def task(self, task: Task, sizes: Mapping[str, int]) -> Task:
        """The same of a call of these sizes, in as many pieces, or fewer where there are fewer samples.

        ShardingError for sizes that the call does not have, CaptureError where the model does not take them, PlanError
        where it is no longer as it was."""
        return _cut(self._whole(task, sizes), task.joint.pieces, task.joint.head_pieces)

    def plan(self, task: Task, plan: Plan, sizes: Mapping[str, int], routing: Routing | None = None) -> Plan:
        """What `plan` is at these sizes: its layouts, and what it computes again. No limit is asked; nothing is proven
        of it. routing: of rows to experts; None: as it was."""
        there = self._whole(replace(task, memory_limit=None), sizes)
        if routing is not None:
            captured = there.captured
            there = replace(there, captured=replace(captured, joint=with_routing(captured.joint, routing)))
        if isinstance(plan, PipelinePlan):
            return carried_stages(there, plan)
        return carried_plan(_cut(there, plan.micro_batches, plan.head_pieces), plan, judge=True)

    def _whole(self, task: Task, sizes: Mapping[str, int]) -> Task:
        shapes = resized_shapes(self.shapes, sizes)
        captured = self._captured(shapes)
        lay = lambda i, layout: Layout.of(shapes[i], self.mesh, layout.dims, layout.partial)
        layouts = {i: lay(i, layout) for i, layout in self.layouts.items()}
        return replace(task, captured=captured, call=self.ends(captured, layouts))

    def _captured(self, shapes: Shapes) -> Captured:
        if not self.known:
            own = self._capture(self.shapes)
            if graph_hash(own.joint) != graph_hash(self.first.joint):
                raise PlanError(
                    "the model, its training flags, gradient mode or autocast are not as when the plan was found\n"
                    "  try: ask the plan of a new find_plan(...), or ask as it was then"
                )
            self.known[self.shapes] = own
        if shapes not in self.known:
            # Graphs of other sizes that are kept, for the next question.
            if len(self.known) >= 16:
                self.known.pop(list(self.known)[1])
            try:
                self.known[shapes] = self._capture(shapes)
            except CaptureError as error:
                said = ", ".join(map(str, map(tuple, shapes)))
                raise CaptureError(
                    f"at other sizes the call's tensors would be {said}, which the model does not take\n"
                    f"  {str(error).partition(_TRY)[0]}{_TRY}sizes without the name of a dim that weights fix"
                ) from error
        return self.known[shapes]

    def _capture(self, shapes: Shapes) -> Captured:
        pairs = zip(self.key.tensors, shapes, strict=True)
        tensors = [
            laid(shape, lies, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)
            for tensor, shape in pairs
            for lies in [None if isinstance(tensor.lies, tuple) else tensor.lies]  # strides are of one size
        ]
        args, kwargs = unflatten(self.key.tree, tensors)
        return self.capture(self.model, args, kwargs)


def _cut(task: Task, pieces: int, head_pieces: int) -> Task:
    """Of a whole call, in so many pieces, or fewer where there are fewer samples."""
    pieces = min(pieces, most_pieces(task.captured))
    return replace(task, captured=cut_call(task.captured, pieces, head_pieces))


def checked_sizes(sizes: Any) -> Ranges:
    """None: no sizes. ShardingError for anything else than ranges by name."""
    if sizes is None:
        return {}
    if not isinstance(sizes, Mapping):
        raise reject("sizes", sizes, "{'sequence': (1, 8192)}, the least and the largest size, or None")
    check_size_names(sizes, "sizes")
    return {name: checked_range(name, ends) for name, ends in sizes.items()}


def asks_larger(task: Task) -> bool:
    """Whether a plan of the task fits the limit only if it does at other sizes too."""
    return task.memory_limit is not None and task.sizes is not None and bool(task.sizes.largest)


def check_larger(task: Task, plan: Plan) -> None:
    """InfeasibleError unless it fits the limit at the largest sizes too, where the task asks for that."""
    if asks_larger(task):
        others = task.sizes
        assert others is not None
        check_limit(others.plan(task, plan, others.largest), task.memory_limit, _said(others.largest))


def fits_larger(task: Task, plan: Plan) -> bool:
    try:
        check_larger(task, plan)
    except InfeasibleError:
        return False
    return True


def fitting_larger(task: Task, plan: Plan, search: Callable[[Task], Plan]) -> Plan:
    """`plan` of the task, if it fits the limit at the largest sizes too; else that of the plan that is found there.
    Raises InfeasibleError where none fits there. search: of a whole call."""
    if fits_larger(task, plan):
        return plan
    others = task.sizes
    assert others is not None
    said = _said(others.largest)
    log.info("plan: the fastest does not fit %s; searched there", said)
    try:
        found = search(others.task(task, others.largest))
    except InfeasibleError as error:
        raise InfeasibleError(f"{said}: {error}") from None
    return replace(others.plan(task, found, {}), memory_limit=task.memory_limit)


def _said(sizes: Mapping[str, int]) -> str:
    return "at " + ", ".join(f"{name} {size}" for name, size in sizes.items())
