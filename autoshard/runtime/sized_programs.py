"""One rank's program for all sizes of a call: lowered and compiled with symbols for sizes, run on their values."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.runtime.leaves import CallEnds
from autoshard.runtime.making import Call, ends_of, lowered_whole
from autoshard.runtime.step import CompiledBackward, PhaseCode, placeholder_values, slots_of, tangent_values
from autoshard.watching.agreement import everyones
from passes.compile.compile_graph import Compiled, compile_sized
from passes.ir.sized_graph import Looks, Numbers, Place, SizedJoint, SizedModule, filled, same_nodes
from passes.ir.torch_sizes import Evaluation, SizeSymbols, evaluation, symbolic_sizes
from passes.lower.missing_tangents import usually_missing
from passes.lower.phases import Backward, Phases
from passes.lower.rank_program import RankProgram

_log = logging.getLogger("autoshard")


def counts_no_rows(plan: Plan) -> bool:
    """Whether nothing in a plan is a number of rows, so that it may be one of all sizes."""
    if isinstance(plan, PipelinePlan) or plan.micro_batches > 1 or plan.head_pieces > 1:
        return False
    layouts = [one for node in plan.planned.layouts.values() for one in (*node.operands, *node.results)]
    counted = any(layout.has_halo or any(layout.sizes) for layout in layouts)
    return not counted and not plan.planned.interiors


class _Taking:
    """Code that takes numbers behind its inputs."""

    def __init__(self, made: tuple[Compiled, list[Any]], numbers: Numbers) -> None:
        self._run, taken = made
        self._taken = [numbers.place(number) for number in taken]

    def at(self, numbers: Sequence[Any]) -> Compiled:
        run, taken = self._run, filled(self._taken, numbers)

        def compiled(inputs: list[Any]) -> Sequence[Tensor | None]:
            inputs.extend(taken)  # into the list itself: it is emptied as the graph runs
            return run(inputs)

        return compiled


class _Values:
    """How tensors look that have these sizes, without values."""

    def __init__(self, values: Sequence[Tensor], numbers: Numbers) -> None:
        looks = [numbers.look(value) for value in values]
        self._looks = {i: look for i, look in enumerate(looks) if any(map(_is_sized, look[:2]))}
        self._values = [None if i in self._looks else _on_meta(look) for i, look in enumerate(looks)]

    def at(self, numbers: Sequence[Any]) -> list[Tensor]:
        found: list[Any] = list(self._values)
        for i, look in self._looks.items():
            found[i] = _on_meta(filled(look, numbers))
        return found


def _is_sized(numbers: Sequence[Any]) -> bool:
    return any(isinstance(number, Place) for number in numbers)


def _on_meta(look: Any) -> Tensor:
    return torch.empty_strided(look[0], look[1], dtype=look[3], device="meta")


class SizedCode:
    """A rank's phases in symbols, compiled op by op. ends: where they meet the caller, in symbols as well.

    codes: how what depends on sizes is computed. holds: what was asked of the sizes on this rank."""

    def __init__(self, program: RankProgram, ends: CallEnds, symbols: SizeSymbols) -> None:
        self.program, self.phases = program, program.phases
        numbers, whole = Numbers(symbols), self.phases.backward
        self.forward = _Taking(compile_sized(self.phases.forward), numbers)
        self.values = _Values(placeholder_values(self.phases.forward), numbers)
        self.tangents = _Values(tangent_values(self.phases), numbers)
        graphs, self.backward = [self.phases.forward], None
        if whole is not None:
            missing = frozenset(usually_missing(whole))
            self.backward = _SizedBackward(missing, program.backward(missing), self.phases, numbers)
            graphs += [whole.module, self.backward.graph.module]
        self._ends = ends
        self._shapes = numbers.placed(tuple(side.shape for side in (*ends.inputs, *ends.outputs)))
        self._graphs = [SizedModule(graph, numbers) for graph in graphs]
        self.codes, self.holds = numbers.codes(), numbers.holds()

    def is_at(self, sizes: Sequence[int], programs: Sequence[RankProgram]) -> bool:
        """Whether these are what it is at these sizes, node by node."""
        numbers = evaluation(len(sizes), self.holds, self.codes)(sizes)
        if numbers is None or len(programs) != 1:
            return False
        pairs = zip(_modules(self.graphs(numbers)[0]), _modules(programs[0].phases), strict=True)
        return all(same_nodes(one.graph, other.graph) for one, other in pairs)

    def ends(self, numbers: Sequence[Any]) -> CallEnds:
        shapes = iter(filled(self._shapes, numbers))
        inputs = tuple(replace(side, shape=next(shapes)) for side in self._ends.inputs)
        return CallEnds(inputs, tuple(replace(side, shape=next(shapes)) for side in self._ends.outputs))

    def graphs(self, numbers: Sequence[Any]) -> tuple[Phases, Backward | None]:
        """The phases, and the backward of a usual step, for some sizes."""
        looks = Looks([look for graph in self._graphs for look in graph.looks], numbers)
        forward, *others = [graph.at(numbers, looks) for graph in self._graphs]
        if self.phases.backward is None or self.backward is None:
            return replace(self.phases, forward=forward), None
        whole, usual = others
        backward = replace(self.phases.backward, module=whole)
        return replace(self.phases, forward=forward, backward=backward), replace(
            self.backward.graph, module=usual
        )


def _modules(phases: Phases) -> list[fx.GraphModule]:
    return [phases.forward, *([] if phases.backward is None else [phases.backward.module])]


class _SizedBackward:
    def __init__(self, missing: frozenset[int], graph: Backward, phases: Phases, numbers: Numbers) -> None:
        self.missing, self.graph, self._slots = missing, graph, slots_of(phases, graph)
        self._code = _Taking(compile_sized(graph.module), numbers)
        self._tangents = _Values(placeholder_values(graph.module)[len(self._slots) :], numbers)

    def at(self, numbers: Sequence[Any]) -> CompiledBackward:
        return CompiledBackward(self.graph, self._code.at(numbers), self._slots, self._tangents.at(numbers))


class PhaseCodeAt(PhaseCode):
    """A `SizedCode` for some sizes. A backward that it has no code for is compiled for these alone."""

    def __init__(self, code: SizedCode, numbers: Sequence[Any]) -> None:
        self._code, self._numbers, self._backend = code, numbers, "eager"
        self.phases = code.phases
        self.forward = code.forward.at(numbers)
        self.values, self.tangents = code.values.at(numbers), code.tangents.at(numbers)
        usual = code.backward
        self._backwards = {} if usual is None else {usual.missing: usual.at(numbers)}

    @cached_property
    def _graphs(self) -> tuple[Phases, Backward | None]:
        return self._code.graphs(self._numbers)

    @cached_property
    def _program(self) -> RankProgram:  # pyright: ignore[reportIncompatibleVariableOverride]
        return replace(self._code.program, split=self._graphs[0])

    def alone(self, backend: str) -> PhaseCode:
        """The same, compiled for these sizes alone."""
        code = PhaseCode(self._program, backend)
        _ = code.forward
        if self._code.backward is not None:
            code.backward(self._code.backward.missing)
        return code

    def seen(self, backward: Backward | None) -> Phases:
        phases, usual = self._graphs
        if self._code.backward is not None and backward is self._code.backward.graph:
            backward = usual
        return phases if backward is None else replace(phases, backward=backward)


@dataclass(frozen=True)
class SizedProgram:
    """number: the same on all ranks. evaluate: of sizes, what this rank's code takes, or None where something does not
    hold that some rank asked."""

    number: int
    plan: Plan
    code: SizedCode
    evaluate: Evaluation


def sized_program(
    call: Call, number: int, graph: SizedJoint, sizes: Sequence[int], plan: Plan
) -> SizedProgram | None:
    """The program of a graph in symbols; None where some rank has none. All ranks come here together.

    call, plan, sizes: of a call that has been lowered, and at whose sizes this program is the same. The plan's layouts
    and transfers are then those of all sizes for which the same holds: whatever making the program asked of sizes comes
    out alike for them on every rank."""
    home = call.home
    try:
        with symbolic_sizes():
            symbols = SizeSymbols(sizes)
            joint = graph.at(sizes, symbols)
            assert joint is not None
            (program,) = lowered_whole(home, joint, plan)
            code = SizedCode(program, ends_of(home.mesh, joint, call.layouts, plan), symbols)
        code = code if code.is_at(sizes, call.lowered) else None
    except Exception as error:  # a pass that wants numbers
        _log.debug("no program for all sizes: %s", error)
        code = None
    asked = everyones(home.mesh, None if code is None else code.holds, what="what holds of sizes")
    known = [holds for holds in asked if holds is not None]
    if code is None or len(known) < len(asked):
        return None
    holds = list(dict.fromkeys(itertools.chain.from_iterable(known)))
    return SizedProgram(number, plan, code, evaluation(len(sizes), holds, code.codes))
