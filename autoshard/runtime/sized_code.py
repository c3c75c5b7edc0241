"""A rank's code in symbols for sizes, and what it is for values of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from autoshard.runtime.call_program import Around, CallProgram
from autoshard.runtime.executable import Home
from autoshard.runtime.leaves import CallEnds
from autoshard.runtime.step import (
    CompiledBackward,
    PhaseCode,
    Program,
    placeholder_values,
    slots_of,
    tangent_values,
)
from passes.compile.compile_graph import Compiled, compile_sized
from passes.ir.sized_graph import Looks, Numbers, Place, SizedModule, filled
from passes.ir.torch_sizes import SizeSymbols
from passes.lower.phases import Backward, Phases
from passes.lower.rank_program import RankProgram, usually_missing

CompileSized = Callable[..., tuple[Compiled, list[Any]]]
"""As `compile_sized`."""


class SizedCode(Protocol):
    """codes: how what depends on sizes is computed. holds: what was asked of the sizes on this rank."""

    symbols: SizeSymbols
    backend: str
    codes: list[str]
    holds: list[str]

    def compiled(self, backend: str) -> SizedCode: ...

    def rank_program(self, numbers: Sequence[Any]) -> RankProgram:
        """For some sizes; of several stages the first's."""
        ...


class CodeAt(Protocol):
    """For some sizes. ends: where it meets the caller."""

    ends: CallEnds
    backend: str

    def program(self, home: Home, around: Around) -> CallProgram: ...

    def alone(self, home: Home, around: Around, backend: str) -> CallProgram:
        """The same, compiled for these sizes alone."""
        ...


class SizedEnds:
    """Ends of a call in symbols."""

    def __init__(self, ends: CallEnds, numbers: Numbers) -> None:
        self._ends = ends
        self._shapes = numbers.placed(tuple(side.shape for side in (*ends.inputs, *ends.outputs)))

    def at(self, numbers: Sequence[Any]) -> CallEnds:
        shapes = iter(filled(self._shapes, numbers))
        inputs = tuple(replace(side, shape=next(shapes)) for side in self._ends.inputs)
        return CallEnds(inputs, tuple(replace(side, shape=next(shapes)) for side in self._ends.outputs))


class Taking:
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


class Values:
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


class SizedPhases(SizedCode):
    """A rank's phases in symbols, compiled. ends: where they meet the caller, in symbols as well."""

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
        compiled = lambda graph: Taking(compile_as(graph, symbols, backend), numbers)
        self.forward = compiled(self.phases.forward)
        self.values = Values(placeholder_values(self.phases.forward), numbers)
        self.tangents = Values(tangent_values(self.phases), numbers)
        graphs, self.backward = [self.phases.forward], None
        if whole is not None:
            missing = frozenset(usually_missing(whole))
            usual = program.backward(missing)
            slots = slots_of(self.phases, usual)
            tangents = Values(placeholder_values(usual.module)[len(slots) :], numbers)
            self.backward = _SizedBackward(missing, usual, slots, compiled(usual.module), tangents)
            graphs += [whole.module, self.backward.graph.module]
        self._ends, self.ends = ends, SizedEnds(ends, numbers)
        self._graphs = [SizedModule(graph, numbers) for graph in graphs]
        self.codes, self.holds = numbers.codes(), numbers.holds()

    def compiled(self, backend: str) -> SizedPhases:
        return SizedPhases(self.program, self._ends, self.symbols, backend)

    def rank_program(self, numbers: Sequence[Any]) -> RankProgram:
        return replace(self.program, split=self.graphs(numbers)[0])

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
    code: Taking
    tangents: Values

    def at(self, numbers: Sequence[Any]) -> CompiledBackward:
        return CompiledBackward(self.graph, self.code.at(numbers), self.slots, self.tangents.at(numbers))


class PhaseCodeAt(PhaseCode):
    """`SizedPhases` for some sizes. A backward that it has no code for runs op by op, for these alone."""

    def __init__(self, code: SizedPhases, numbers: Sequence[Any]) -> None:
        self._code, self._numbers, self._backend = code, numbers, "eager"
        self.phases, self.backend, self.ends = code.phases, code.backend, code.ends.at(numbers)
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

    def program(self, home: Home, around: Around) -> CallProgram:
        return self._run(self, home, around)

    def alone(self, home: Home, around: Around, backend: str) -> CallProgram:
        """The same, compiled for these sizes alone."""
        code = PhaseCode(self._program, backend)
        _ = code.forward
        if self._code.backward is not None:
            code.backward(self._code.backward.missing)
        return self._run(code, home, around)

    def _run(self, code: PhaseCode, home: Home, around: Around) -> CallProgram:
        rank = home.mesh.get_rank()
        return Program(code, self.ends.inputs, home.spec, rank, home.observers, around)

    def seen(self, backward: Backward | None) -> Phases:
        phases, usual = self._graphs
        if self._code.backward is not None and backward is self._code.backward.graph:
            backward = usual
        return phases if backward is None else replace(phases, backward=backward)
