"""One rank's program for all sizes of a call: lowered and compiled with symbols for sizes, run on their values."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_fits import axes_in
from autoshard.runtime.beside import Beside, compiling
from autoshard.runtime.executable import Home
from autoshard.runtime.leaves import CallEnds
from autoshard.runtime.making import Call, ends_of, lowered_whole
from autoshard.runtime.process_groups import groups_for
from autoshard.runtime.step import CompiledBackward, PhaseCode, placeholder_values, slots_of, tangent_values
from autoshard.watching.agreement import collectively, everyones
from passes.compile.compile_graph import Compiled, compile_sized
from passes.ir.sized_graph import Looks, Numbers, Place, SizedJoint, SizedModule, filled
from passes.ir.torch_sizes import Evaluation, SizeSymbols, evaluation, symbolic_sizes
from passes.layout.layout import Layout
from passes.lower.phases import Backward, Phases
from passes.lower.rank_program import RankProgram, usually_missing
from passes.plan.sized_plan import in_symbols

_log = logging.getLogger("autoshard")


CompileSized = Callable[[fx.GraphModule, SizeSymbols, str], tuple[Compiled, list[Any]]]
"""As `compile_sized`."""


def is_for_sizes(plan: Plan) -> bool:
    """Whether a plan may have a program for all sizes: not where it says how many rows a piece of a batch has, or a
    rank's part of what goes in or comes out."""
    if isinstance(plan, PipelinePlan) or plan.micro_batches > 1 or plan.head_pieces > 1:
        return False
    ends = (*plan.inputs.values(), *plan.outputs.values())
    return not any(one is not None and one.counts_rows for one in ends)


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
    """A rank's phases in symbols, compiled. ends: where they meet the caller, in symbols as well.

    codes: how what depends on sizes is computed. holds: what was asked of the sizes on this rank."""

    def __init__(
        self,
        program: RankProgram,
        ends: CallEnds,
        symbols: SizeSymbols,
        backend: str = "eager",
        compile_as: CompileSized = compile_sized,
    ) -> None:
        self.program, self.phases = program, program.phases
        self.symbols, self.backend = symbols, backend
        numbers, whole = Numbers(symbols), self.phases.backward
        compiled = lambda graph: _Taking(compile_as(graph, symbols, backend), numbers)
        self.forward = compiled(self.phases.forward)
        self.values = _Values(placeholder_values(self.phases.forward), numbers)
        self.tangents = _Values(tangent_values(self.phases), numbers)
        graphs, self.backward = [self.phases.forward], None
        if whole is not None:
            missing = frozenset(usually_missing(whole))
            usual = program.backward(missing)
            slots = slots_of(self.phases, usual)
            tangents = _Values(placeholder_values(usual.module)[len(slots) :], numbers)
            self.backward = _SizedBackward(missing, usual, slots, compiled(usual.module), tangents)
            graphs += [whole.module, self.backward.graph.module]
        self._ends = ends
        self._shapes = numbers.placed(tuple(side.shape for side in (*ends.inputs, *ends.outputs)))
        self._graphs = [SizedModule(graph, numbers) for graph in graphs]
        self.codes, self.holds = numbers.codes(), numbers.holds()

    def compiled(self, backend: str) -> SizedCode:
        return SizedCode(self.program, self._ends, self.symbols, backend)

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


@dataclass(frozen=True)
class _SizedBackward:
    missing: frozenset[int]
    graph: Backward
    slots: list[int]
    code: _Taking
    tangents: _Values

    def at(self, numbers: Sequence[Any]) -> CompiledBackward:
        return CompiledBackward(self.graph, self.code.at(numbers), self.slots, self.tangents.at(numbers))


class PhaseCodeAt(PhaseCode):
    """A `SizedCode` for some sizes. A backward that it has no code for runs op by op, for these alone."""

    def __init__(self, code: SizedCode, numbers: Sequence[Any]) -> None:
        self._code, self._numbers, self._backend = code, numbers, "eager"
        self.phases, self.backend, self.ends = code.phases, code.backend, code.ends(numbers)
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


Agreed = tuple[SizedCode, Evaluation]
"""Code, and of sizes what it takes; None where something does not hold that was asked on some rank."""


def _agreed(home: Home, make: Callable[[], SizedCode], what: str) -> Agreed | None:
    """What every rank makes; None where some rank cannot. All ranks together."""

    def made() -> SizedCode | None:
        try:
            with symbolic_sizes():
                return make()
        except Exception as error:  # a pass, or a compiler, that wants numbers
            _log.debug("no program for all sizes: %s", error, exc_info=True)
            return None

    code = collectively(home.mesh, made, what=what)
    asked = everyones(home.mesh, None if code is None else code.holds, what="what holds of sizes")
    known = [holds for holds in asked if holds is not None]
    if code is None or len(known) < len(asked):
        return None
    holds = list(dict.fromkeys(itertools.chain.from_iterable(known)))
    return code, evaluation(len(code.symbols.sizes), holds, code.codes)


class SizedProgram:
    """A program for all sizes: op by op at first, compiled from its third call on, beside the steps if these are tuned
    there. number: the same on all ranks. inputs: layouts of those that ranks pass parts of. is_settled: whether nothing
    more will be compiled for all sizes."""

    def __init__(self, number: int, plan: Plan, inputs: Mapping[int, Layout], eager: Agreed) -> None:
        self.number, self.plan, self.inputs, self._agreed = number, plan, inputs, eager
        self.is_settled = False
        self._calls, self._due = 0, MOST_EAGER + 1
        self._beside: Beside | None = None

    def at(self, sizes: Sequence[int]) -> PhaseCodeAt | None:
        """None where something does not hold of them. The same on all ranks."""
        code, evaluate = self._agreed
        numbers = evaluate(sizes)
        return None if numbers is None else PhaseCodeAt(code, numbers)

    def called(self, home: Home, kind: str) -> None:
        """Op by op, once more, for any sizes. All ranks come here together."""
        self._calls += 1
        if self.is_settled or self._calls < self._due:
            return
        backend, eager = home.settings.backend, self._agreed[0]
        if home.settings.tune == "background" and not self._is_compiled_beside(home, eager):
            # Calls after which ranks ask each other again how far they are.
            self._due += min(self._calls, 64)
            return
        with home.stages("compiling the plan", (kind, backend)):
            compiled = _agreed(home, lambda: eager.compiled(backend), "compiling a plan")
        self._agreed, self.is_settled = compiled or self._agreed, True
        if compiled is None:
            _log.info("%s compiles no program for all sizes, but each for itself", backend)

    def _is_compiled_beside(self, home: Home, eager: SizedCode) -> bool:
        """Whether it is in the compiler's cache, on all ranks."""
        if self._beside is None:
            self._beside = compiling(home, symbolic_sizes()(lambda: eager.compiled(home.settings.backend)))
        self._beside.news()
        return all(everyones(home.mesh, self._beside.ended, what="whether a program is compiled"))

    def end(self) -> None:
        """What goes on beside the steps."""
        if self._beside is not None:
            self._beside.end()


MOST_EAGER = 2
"""Calls that run op by op: a last, smaller batch comes once an epoch, and compiling it takes longer than running it."""


def sized_program(
    call: Call, number: int, joint: SizedJoint, values: Sequence[int], plan: Plan
) -> SizedProgram | None:
    """The program of a graph in symbols; None where some rank has none. All ranks come here together.

    values: of the sizes of `call`, which is planned: as these they count. The plan's layouts and transfers are those of
    all sizes for which the same holds: whatever making the program asked of sizes comes out alike for them on every
    rank."""
    home = call.home
    groups_for(home.mesh, axes_in(plan))  # all ranks make them together

    def made() -> SizedCode:
        symbols = SizeSymbols(values)
        graph = joint.at(values, symbols)
        assert graph is not None
        plan_of_all = replace(plan, records=in_symbols(plan.records, graph, home.spec))
        (program,) = lowered_whole(home, graph, plan_of_all)
        return SizedCode(program, ends_of(home.mesh, graph, call.layouts, plan_of_all), symbols)

    eager = _agreed(home, made, "lowering a plan")
    return None if eager is None else SizedProgram(number, plan, call.layouts.inputs, eager)
