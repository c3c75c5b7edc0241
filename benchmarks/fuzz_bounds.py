"""Bounds that plans and errors print, against programs: none may lie under a bound.

    python -m benchmarks.fuzz_bounds                       # 2,000 cases; hours
    python -m benchmarks.fuzz_bounds --cases 20 --seed 7

Small models, meshes, prices and limits are drawn at random. Each is planned without a limit, within limits, pinned and
as families, its plan is changed, and layouts are drawn at random. Every program that any of this put on the timeline
is held against what any of it printed: of bytes, what "any plan needs" and limits that no plan fits; of seconds, what
the search counts for no plan less than. Limits that an error says would do are planned within. Prints a row for each
kind of bound, and how near the nearest programs are. Exits with 1 if anything is under a bound.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch

from autoshard import InfeasibleError, Plan
from autoshard.plan import task as planning
from autoshard.plan.division import Division
from autoshard.plan.families import FAMILIES
from autoshard.plan.family_choices import family_narrowing
from autoshard.plan.judged import Judged
from autoshard.plan.plan_ends import parameter_shapes
from autoshard.plan.task import Task, search_plan
from benchmarks.rivals.changes import changes, choice_of
from benchmarks.rivals.tiny import tiny_task
from cost_model.deadline import Deadline
from cost_model.errors import ShardingError
from passes.layout.layout import Layout
from passes.search.find import Found, Sought
from passes.search.judged_choice import counted_seconds
from passes.search.search_space import SearchSpace
from passes.search.search_terms import Narrowing
from passes.search.strategy_space import SpaceBuilder

__all__ = ["NEEDS", "Examined", "examined"]

SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.25)
"""Limits, as shares of the peak without one; several are drawn."""
ROUNDING = 1e-6
"""Share by which what is computed may be under a bound."""


@dataclass(frozen=True)
class Program:
    """How it was found; seconds of its step; bytes at its peak, and with its reserve; if it has the case's pins."""

    found: str
    seconds: float
    peak: int
    needs: int
    pinned: bool


NEEDS, NONE, COUNTED, TIMED = "any plan needs", "no plan fits", "seconds, as counted", "seconds, of programs"
DO = "limits that would do"


@dataclass(frozen=True)
class Held:
    """A bound, and the nearest of what it is of. kind: of what."""

    kind: str
    bound: float
    nearest: float
    found: str

    @property
    def is_under(self) -> bool:
        """Bytes are compared to the last."""
        return self.nearest < self.bound * (1.0 - ROUNDING * (self.kind in (COUNTED, TIMED)))


@dataclass
class Examined:
    """bytes_: bounds, each with whether it is of programs with the case's pins alone. held: all, held against these."""

    title: str
    programs: list[Program] = field(default_factory=list)
    bytes_: list[tuple[str, float, bool]] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    @property
    def under(self) -> list[Held]:
        """Bounds that do not hold."""
        return [one for one in self.held if one.is_under]

    def close(self) -> Examined:
        """With what the bounds of bytes are held against."""
        for kind, bound, pinned in dict.fromkeys(self.bytes_):
            of = [p for p in self.programs if p.pinned or not pinned]
            nbytes = lambda p, kind=kind: p.peak if kind == NEEDS else p.needs
            nearest = min(of, key=nbytes)
            self.held.append(Held(kind, bound, nbytes(nearest), nearest.found))
        return self


@mock.patch("time.monotonic", time.process_time)
def examined(number: int, drawings: int = 6, limit: float = 60.0) -> Examined:
    """All of one case. drawings: layouts that are drawn at random, and changes of its plan. limit: seconds of each
    search, of processor time: that other work takes the rest says nothing of bounds."""
    title, task, pieces = tiny_task(number)
    task = replace(task, time_limit=limit)
    generator, found = random.Random(-1 - number), Examined(title)
    case = _Case(task, pieces, generator, found)
    plan = case.planned("the plan", None)
    assert plan is not None
    room = plan.reserve + int(generator.choice(SHARES) * plan.peak_memory)
    within = case.planned(f"within {room}", room)
    bounds = [plan.lower_bound]
    bounds += [] if within is None or within.head_pieces > 1 else [within.lower_bound]
    if generator.random() < 0.5:
        case.pinned(plan.reserve + int(generator.choice(SHARES) * plan.peak_memory))
    else:
        case.family()
    if pieces == 1:
        case.counted(bounds, plan, drawings)
        # Of more pieces programs are of one.
        fastest = min(found.programs, key=lambda one: one.seconds)
        found.held.append(Held(TIMED, plan.lower_bound, fastest.seconds, fastest.found))
    return found.close()


@dataclass
class _Case:
    task: Task
    pieces: int
    generator: random.Random
    examined: Examined
    wholes: list[Found] = field(default_factory=list)

    def planned(
        self, how: str, limit: int | None, task: Task | None = None, pinned: bool = False
    ) -> Plan | None:
        """Within a limit; all programs on the way, and what an error says."""
        task = replace(task or self.task, memory_limit=limit)
        search = lambda one, until: search_plan(one, until, lambda judged: self.add(how, judged, one, pinned))
        with mock.patch.object(planning, "find_fastest", self.noted()):
            try:
                plan = Division(self.pieces).fastest(task, Deadline.after(task.time_limit), search)
            except InfeasibleError as error:
                self.said(str(error), limit, task, pinned)
                return None
        assert not plan.axis
        needs = plan.peak_memory + plan.reserve
        assert limit is None or needs <= limit, (self.examined.title, how, needs, limit)
        return plan

    def noted(self) -> Callable[..., Found]:
        real = planning.find_fastest

        def find(asked: Sought, deadline: Deadline) -> Found:
            found = real(asked, deadline)
            if asked.joint.graph is self.task.joint.graph:
                self.wholes.append(found)
            return found

        return find

    def said(self, text: str, limit: int | None, task: Task, pinned: bool) -> None:
        if limit is None or task.narrowing != Narrowing():
            return
        for value in re.findall(r"any plan needs at least ([\d.]+[KMGT]?B)", text):
            self.examined.bytes_.append((NEEDS, _nbytes(value), pinned))
        if text.startswith("no plan fits"):
            self.examined.bytes_.append((NONE, limit + 1.0, pinned))
        do = re.search(
            r"memory_limit=([\d.]+[KMGT]?B), which (?:the smallest|another) plan that was judged fits", text
        )
        if do:
            enough = int(_nbytes(do[1]))
            plan = self.planned(f"within {enough}, said to do", enough, task, pinned)
            self.examined.held.append(
                Held(DO, 1.0, float(plan is not None), f"within {enough}, said of {limit}")
            )

    def pinned(self, limit: int) -> None:
        shapes = {name: value.shape for name, value in parameter_shapes(self.task.captured).items()}
        name = self.generator.choice(sorted(shapes))
        task = replace(self.task, pins={name: Layout.replicated(len(shapes[name]))})
        if self.planned("pinned", None, task, True) is not None:
            self.planned("pinned, within a limit", limit, task, True)

    def family(self) -> None:
        family = self.generator.choice(FAMILIES)
        with suppress(InfeasibleError):
            narrowing = family_narrowing(family, self.task.joint, self.task.mesh)
            self.planned(family.name, None, replace(self.task, narrowing=narrowing))

    def counted(self, bounds: Sequence[float], plan: Plan, drawings: int) -> None:
        """The plan's bounds against what is counted of other layouts, as the fastest plan overlaps."""
        task = self.task
        space = SpaceBuilder(task.joint, task.prices, task.boundary).built()
        own = next(one for one in self.wholes if one.lower_bound == plan.lower_bound)
        others: list[tuple[str, Any]] = [("another search", one.assignment) for one in self.wholes]
        others += [
            (f"changed: {one}", one.assignment)
            for one in changes(task.joint, space, plan.planned.layouts, drawings // 2)
        ]
        others += [
            ("drawn", space.assignment(choice)) for choice in drawn_choices(space, self.generator, drawings)
        ]
        nearest, how = plan.cost, "the plan"
        for name, assignment in others:
            with suppress(ValueError):  # with layouts that this space lacks
                seconds = counted_seconds(space.totals(choice_of(space, assignment)), own.overlaps)
                nearest, how = min((nearest, how), (seconds, name))
            if name != "another search":
                with suppress(ShardingError):
                    self.add(name, task.judged(assignment), task, False)
        self.examined.held += [Held(COUNTED, bound, nearest, how) for bound in bounds]

    def add(self, how: str, judged: Judged, task: Task, pinned: bool) -> None:
        if judged.step is not None:
            needs = judged.peak.nbytes + task.reserve(judged.collectives, judged.memory)
            one = Program(how, judged.seconds, judged.peak.nbytes, needs, pinned)
            self.examined.programs.append(one)


def drawn_choices(space: SearchSpace, generator: random.Random, count: int) -> Iterator[tuple[int, ...]]:
    """Choices that are possible, each node at random of what its neighbours before it leave."""
    edges: dict[int, list[tuple[int, Any]]] = {}
    for (i, j), costs in zip(space.problem.edges, space.problem.edge_costs, strict=True):
        edges.setdefault(max(i, j), []).append((min(i, j), costs if i < j else costs.T))
    for _ in range(count):
        choice: list[int] = []
        for node, costs in enumerate(space.problem.node_costs):
            possible = np.isfinite(costs)
            for other, matrix in edges.get(node, ()):
                possible &= np.isfinite(matrix[choice[other]])
            if not possible.any():
                break
            choice.append(generator.choice(np.flatnonzero(possible).tolist()))
        else:
            yield tuple(choice)


def _nbytes(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([KMGT]?)B", text).groups()  # type: ignore[union-attr]
    return round(float(number) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[unit])


_COLUMNS = ("bound of", "printed", "under it", "nearest, of the bound: least", "median")
HEADER = f"| {' | '.join(_COLUMNS)} |\n{'| --- ' * len(_COLUMNS)}|"


def table(cases: Sequence[Examined]) -> str:
    lines = [HEADER]
    for kind in (NEEDS, NONE, COUNTED, TIMED, DO):
        held = [one for case in cases for one in case.held if one.kind == kind]
        if held:
            near = [one.nearest / one.bound for one in held]
            under = sum(one.is_under for one in held)
            lines.append(f"| {kind} | {len(held)} | {under} | {min(near):.3f} | {median(near):.3f} |")
    programs = sum(len(case.programs) for case in cases)
    return "\n".join([*lines, f"{len(cases)} cases, {programs} programs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="none is begun after so many")
    parser.add_argument("--limit", type=float, default=60.0, help="processor seconds of each search")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begun, cases = time.monotonic(), list[Examined]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):  # a run that is stopped prints what it has
        for number in range(arguments.seed, arguments.seed + arguments.cases):
            if time.monotonic() - begun > arguments.seconds:
                break
            cases.append(examined(number, limit=arguments.limit))
            for one in cases[-1].under:
                print(f"{cases[-1].title}: {one.kind} {one.bound:g}, {one.found} {one.nearest:g}", flush=True)
            print(f"{number}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    print(table(cases))
    sys.exit(any(case.under for case in cases))


if __name__ == "__main__":
    main()
