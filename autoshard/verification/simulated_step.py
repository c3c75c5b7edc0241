"""A step on simulated ranks, as it runs: in stages and pieces, forward and backward apart, collectives in order.

One stage is a whole model, one piece a whole batch.

So do calls of a model at many sizes, each by the program that the runtime would take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoshard.global_call import GlobalCall
from autoshard.plan.plan import Plan
from autoshard.plan.plan_ends import result_layouts
from autoshard.plan.plan_fits import planned_graph
from autoshard.plan.sized_parts import InSymbols, SizedPlan, is_for_sizes
from autoshard.runtime.leaves import CallEnds
from autoshard.runtime.sharding import shard_of
from autoshard.runtime.sized_calls import CaptureAs, SizedAt, SizedCalls
from autoshard.runtime.sized_code import Lowered, SizedCode
from autoshard.runtime.sized_programs import Agreed, code_of, with_code
from autoshard.verification.part_errors import CANCELLED, largest, piece_error
from cost_model.errors import log
from cost_model.mesh import MeshSpec, simulated_groups
from passes.capture import Captured
from passes.compile.compile_graph import Compiled
from passes.ir.joint import JointGraph
from passes.ir.process_state import autocast_off
from passes.ir.torch_sizes import evaluation, symbolic_sizes
from passes.layout.layout import Layout
from passes.lower.piecewise import RankPieces, given_values, leave, pieces_of, step_results
from passes.lower.rank_program import RankProgram, missing_tangents, rank_program
from passes.micro_batches.cut_batch import PieceSizes, cut_for_stages
from passes.simulate.lockstep import simulate
from passes.stages.stage_graph import Leaf, StageEnds, StageGraph
from passes.stages.stage_graphs import stage_graphs


def rank_programs(joint: JointGraph, plan: Plan) -> list[list[RankProgram]]:
    """Per piece of a batch, or of all of it, every rank's program."""
    mesh, groups = plan.mesh, simulated_groups(plan.mesh)
    return [
        [rank_program(graph, planned, mesh, rank, groups) for rank in range(mesh.device_count)]
        for graph, planned in plan.of_pieces(joint)
    ]


StagePrograms = Sequence[Sequence[Sequence[RankProgram]]]
"""Of every stage, piece and rank."""


def usual_tangents(joint: JointGraph, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`values` of the placeholders of `joint`, with 0 as gradients of outputs that get none in a usual step."""
    missing = missing_tangents(joint)
    pairs = zip(joint.placeholders, values, strict=True)
    return [torch.zeros_like(value) if node in missing else value for node, value in pairs]


def step_errors(
    joint: JointGraph,
    plan: Plan,
    values: Sequence[Tensor],
    wanted: Sequence[Tensor | None],
    least: Sequence[float],
    programs: StagePrograms | None = None,
) -> dict[str, float]:
    """Relative error by result: infinite for one that the graphs lack.

    joint: of the call, in pieces, as `plan` cuts it. values: of its placeholders, whole. wanted: its results. least:
    per result, the least scale that an error is relative to. programs: of every stage, piece and rank; None: the
    plan's.

    All outputs get a gradient. Raises LockstepError if the ranks' collectives disagree: for real, they would hang.
    """
    mesh = plan.mesh.resized(plan.axis, 1) if plan.axis else plan.mesh
    known = {(spec.kind, spec.name): value for spec, value in zip(joint.inputs, values, strict=True)}
    graphs = stage_graphs(joint, plan.cut) if plan.axis else (StageGraph.only(joint),)
    stages = list(zip(graphs, plan.stages, strict=True))
    given = programs or [rank_programs(graph.joint, stage) for graph, stage in stages]
    runs = [_in_lockstep(*pair, known, ours) for pair, ours in zip(stages, given, strict=True)]
    found = simulate_stages(runs, mesh)
    layouts = [_layouts(graph, stage) for graph, stage in stages]
    pairs = [(end.kind, value) for end, value in zip(joint.outputs, wanted, strict=True)]
    floors = {kind: CANCELLED * largest(v for k, v in pairs if k == kind) for kind, _ in pairs}
    errors: dict[str, float] = {}
    for spec, expected, scale in zip(joint.outputs, wanted, least, strict=True):
        leaf = spec.kind, spec.name
        at = [i for i, ranks in enumerate(found) if leaf in ranks[0]]
        if at and expected is not None:
            # Of a parameter in several stages each has a part of the gradient.
            parts = [
                sum((found[i][rank][leaf] for i in at[1:]), found[at[0]][rank][leaf])
                for rank in range(mesh.device_count)
            ]
            errors[f"{spec.kind} {spec.name}"] = max(
                piece_error(parts, expected, layouts[at[0]][leaf], mesh, rank, max(floors[spec.kind], scale))
                for rank in range(mesh.device_count)
            )
        elif expected is not None and largest([expected]):
            errors[f"{spec.kind} {spec.name}"] = math.inf
    return errors


def _in_lockstep(
    graph: StageGraph, stage: Plan, values: Mapping[Leaf, Tensor], programs: Sequence[Sequence[RankProgram]]
) -> StageRun:
    ends, joint = StageEnds.of(graph), graph.joint
    given = {name: values[leaf] for leaf, name in ends.leaves.items()}
    given |= {name: values["tangent", f"tangent {index}"] for index, name in ends.tangents.items()}
    pieces = [[pieces_of(program, joint.pieces) for program in ranks] for ranks in programs]
    return StageRun(graph, pieces, held_values(given, stage, stage.mesh), stage.mesh)


def held_values(given: Mapping[str, Tensor], plan: Plan, mesh: MeshSpec) -> list[dict[str, Tensor]]:
    """Per rank what it holds of values of placeholders, by name."""
    layouts = {name: plan.planned.layouts[name].results[0] for name in given}
    return [
        {name: held_value(value, layouts[name], mesh, rank) for name, value in given.items()}
        for rank in range(mesh.device_count)
    ]


def _layouts(graph: StageGraph, stage: Plan) -> dict[Leaf, Layout]:
    """Layouts of the results that are not passed on."""
    named = StageEnds.of(graph).results
    layouts = enumerate(result_layouts(graph.joint.results, stage.planned.layouts))
    return {named[place]: layout for place, layout in layouts if layout is not None and place in named}


Known = list[dict[str, Tensor]]
"""Per rank its values by name."""

Passing = list[list[Tensor]]
"""Per rank what passes between two stages."""


@autocast_off()
def simulate_stages(runs: Sequence[StageRun], mesh: MeshSpec) -> list[list[Mapping[Leaf, Tensor]]]:
    """Per stage and rank its results, by kind and name in the whole graph. One stage is a whole model, one piece a
    whole batch. mesh: of one stage."""
    for piece in range(len(runs[0].pieces)):
        passing: Passing = [[] for _ in range(mesh.device_count)]
        for run in runs:
            passing = run.forward(piece, passing)
        passing = [[] for _ in range(mesh.device_count)]
        for run in reversed(runs):
            passing = run.backward(piece, passing)
    return [run.finish() for run in runs]


class StageRun:
    """A stage on all of its ranks. known: per rank the values of `StageEnds.leaves` and `tangents`, by name."""

    def __init__(
        self, graph: StageGraph, pieces: Sequence[Sequence[RankPieces]], known: Known, mesh: MeshSpec
    ) -> None:
        """pieces: of every piece, in order, per rank of the stage. mesh: of one stage."""
        self.pieces, self._known, self._mesh = pieces, known, mesh
        self._ends = StageEnds.of(graph)
        self._leaves = [node.name for node in graph.joint.placeholders]
        self._kept: list[list[Any]] = []
        self._run_once([(parts.before, parts.taken, parts.made) for parts in pieces[0]])

    def forward(self, piece: int, received: Passing) -> Passing:
        """Keeps per rank what the backward takes, less what comes late."""
        ranks = self.pieces[piece]
        self._receive(self._ends.received, received)
        phases = [parts.piece.complete() for parts in ranks]
        early = self._given(ranks, late=False)
        results = simulate([p.forward for p in phases], early, self._mesh)
        self._kept = []
        for parts, p, own, found, values in zip(ranks, phases, early, results, self._known, strict=True):
            count = len(p.outputs)
            # Sums are made in place, and a later piece's forward may run before this one's backward.
            copies = [None if value is None else value.clone() for value in found[:count]]
            leave(parts.left[:count], copies, values)  # type: ignore[arg-type]
            backward = p.backward
            saved = [] if backward is None else [found[i] for i in backward.saved]
            self._kept.append([*(own[i] for i in (() if backward is None else backward.passed)), *saved])
        return self._taken(piece, self._ends.sent)

    def backward(self, piece: int, returned: Passing) -> Passing:
        ranks = self.pieces[piece]
        self._receive(self._ends.returned, returned)
        phases = [parts.piece.complete() for parts in ranks]
        backwards = [one.backward for one in phases if one.backward is not None]
        if backwards:
            late = self._given(ranks, late=True)
            inputs = [[*kept, *own] for kept, own in zip(self._kept, late, strict=True)]
            gradients = simulate([backward.module for backward in backwards], inputs, self._mesh)
            for parts, p, found, values in zip(ranks, phases, gradients, self._known, strict=True):
                leave(parts.left[len(p.outputs) :], found, values)  # type: ignore[arg-type]
        return self._taken(piece, self._ends.given_back)

    def finish(self) -> list[Mapping[Leaf, Tensor]]:
        first = self.pieces[0]
        self._run_once([(parts.after, parts.read, parts.ended) for parts in first])
        found: list[Mapping[Leaf, Tensor]] = []
        for parts, values in zip(first, self._known, strict=True):
            results = step_results(parts, values, self._leaves)
            named = ((leaf, results[place]) for place, leaf in self._ends.results.items())
            found.append({leaf: value for leaf, value in named if value is not None})
        return found

    def _run_once(self, ranks: Sequence[tuple[fx.GraphModule, Sequence[str], Sequence[str]]]) -> None:
        """Per rank a program, the names of what it reads, and of what it makes."""
        read = [[v[name] for name in taken] for v, (_, taken, _) in zip(self._known, ranks, strict=True)]
        results = simulate([module for module, *_ in ranks], read, self._mesh)
        for values, (*_, made), found in zip(self._known, ranks, results, strict=True):
            values.update(zip(made, found, strict=True))

    def _given(self, ranks: Sequence[RankPieces], *, late: bool) -> list[list[Tensor]]:
        """Per rank the inputs of a piece's forward; late: its tangents."""
        found: list[list[Tensor]] = []
        for parts, values in zip(ranks, self._known, strict=True):
            pairs = zip(parts.given, parts.piece.inputs, strict=True)
            found.append(
                given_values([one for one, spec in pairs if (spec.kind == "tangent") == late], values)
            )
        return found

    def _receive(self, names: Sequence[str], passing: Passing) -> None:
        for values, own in zip(self._known, passing, strict=True):
            values.update(zip(names, own, strict=True))

    def _taken(self, piece: int, places: Sequence[int]) -> Passing:
        ranks = zip(self.pieces[piece], self._known, strict=True)
        return [
            [values[name] for place in places if (name := parts.results[place]) is not None]
            for parts, values in ranks
        ]


@contextmanager
def full_float32() -> Generator[None]:
    """Products and convolutions in float32 keep all its digits inside. Also a decorator.

    cuDNN's convolutions are allowed TensorFloat-32 unless told otherwise, ten bits: then a program that is right
    differs from the model by 3e-4, as one that is wrong might. [torch's notes on CUDA, TensorFloat-32]
    """
    cudnn: Any = torch.backends.cudnn  # torch names neither to type checkers
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [backend.fp32_precision for backend in backends]
    with _old_flag_off(cudnn):
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


@contextmanager
def _old_flag_off(cudnn: Any) -> Generator[None]:
    """A model that reads the flag from before there were precisions, as `torch.backends.cudnn.flags()` does, gets an
    error where it says another thing than these."""
    try:
        before = cudnn.allow_tf32
    except RuntimeError:  # it does so outside, too
        yield
        return
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32 = before


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
            log.debug("no program for all sizes: %s", error)
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
        found.append(code_of(Lowered([program], graph.joint.pieces, ends), one.symbols, _uncompiled))
    return found


def _uncompiled(*_: Any) -> tuple[Compiled, list[Any]]:
    return list, []


def held_value(value: torch.Tensor, layout: Layout, mesh: MeshSpec, rank: int) -> torch.Tensor:
    """The part of a global `value` that `rank` holds: its shard; of a pending sum, index 0 of the axis holds all."""
    part = shard_of(value, layout, mesh, rank)
    here = mesh.coordinate(rank)
    if any(here[axis] != 0 for axis, op in layout.partial if op.startswith("sum")):
        return torch.zeros_like(part)
    return part.contiguous()
