"""Calls of a model at many sizes, each by the program that the runtime would take, of all ranks in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from autoshard.global_call import GlobalCall
from autoshard.plan.plan import Plan
from autoshard.runtime.leaves import CallEnds
from autoshard.runtime.sized_calls import CaptureAs, SizedAt, SizedCalls
from autoshard.runtime.sized_programs import SizedCode, SizedProgram, is_for_sizes
from autoshard.verification.simulated_step import rank_programs
from passes.capture import Captured
from passes.compile.compile_graph import Compiled
from passes.ir.torch_sizes import Evaluation, SizeSymbols, evaluation, symbolic_sizes
from passes.lower.rank_program import RankProgram, rank_program
from passes.plan.planned_graph import PlannedGraph
from passes.plan.sized_plan import in_symbols
from passes.simulate.lockstep import simulated_groups

_log = logging.getLogger("autoshard")


@dataclass(frozen=True)
class Runs:
    """What runs a call on every rank, of the graph `captured`. by: "a program for all sizes", or of these alone."""

    captured: Captured
    plan: Plan
    programs: Sequence[RankProgram]
    by: str


ALL_SIZES, ALONE = "a program for all sizes", "a program of its own"


@dataclass
class SimulatedSizes:
    """As a `Session` takes them: the first call captured, the second with symbols, others read off, and a program in
    symbols wherever there is none yet that serves.

    planned: the plan of a call that was captured, with the layouts that the first has. most: programs in symbols."""

    model: nn.Module
    planned: Callable[[Captured, GlobalCall], Plan]
    most: int = 100
    calls: SizedCalls = field(default_factory=SizedCalls)
    codes: list[list[tuple[SizedCode, Evaluation]]] = field(default_factory=list[Any])
    """Of every program, of every rank, with what it takes at sizes."""

    def runs(self, whole: GlobalCall, capture: CaptureAs) -> Runs:
        """capture: of that call."""
        known = self.calls.known(self.model, whole)
        if known is not None:
            sized, program, sizes = known
            there = sized.at(whole.shapes)
            assert there is not None, "what the graph asks, its program asks too"
            programs = [_at(code, evaluate(sizes)) for code, evaluate in self.codes[program.number]]
            return Runs(there[0], program.plan, programs, ALL_SIZES)
        captured, sized = self.calls.captured(self.model, whole, capture)
        plan = self.planned(captured, whole)
        programs = rank_programs(captured.joint, plan)[0]
        if sized is not None and is_for_sizes(plan) and len(self.codes) < self.most:
            self._add(sized, plan, whole)
        return Runs(captured, plan, programs, ALONE)

    def _add(self, sized: SizedAt, plan: Plan, whole: GlobalCall) -> None:
        """`autoshard.runtime.sized_programs.sized_program`, of all ranks; nothing is compiled."""
        sizes, mesh, groups = sized.values, plan.mesh, simulated_groups(plan.mesh)
        try:
            with symbolic_sizes():
                symbols = SizeSymbols(sizes)
                joint = sized.call.joint.at(sizes, symbols)
                assert joint is not None
                planned = PlannedGraph(in_symbols(plan.records, joint, mesh))
                programs = [rank_program(joint, planned, mesh, r, groups) for r in range(mesh.device_count)]
                ends = CallEnds((), ())
                codes = [SizedCode(one, ends, symbols, compile_as=_uncompiled) for one in programs]
        except Exception as error:  # a pass that wants numbers
            _log.debug("no program for all sizes: %s", error)
            return
        made = [(code, evaluation(len(sizes), codes[-1].holds, code.codes)) for code in codes]
        sized.call.programs.append(SizedProgram(len(self.codes), plan, whole.layouts, made[0]))
        self.codes.append(made)


def _uncompiled(module: fx.GraphModule, symbols: SizeSymbols, backend: str) -> tuple[Compiled, list[Any]]:
    return list, []


def _at(code: SizedCode, numbers: Sequence[Any] | None) -> RankProgram:
    assert numbers is not None
    return replace(code.program, split=code.graphs(numbers)[0])
