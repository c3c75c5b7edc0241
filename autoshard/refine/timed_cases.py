"""The cases of a plan that are timed: its distinct kernels and collectives, and a few known ones again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from autoshard.plan.families import Family
from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.task import Task
from cost_model.errors import log
from cost_model.mesh import MeshSpec, simulated_group_axes, simulated_groups
from cost_model.timed import KernelKey, TimedPrices
from passes.ir.joint import CPU
from passes.lower.phases import Phases
from passes.lower.piecewise import split_pieces
from passes.lower.rank_program import RankProgram, rank_program
from passes.plan.planned_graph import PlannedGraph
from passes.predict.predict_program import alone
from passes.predict.step_work import CollectiveCase, KernelCase, step_work

STEPS_WORTH, MOST_SHARE, LEAST_SECONDS = 200, 0.25, 5.0
"""Refining may take so many predicted steps, and this share of the time limit; less than the seconds is not
begun. What a faster plan saves must be worth the wait: training has many times as many steps, a test has not."""


def is_worth_it(step_seconds: float) -> bool:
    """Whether steps take so long that what is learned of them matters."""
    return STEPS_WORTH * step_seconds >= LEAST_SECONDS


def refining_seconds(step_seconds: float, time_limit: float, nodes: int, backend: str = "eager") -> float:
    """The budget for a plan of that step, of a graph of so many nodes and for that backend; 0: not worth it."""
    # It may take at most so long for a graph without nodes, and for each node: searching and timing take as
    # long as there is to search and to time, whatever a busy machine predicts of a step.
    most = 8.0 + 0.04 * nodes
    seconds = min(STEPS_WORTH * step_seconds, MOST_SHARE * time_limit, most)
    # More for programs that are compiled: the fused groups that are timed are, each in half a second on two
    # cores.
    compiling = 0.0 if backend == "eager" else 2.0
    return seconds + compiling if seconds >= LEAST_SECONDS else 0.0


def other_ways(collectives: Iterable[CollectiveCase], mesh: MeshSpec) -> list[CollectiveCase]:
    """All-reduces of as many bytes as some of `collectives`, that those do not have: over the axes of two together, and
    over each axis of one. What takes longest comes first. seconds: of what each would take the place of."""
    known = [case for case in collectives if case.kind == "all_reduce"]
    have = {(case.axes, case.nbytes) for case in known}
    found: dict[tuple[tuple[str, ...], int], CollectiveCase] = {}
    for case in (*_at_once(known, mesh), *_one_by_one(known)):
        if (case.axes, case.nbytes) not in have:
            found.setdefault((case.axes, case.nbytes), case)
    return sorted(found.values(), key=lambda case: -case.seconds)


def _at_once(known: Iterable[CollectiveCase], mesh: MeshSpec) -> Iterator[CollectiveCase]:
    """Over the axes of two that follow each other, as equal sizes say that they do."""
    for one, other in combinations(known, 2):
        if one.nbytes == other.nbytes and not set(one.axes) & set(other.axes):
            axes = tuple(axis for axis in mesh.names if axis in (*one.axes, *other.axes))
            yield CollectiveCase(one.kind, axes, one.nbytes, one.seconds + other.seconds)


def _one_by_one(known: Iterable[CollectiveCase]) -> Iterator[CollectiveCase]:
    """Over each of several axes."""
    for case in known:
        if len(case.axes) > 1:
            yield from (CollectiveCase(case.kind, (axis,), case.nbytes, case.seconds) for axis in case.axes)


Case = KernelCase | CollectiveCase

AGAIN = 3
"""Kernels that are known and timed again: by them what was timed before is compared with what is timed now."""


@dataclass(frozen=True)
class TimedCandidate:
    """A plan of which kernels and collectives are timed."""

    seconds: float
    planned: PlannedGraph
    family: Family | None = None

    @staticmethod
    def of(plan: Plan, family: Family | None = None) -> TimedCandidate:
        return TimedCandidate(plan.step_time, plan.planned, family)


@dataclass(frozen=True)
class Cases:
    """unknown: what is not timed, what takes most of the step first. again: a few kernels that are. instead:
    collectives of other ways to the same layouts, that are not timed (`autoshard.refine.timed_cases`)."""

    unknown: Sequence[Case]
    again: tuple[Case, ...] = ()
    instead: tuple[CollectiveCase, ...] = ()

    @property
    def unknown_seconds(self) -> float:
        return sum(case.seconds for case in self.unknown)

    def untried(self, tried: set[object]) -> tuple[Case, ...]:
        """Those of `unknown`, each once, that are not among `tried`, which they join, behind `again`; (): there are
        none."""
        known: dict[object, Case] = {}
        for case in self.unknown:
            known.setdefault(distinct(case), case)
        new = tuple(case for mark, case in known.items() if mark not in tried)
        tried.update(known)
        return (*self.again, *new) if new else ()


def cases_of(candidate: TimedCandidate, task: Task) -> Cases:
    """Of rank 0, whose shards are the largest, by what `task.timed` knows. No fused kernels again: to compile them
    takes longer than to time them."""
    joint, mesh, prices = replace(task.joint, device=CPU), task.mesh, task.prices
    program = rank_program(joint, candidate.planned, mesh, 0, simulated_groups(mesh))
    works = [step_work(phases, prices, simulated_group_axes) for phases in _phases(program, joint.pieces)]
    kernels, collectives = (
        [case for one in of for case in one]
        for of in zip(*((w.kernels, w.collectives) for w in works), strict=True)
    )
    known = {kernel.key for kernel in task.timed.kernels} if task.timed else set[KernelKey]()
    # Collectives are few and their prices the furthest off; kernels are timed from this share of a step on.
    worth = 5e-4 * candidate.seconds
    new = (case for case in kernels if case.seconds >= worth and case.key not in known)
    untimed = lambda case: prices.collective_priced(case.kind, case.axes, case.nbytes) != "timed"
    longest = sorted(kernels, key=lambda case: -case.seconds)
    again = {case.key: case for case in longest if case.key in known and not case.fused}
    unknown = sorted([*new, *filter(untimed, collectives)], key=lambda case: -case.seconds)
    instead = filter(untimed, other_ways(collectives, mesh))
    return Cases(unknown, tuple(again.values())[:AGAIN], tuple(instead))


def _phases(program: RankProgram, pieces: int) -> list[Phases]:
    """What runs, once or for each piece."""
    if pieces == 1:
        return [program.usual()]
    parts = split_pieces(program)
    return [alone(parts.before), parts.piece.usual(), alone(parts.after)]


def with_times(before: TimedPrices, times: TimedPrices) -> TimedPrices:
    """All that is known. Where the machine's clock, or what ran beside it, has changed since, what was timed before
    takes as much longer as what was timed again: a search compares the one with the other."""
    change = before.change_to(times)
    if change != 1.0:
        log.info("refine: kernels take %.2f times as long as when they were timed before", change)
        before = before.kernels_times(change)
    return before.joined(times)


def distinct(case: Case) -> object:
    return case.key if isinstance(case, KernelCase) else (case.kind, case.axes, case.nbytes)


def cases_of_parts(plan: Plan, task: Task) -> Cases:
    """What `task.timed` does not know, each once, what takes most of a piece first; again: of the first part. task: of
    the whole call."""
    parts = [cases_of(_piece(plan, part), own) for part, own in _parts(plan, task)]
    found: dict[object, Case] = {}
    for case in chain.from_iterable(cases.unknown for cases in parts):
        found.setdefault(distinct(case), case)
    instead = chain.from_iterable(cases.instead for cases in parts)
    return Cases((*sorted(found.values(), key=lambda case: -case.seconds), *instead), parts[0].again)


def _piece(plan: Plan, part: Plan) -> TimedCandidate:
    """Most of what a part runs, it runs once for each piece."""
    return TimedCandidate(plan.step_time / plan.micro_batches, part.planned)


def _parts(plan: Plan, task: Task) -> Iterator[tuple[Plan, Task]]:
    """Each stage, or the whole, with its task."""
    captured = task.captured
    if not isinstance(plan, PipelinePlan):
        yield plan, replace(task, captured=cut_call(captured, plan.micro_batches, plan.head_pieces))
        return
    for stage, graph in zip(plan.stages, plan.stage_graphs(captured.joint), strict=True):
        own = replace(captured, joint=graph.joint)
        yield stage, replace(task, captured=own, mesh=stage.mesh, links=task.mesh)
