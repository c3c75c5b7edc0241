"""Another kind of call on the layouts of the first, and on its stages: each reads what it holds already."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import fx

from autoshard.plan.judged import lowered
from autoshard.plan.micro_batches import most_pieces
from autoshard.plan.pins import parameter_shapes
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_stages import pipeline_plan
from autoshard.plan.stage_cut import StageCutter
from autoshard.plan.stage_schedule import orders_of
from autoshard.plan.stage_search import StageSearch
from autoshard.plan.task import Task, plan_of, search_plan
from autoshard.plan.task_prices import prices_as_in
from autoshard.plan.time_kept import out_of_time, search_until
from cost_model.deadline import Deadline, OutOfTime
from cost_model.errors import InfeasibleError
from passes.layout.layout import Layout
from passes.micro_batches.cut_batch import cut_for_stages
from passes.micro_batches.time_axis import trains
from passes.search.find import find_assignment
from passes.search.narrowing import Narrowing
from passes.stages.cut_costs import CutCosts
from passes.stages.pipeline_orders import ORDERS
from passes.states.compute_again import compute_again
from passes.states.offers import known_ops


def carried_stages(task: Task, first: PipelinePlan) -> PipelinePlan:
    """A plan for another call of the model that `first` plans, of the whole mesh: evaluation, or another batch.

    Every stage holds the parameters that it holds in `first`, in the layouts that they have there, and has its other
    layouts wherever they fit. A call that trains runs in as many pieces, or fewer if it has fewer samples. Nothing is
    proven of the cut. Raises InfeasibleError where the call needs a stage to hold more.
    """
    pieces = min(first.micro_batches, most_pieces(task.captured)) if trains(task.joint) else 1
    joint = cut_for_stages(task.joint, pieces, sizes_only=True)
    known = first.parameter_layouts
    # What no call has read so far is whole on all ranks.
    unread = {
        n: Layout.replicated(t.ndim) for n, t in parameter_shapes(task.captured).items() if n not in known
    }
    own = replace(task, pins={**unread, **known})
    costs = StageCutter(own, joint, first.axis).costs
    cut = cut_by_parameters(costs, [{*stage.parameter_layouts, *unread} for stage in first.stages], first.cut)

    def search(stage_task: Task, stage: int, until: Deadline) -> Plan:
        try:
            return carried_plan(stage_task, first.stages[stage])
        except InfeasibleError:
            return search_plan(stage_task, until)

    staged = StageSearch(own, first.axis, joint, cut, Deadline.after(task.time_limit), search)
    names = dict.fromkeys((first.schedule, *ORDERS))
    order = next(orders_of(first.ranks, joint.pieces, first.stages_per_rank, tuple(names)))
    found = staged.best([order])
    assert found is not None
    return pipeline_plan(own, first.axis, cut, None, *found)


def cut_by_parameters(costs: CutCosts, held: Sequence[Set[str]], before: Sequence[str]) -> tuple[str, ...]:
    """Of the cuts with which every stage reads only parameters that it holds, the one where the fewest bytes pass.

    held: per stage, the names. before: of cuts where as much passes, one at these ops. Raises InfeasibleError.
    """
    line = _Line.of(costs, held)
    names = set(before)
    weight = lambda place: (place.sent_nbytes + place.returned_nbytes, place.op not in names)
    best: dict[int, tuple[tuple[int, int], tuple[str, ...]]] = {0: ((0, 0), ())}
    for stage in range(len(held) - 1):
        found: dict[int, tuple[tuple[int, int], tuple[str, ...]]] = {}
        for place in costs.places:
            ways = [
                ((seconds[0] + weight(place)[0], seconds[1] + weight(place)[1]), (*ops, place.op))
                for start, (seconds, ops) in best.items()
                if start < place.position and line.reads_its_own(start, place.position, stage)
            ]
            if ways:
                found[place.position] = min(ways)
        best = found
    last = len(costs.parts.forward)
    ends = [way for start, way in best.items() if line.reads_its_own(start, last, len(held) - 1)]
    if not ends:
        raise line.refused(held)
    return min(ends)[1]


@dataclass(frozen=True)
class _Line:
    """missing: per stage and position, how many reads of parameters that the stage lacks stand before it."""

    costs: CutCosts
    missing: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(costs: CutCosts, held: Sequence[Set[str]]) -> _Line:
        rows: list[tuple[int, ...]] = []
        for own in held:
            lacks = [0] * len(costs.parts.forward)
            for node, places in _parameters(costs).items():
                for place in () if node in own else places:
                    lacks[place] += 1
            rows.append(tuple(itertools.accumulate(lacks, initial=0)))
        return _Line(costs, tuple(rows))

    def reads_its_own(self, start: int, stop: int, stage: int) -> bool:
        return self.missing[stage][stop] == self.missing[stage][start]

    def refused(self, held: Sequence[Set[str]]) -> InfeasibleError:
        """With the first read that no stage in order can do."""
        stage, start = 0, 0
        forward = self.costs.parts.forward
        while stage < len(held):
            stop = start
            while stop < len(forward) and self.reads_its_own(stop, stop + 1, stage):
                stop += 1
            if stop == len(forward):
                break
            start, stage = stop, stage + 1
        names = [n for n, places in _parameters(self.costs).items() if start in places]
        node = forward[min(start, len(forward) - 1)]
        return InfeasibleError(
            f"this kind of call cannot run on the stages of the first: {' and '.join(names) or 'a parameter'}, read at "
            f"{node.name}{_where(node)}, would have to be held by a later stage than the one that holds it\n"
            "  try: a call that runs the layers in the order of the first, or stages=None"
        )


def _parameters(costs: CutCosts) -> Mapping[str, frozenset[int]]:
    """Name -> positions of the forward that read it."""
    specs = costs.parts.specs
    at = costs.forward.holders.items()
    return {specs[node].name: places for node, places in at if specs[node].kind == "param"}


def _where(node: fx.Node) -> str:
    return f" ({node.meta['module']})" if node.meta.get("module") else ""


def carried_plan(task: Task, first: Plan) -> Plan:
    """A plan for another call of the model that `first` plans, with its layouts wherever they fit: no search.

    Where a node has no counterpart in `first`, it is searched. Nothing is proven of the result, and its step is not
    simulated: `step_time` is the objective's. Raises InfeasibleError if the layouts do not fit.
    """
    prices = prices_as_in(first, task.prices)
    joint = compute_again(task.joint, known_ops(task.joint, first.lowering.again))
    try:
        found = find_assignment(
            joint,
            prices,
            task.boundary,
            memory_limit=task.memory_limit,
            reserve=0 if task.memory_limit is None else first.reserve,
            deadline=search_until(task.joint, Deadline.after(task.time_limit)),
            narrowing=Narrowing(held=first.assignment),
        )
    except OutOfTime:
        raise out_of_time(task.mesh, task.time_limit) from None
    unproven = replace(found, lower_bound=0.0, gap=1.0, status="feasible")
    return plan_of(task, unproven, lowered(joint, found.assignment, prices), None)
