"""Calls of a model at many sizes, each by the program that the runtime would take, of all ranks in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autoshard.global_call import GlobalCall
from autoshard.plan.plan import Plan
from autoshard.plan.plan_fits import planned_graph
from autoshard.plan.sized_parts import InSymbols, SizedPlan, is_for_sizes
from autoshard.runtime.leaves import CallEnds
from autoshard.runtime.sized_calls import CaptureAs, SizedAt, SizedCalls
from autoshard.runtime.sized_code import SizedPhases
from autoshard.runtime.sized_programs import Agreed, LoweredPiece, SizedCode, SizedPieces, with_code
from autoshard.verification.simulated_step import StagePrograms
from passes.capture import Captured
from passes.compile.compile_graph import Compiled
from passes.ir.torch_sizes import evaluation, symbolic_sizes
from passes.lower.rank_program import RankProgram, rank_program
from passes.micro_batches.cut_batch import PieceSizes, cut_for_stages
from passes.simulate.lockstep import simulated_groups
from passes.stages.stage_graph import StageGraph

_log = logging.getLogger("autoshard")


@dataclass(frozen=True)
class Runs:
    """What runs a call on every rank, of the graph `captured`. programs: as of `step_errors`, where they are for all
    sizes. by: "a program for all sizes", or of these alone."""

    captured: Captured
    plan: Plan
    programs: StagePrograms | None
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
    _programs: int = 0
    codes: dict[int, list[list[Agreed]]] = field(default_factory=dict[int, list[list[Agreed]]])
    """By the first of them, of every stage and rank."""

    def runs(self, whole: GlobalCall, capture: CaptureAs) -> Runs:
        """capture: of that call."""
        known = self.calls.known(self.model, whole)
        if known is not None:
            sized, program, sizes = known
            there = sized.at(whole.shapes)
            assert there is not None, "what the graph asks, its program asks too"
            by_piece = [self._at(*one) for one in program.found(sizes) or ()]
            return Runs(there[0], program.plan, list(zip(*by_piece, strict=True)), ALL_SIZES)
        captured, sized = self.calls.captured(self.model, whole, capture)
        plan = self.planned(captured, whole)
        if sized is not None and is_for_sizes(plan) and self._programs < self.most:
            self._add(sized, captured, plan, whole)
        return Runs(captured, plan, None, ALONE)

    def _at(self, first: Agreed, values: Sequence[int]) -> list[list[RankProgram]]:
        """Of a piece, the program of every stage and rank."""
        at = lambda one: one.code.rank_program(one.numbers(values))
        return [list(map(at, ranks)) for ranks in self.codes[id(first)]]

    def _add(self, sized: SizedAt, captured: Captured, plan: Plan, whole: GlobalCall) -> None:
        """`autoshard.runtime.sized_programs.sized_program`, of all ranks; nothing is compiled."""
        known, graph = sized.call.programs, planned_graph(captured, plan)
        base = cut_for_stages(graph, plan.micro_batches) if plan.axis else graph
        try:
            planned = SizedPlan.of(sized.call.joint, sized.values, plan, captured.joint, base)
            make = lambda index, piece: self._made(planned, index, piece)
            made = with_code(self._programs, planned, whole.layouts, known, make)
        except Exception as error:  # a pass that wants numbers
            _log.debug("no program for all sizes: %s", error)
            return
        if made is not None and made.number == self._programs:
            known.append(made)
            self._programs += 1

    def _made(self, planned: SizedPlan, index: int, piece: PieceSizes) -> Agreed:
        with symbolic_sizes():
            one = planned.of_piece(index, piece)
            codes = [_codes(graph, plan, one) for graph, plan in one.stages]
        holds = codes[-1][-1].holds  # all have the same symbols
        of = lambda code: Agreed(code, evaluation(len(piece.values), holds, code.codes))
        agreed = [list(map(of, ranks)) for ranks in codes]
        self.codes[id(agreed[0][0])] = agreed
        return agreed[0][0]


def _codes(graph: StageGraph, plan: Plan, one: InSymbols) -> list[SizedCode]:
    """Of a stage, on every rank."""
    mesh, groups, ends = plan.mesh, simulated_groups(plan.mesh), CallEnds((), ())
    found: list[SizedCode] = []
    for rank in range(mesh.device_count):
        program = rank_program(graph.joint, plan.planned, mesh, rank, groups)
        if graph.joint.pieces == 1:
            found.append(SizedPhases(program, ends, one.symbols, compile_as=_uncompiled))
        else:
            lowered = LoweredPiece([program], graph.joint.pieces, ends)
            found.append(SizedPieces(lowered, one.symbols, compile_as=_uncompiled))
    return found


def _uncompiled(*_: Any) -> tuple[Compiled, list[Any]]:
    return list, []
