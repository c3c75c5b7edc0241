"""Programs for all sizes against one process: random networks, layouts and sizes, on simulated ranks.

    python -m benchmarks.fuzz_sizes                       # 500 networks
    python -m benchmarks.fuzz_sizes --cases 20 --seed 7

Small networks, meshes and layouts are drawn at random, all that an op may have, not only what a search would choose.
Each is called at five sizes, 1, primes, and fewer rows than ranks among them, as a parallel model would be: the first
call captured, the second with symbols for sizes, and each of the others run by a program there is, if what that asked
of sizes holds, as it does of most that are drawn, or else by one of its own. Outputs and gradients of every rank are
compared with the network itself, in float64. Prints what differs, and how many calls ran by a program made for other
sizes. Exits with 1 if anything does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from autoshard import MeshSpec, Plan, Profile
from autoshard.global_call import GlobalCall
from autoshard.plan.derived_plans import carried_plan, plan_holding
from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.planning import canonical_capture
from autoshard.verification.simulated_step import ALL_SIZES, ALONE, SimulatedSizes, step_errors
from benchmarks.fuzz_bounds import drawn_choices
from benchmarks.rivals.sized_nets import Drawn, Images, drawn
from passes.capture import Captured
from passes.layout.layout import Layout
from passes.search.strategy_space import SpaceBuilder
from passes.simulate.reference import eager_results, reference_inputs

__all__ = ["Checked", "checked"]

MESHES = ({"a": 2}, {"a": 2}, {"a": 2}, {"a": 3}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2})
FIRST, LATER = (4, 6, 8, 12), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17)
CALLS, PROGRAMS = 5, 2
TOLERANCE = 1e-9
PROFILE = Profile.load("cpu")


@dataclass
class Checked:
    """How the calls ran, and those that came out otherwise than in one process, or not at all."""

    title: str
    by: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])


def checked(number: int) -> Checked:
    """All of one case: the same for the same number."""
    generator = random.Random(number)
    model, mesh = drawn(generator), MeshSpec(generator.choice(MESHES), "cpu")
    found = Checked(f"{number}: {model}, {mesh}")
    case = _Case(model, mesh, generator)
    runs = SimulatedSizes(model, case.planned, PROGRAMS)
    for place in range(CALLS):
        sizes = case.sizes(runs, place)
        try:
            error, by = _error(runs, case, model.inputs(*sizes, number))
        except Exception as reason:
            error, by = float("inf"), f"{type(reason).__name__}: {reason}"
        found.by[by if error < TOLERANCE else "wrong"] += 1
        if not error < TOLERANCE:
            found.wrong.append(f"at {sizes}, call {place}: off by {error:g}, {by}")
    return found


def _error(runs: SimulatedSizes, case: _Case, x: torch.Tensor) -> tuple[float, str]:
    """The largest relative error, and what the call ran by."""
    model, whole = case.model, case.call(x)
    ran = runs.runs(whole, partial(canonical_capture, model, (x,), {}))
    joint = ran.captured.joint
    values = reference_inputs(joint, model, [x], seed=0)
    wanted = eager_results(joint, model, lambda: [model(x)], values)
    errors = step_errors(joint, ran.plan, values, wanted, [0.0] * len(wanted), ran.programs)
    return max(errors.values()), ran.by


class _Case:
    """dims: mesh axes over which the input's are split."""

    def __init__(self, model: Drawn | Images, mesh: MeshSpec, generator: random.Random) -> None:
        self.model, self.mesh, self._generator = model, mesh, generator
        self.dims: list[list[str]] = [[] for _ in range(model.ndim)]
        for axis in mesh.names:
            if (dim := generator.choice((None, *model.split))) is not None:
                self.dims[dim].append(axis)
        self._left = generator.random() < 0.5
        self._first: Plan | None = None
        self._called: list[tuple[int, int]] = []

    def call(self, x: torch.Tensor) -> GlobalCall:
        return GlobalCall((x,), {}, {0: Layout.of(x.shape, self.mesh, self.dims)}, (tuple(x.shape),))

    def sizes(self, runs: SimulatedSizes, place: int) -> tuple[int, int]:
        """Of a call. Three quarters of those behind the second are such as a program serves, where some are found."""
        own = self._generator
        served = place > 1 and own.random() < 0.75
        found = [
            (own.choice(LATER if place > 1 else FIRST), own.choice(LATER if place else FIRST))
            for _ in range(60 if served else 1)
        ]
        serves = lambda one: runs.calls.known(self.model, self.call(self.model.inputs(one[0], one[1], 0)))
        new = (one for one in found if served and one not in self._called and serves(one))
        self._called.append(next(new, found[0]))
        return self._called[-1]

    def planned(self, captured: Captured, whole: GlobalCall) -> Plan:
        call = CallLayouts(whole.layouts, {0: None} if self._left else {})
        task = Task(captured, PROFILE, self.mesh, call, {}, None, "eager", 60.0)
        if self._first is None:
            self._first = self._drawn(task)
            return self._first
        return carried_plan(replace(task, pins=self._first.parameter_layouts), self._first)

    def _drawn(self, task: Task) -> Plan:
        """Of layouts that are possible, each node's at random; the fastest, where none are met."""
        space = SpaceBuilder(task.joint, task.prices, task.boundary).built()
        choice = next(drawn_choices(space, self._generator, 20), None)
        if choice is None:
            return search_plan(task)
        return plan_holding(task, space.assignment(choice), task.prices)


def table(cases: Sequence[Checked]) -> str:
    by = sum((case.by for case in cases), Counter[str]())
    parts = ", ".join(f"{by[one]} by {one}" for one in (ALL_SIZES, ALONE))
    return f"{len(cases)} networks, {by.total()} calls: {parts}; {by['wrong']} wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases: list[Checked] = []
    for number in range(arguments.seed, arguments.seed + arguments.cases):
        cases.append(checked(number))
        for line in cases[-1].wrong:
            print(f"{cases[-1].title}\n  {line}", flush=True)
        print(f"{number}, {time.process_time():.0f} CPU s", file=sys.stderr, flush=True)
    print(table(cases))
    sys.exit(any(case.wrong for case in cases))


if __name__ == "__main__":
    main()
