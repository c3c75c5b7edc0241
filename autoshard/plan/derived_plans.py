"""Plans made of another one: carried over to another kind of call, or with its step as it was rehearsed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from msgspec import structs
from torch import fx

from autoshard.plan.infeasible import out_of_time
from autoshard.plan.judged import Judged, judged, prices_as_in
from autoshard.plan.micro_batches import most_pieces
from autoshard.plan.plan import PipelinePlan, Plan, of_stages
from autoshard.plan.plan_content import Rehearsed, pace_of
from autoshard.plan.plan_ends import parameter_shapes
from autoshard.plan.plan_stages import pipeline_plan
from autoshard.plan.stage_schedule import Scheduled, SchedulePrices, orders_of
from autoshard.plan.stage_search import StageSearch
from autoshard.plan.stage_tasks import StageCutter
from autoshard.plan.task import Task, plan_of, search_plan
from cost_model.deadline import Deadline, OutOfTime
from cost_model.errors import InfeasibleError
from passes.layout.layout import Assignment, Layout
from passes.micro_batches.cut_batch import cut_for_stages
from passes.plan.decide import decide
from passes.plan.planned_graph import NodeRecord, OperandRecord
from passes.search.find import Sought, find_assignment
from passes.search.search_terms import Narrowing
from passes.stages.cut_costs import CutCosts
from passes.stages.pipeline_orders import ORDERS
from passes.states.compute_again import compute_again
from passes.states.offers import known_ops
from passes.strategies.prices import Prices


def carried_stages(task: Task, first: PipelinePlan) -> PipelinePlan:
    """A plan for another call of the model that `first` plans, of the whole mesh: evaluation, or another batch.

    Every stage holds the parameters that it holds in `first`, in the layouts that they have there, and has its other
    layouts wherever they fit. A call that trains runs in as many pieces, or fewer if it has fewer samples. Nothing is
    proven of the cut. Raises InfeasibleError where the call needs a stage to hold more.
    """
    pieces = min(first.micro_batches, most_pieces(task.captured)) if task.joint.trains else 1
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


def carried_plan(task: Task, first: Plan, *, judge: bool = False) -> Plan:
    """A plan for another call of the model that `first` plans, with its layouts wherever they fit: no search.

    Where a node has no counterpart in `first`, it is searched. Nothing is proven of the result. judge: its step is put
    on the timeline; without, `step_time` is the objective's. Raises InfeasibleError if the layouts do not fit.
    """
    prices = prices_as_in(first, task.prices)
    reserve = 0 if task.memory_limit is None else first.reserve
    return plan_holding(task, first.planned.layouts, prices, first.planned.again, reserve, judge=judge)


def plan_holding(
    task: Task,
    layouts: Assignment,
    prices: Prices,
    again: Sequence[str] = (),
    reserve: int = 0,
    *,
    judge: bool = False,
) -> Plan:
    """With layouts of the nodes of a graph like this one; `carried_plan` says how. again: what is computed again."""
    joint = compute_again(task.joint, known_ops(task.joint, again))
    try:
        asked = Sought(joint, prices, task.boundary, task.memory_limit, reserve, Narrowing(held=layouts))
        found = find_assignment(asked, task.searching(Deadline.after(task.time_limit)))
    except OutOfTime:
        raise out_of_time(task.mesh, task.time_limit) from None
    unproven = replace(found, lower_bound=0.0, gap=1.0, status="feasible")
    if not judge:
        return plan_of(task, unproven, Judged(decide(joint, found.assignment, prices), prices, None), None)
    there = judged(joint, found.assignment, prices)
    peak = {"peak_nbytes": there.peak.nbytes, "peak_node": there.peak.node}
    return plan_of(task, replace(unproven, **peak), there, task.again())


def rehearsed_plan(plan: Plan, measured: float, busy: float | None = None) -> Plan:
    """`plan` with its step as measured, and all its other seconds as many times as long as modelled.

    One step says that the model is off, and not of what: every price counts alike (`cost_model.profile`), so the
    plan stays the best, its bound a bound, and what its own questions find is as much slower. measured: seconds of a
    step. busy: of stages, as of `Rehearsed`: it tells what they compute from what they wait for (`measured_schedule`).
    """
    modelled = plan.step_time if plan.rehearsed is None else plan.rehearsed.modelled
    step = Rehearsed(modelled, measured, busy)
    factor = measured / plan.step_time
    if not plan.axis:
        return replace(_longer(plan, factor, pace_of(step)), step_time=measured, rehearsed=step)
    prices = measured_schedule(plan.scheduled, measured, busy)
    computed = sum(one.forward for one in prices.stages) / sum(
        one.forward for one in plan.scheduled.prices.stages
    )
    pace = computed * pace_of(plan.rehearsed)
    passed = zip(prices.stages, (*prices.sent, 0.0), (*prices.returned, 0.0), strict=True)
    parts = tuple(
        structs.replace(
            part, figures=figures, sent=sent, returned=returned, plan=_longer(part.plan, computed, pace)
        )
        for part, (figures, sent, returned) in zip(plan.parts, passed, strict=True)
    )
    again = None if plan.again is None else plan.again.paced(pace)
    longer = replace(plan, parts=parts, rehearsed=step, again=again)
    return replace(longer, **of_stages(**vars(longer)))


def _longer(plan: Plan, factor: float, pace: float) -> Plan:
    return replace(
        plan,
        cost=factor * plan.cost,
        lower_bound=factor * plan.lower_bound,
        step_time=factor * plan.step_time,
        ran=tuple(part.scaled(factor) for part in plan.ran),
        records=_records(plan.records, factor),
        other_sizes=tuple(_records(records, factor) for records in plan.other_sizes),
        again=None if plan.again is None else plan.again.paced(pace),
    )


def _records(records: Sequence[NodeRecord], factor: float) -> tuple[NodeRecord, ...]:
    return tuple(
        structs.replace(
            record,
            seconds=factor * record.seconds,
            operands=tuple(_operand(operand, factor) for operand in record.operands),
        )
        for record in records
    )


def _operand(operand: OperandRecord, factor: float) -> OperandRecord:
    transfers = tuple(structs.replace(one, seconds=factor * one.seconds) for one in operand.transfers)
    return structs.replace(operand, transfers=transfers)


_TIMES = ("forward", "backward", "input", "weight", "before", "after", "update")


def measured_schedule(planned: Scheduled, seconds: float, busy: float | None) -> SchedulePrices:
    """seconds: of a step. busy: the share of all ranks' time in which they compute; None: as it is planned.

    What ranks compute takes as many times as long as they were busy, and what passes between stages as many times as
    long as makes the step: whatever holds up a piece between two stages, waiting for a core included, is a transfer to
    the stage that waits for it.
    """
    if busy is None:
        return _stretched(planned, seconds)
    whole = seconds * len(planned.order.ranks)
    computed = busy * whole / sum(planned.timeline.busy)
    passing = _passing(planned, computed, seconds)
    return _stretched(_priced(planned, computed, passing), seconds)


def _stretched(one: Scheduled, seconds: float) -> SchedulePrices:
    """All alike, until a step takes so many seconds."""
    factor = seconds / one.seconds
    return _times(one.prices, factor, factor)


def _passing(planned: Scheduled, computed: float, seconds: float) -> float:
    """How many times as long transfers take, if anything that they take makes a step of so many seconds."""
    low, high = 0.0, 1.0
    longest = seconds / max(min((*planned.prices.sent, *planned.prices.returned), default=0.0), 1e-9)
    while _priced(planned, computed, high).seconds < seconds:
        if high > longest:
            return 1.0
        low, high = high, 2.0 * high
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _priced(planned, computed, middle).seconds < seconds else (low, middle)
    return high


def _priced(planned: Scheduled, computed: float, passing: float) -> Scheduled:
    return Scheduled(planned.order, _times(planned.prices, computed, passing))


def _times(prices: SchedulePrices, computed: float, passing: float) -> SchedulePrices:
    stages = tuple(
        structs.replace(stage, **{name: computed * getattr(stage, name) for name in _TIMES})
        for stage in prices.stages
    )
    sent, returned = (tuple(passing * seconds for seconds in one) for one in (prices.sent, prices.returned))
    return SchedulePrices(stages, sent, returned)
