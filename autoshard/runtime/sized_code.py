"""A rank's code in symbols for sizes, and what it is for values of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from torch import Tensor, fx

from autoshard.runtime.call_program import Around, CallProgram
from autoshard.runtime.executable import Home
from autoshard.runtime.leaves import CallEnds, Compiler, Like, RankSides
from autoshard.runtime.pipeline_program import Staging
from autoshard.runtime.step import CompiledBackward, PhaseCode, Program
from passes.compile.compile_graph import Compiled, compile_sized
from passes.ir.sized_graph import Looks, Numbers, Sized, SizedModule
from passes.ir.torch_sizes import SizeSymbols
from passes.lower.phases import Backward, BackwardHalves, Phases, split_backward
from passes.lower.rank_program import RankProgram

CompileSized = Callable[..., tuple[Compiled, list[Any]]]
"""As `compile_sized`."""


class SizedCompiler:
    """Compiles graphs in symbols, which are told apart by which object they are, for `CompilerAt`."""

    def __init__(
        self, symbols: SizeSymbols, numbers: Numbers, backend: str, compile_as: CompileSized
    ) -> None:
        self.joins = backend == "eager"
        self._given = symbols, numbers, backend, compile_as
        self.known: dict[object, tuple[fx.GraphModule, Compiled, Sized[tuple[list[Any], list[Tensor]]]]] = {}
        self._halves: dict[object, tuple[Backward, BackwardHalves]] = {}

    def __call__(self, module: fx.GraphModule, adding: Sequence[int] = ()) -> tuple[Compiled, Like]:
        symbols, numbers, backend, compile_as = self._given
        values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        results: Any = module.graph.output_node().args[0]
        values += [results[place].meta["val"] for place in adding]
        run, taken = compile_as(module, symbols, backend, adding)
        self.known[id(module), tuple(adding)] = module, run, Sized((taken, values), numbers)
        return _not_run, ()

    def halves(self, backward: Backward, first: Collection[str]) -> BackwardHalves:
        key = id(backward), frozenset(first)
        if key not in self._halves:
            self._halves[key] = backward, split_backward(backward, first)
        return self._halves[key][1]


def _not_run(inputs: list[Tensor]) -> Sequence[Tensor]:
    raise AssertionError("code in symbols is for no call")


@dataclass(frozen=True)
class CompilerAt:
    """The graphs that `made` has compiled, for some sizes."""

    made: SizedCompiler
    numbers: Sequence[Any]

    @property
    def joins(self) -> bool:
        return self.made.joins

    def __call__(self, module: fx.GraphModule, adding: Sequence[int] = ()) -> tuple[Compiled, Like]:
        _, run, sized = self.made.known[id(module), tuple(adding)]
        taken, like = sized.at(self.numbers)

        def compiled(inputs: list[Any]) -> Sequence[Tensor | None]:
            inputs.extend(taken)  # into the list itself: it is emptied as the graph runs
            return run(inputs)

        return compiled, like

    def halves(self, backward: Backward, first: Collection[str]) -> BackwardHalves:
        return self.made.halves(backward, first)


@dataclass(frozen=True)
class Lowered:
    """In symbols. programs: of the whole model, or of each of this rank's stages; of one piece. pieces: of the graphs
    that they are of. ends: where they meet the caller. staging: of a pipeline."""

    programs: Sequence[RankProgram]
    pieces: int
    ends: CallEnds
    staging: Staging | None = None


class SizedCode(ABC):
    """A rank's code in symbols, compiled: that of a whole batch, `SizedPhases`, or of a piece.

    codes: how what depends on sizes is computed. holds: what was asked of the sizes on this rank."""

    def __init__(
        self,
        lowered: Lowered,
        symbols: SizeSymbols,
        backend: str = "eager",
        compile_as: CompileSized = compile_sized,
    ) -> None:
        self.lowered, self.symbols, self.backend, self._compile_as = lowered, symbols, backend, compile_as
        numbers = Numbers(symbols)
        self.compile_ = SizedCompiler(symbols, numbers, backend, compile_as)
        self._compile_all(numbers)
        self.codes, self.holds = numbers.codes(), numbers.holds()

    @abstractmethod
    def _compile_all(self, numbers: Numbers) -> None: ...

    @abstractmethod
    def rank_program(self, numbers: Sequence[Any]) -> RankProgram: ...

    def compiled(self, backend: str) -> Self:
        return type(self)(self.lowered, self.symbols, backend, self._compile_as)


class SizedPhases(SizedCode):
    """met: where the phases meet the caller, and how the forward's inputs and the backward's tangents look."""

    def _compile_all(self, numbers: Numbers) -> None:
        (self.program,) = self.lowered.programs
        self.code = PhaseCode(self.program, self.compile_)
        deque(self.code.prepared(), maxlen=0)
        phases, usual = self.program.phases, self.code.backwards.values()
        graphs = [phases.forward, *(one.module for one in (phases.backward, *usual) if one is not None)]
        self.met = Sized((self.lowered.ends, self.code.values, self.code.tangents), numbers)
        self._graphs = [SizedModule(graph, numbers) for graph in graphs]

    def rank_program(self, numbers: Sequence[Any]) -> RankProgram:
        return replace(self.program, split=self.graphs(numbers)[0])

    def graphs(self, numbers: Sequence[Any]) -> tuple[Phases, Backward | None]:
        """The phases, and the backward of a usual step, for some sizes."""
        looks = Looks([look for graph in self._graphs for look in graph.looks], numbers)
        forward, *modules = [graph.at(numbers, looks) for graph in self._graphs]
        known = [
            one for one in (self.program.phases.backward, *self.code.backwards.values()) if one is not None
        ]
        made = [replace(one, module=module) for one, module in zip(known, modules, strict=True)]
        whole, usual = made or (None, None)
        return replace(self.program.phases, forward=forward, backward=whole), usual


class PhaseCodeAt(PhaseCode):
    """`SizedPhases` for some sizes. A backward that it has no code for runs op by op, for these alone."""

    def __init__(self, code: SizedPhases, numbers: Sequence[Any]) -> None:
        super().__init__(code.program, CompilerAt(code.compile_, numbers))
        self._code, self._numbers, self.backwards = code, numbers, code.code.backwards
        self.backend = code.backend
        self.ends, self.values, self.tangents = code.met.at(numbers)

    @cached_property
    def _graphs(self) -> tuple[Phases, Backward | None]:
        return self._code.graphs(self._numbers)

    def _compiled_by(self, backend: str) -> PhaseCode:
        return PhaseCode(replace(self._code.program, split=self._graphs[0]), Compiler(backend))

    @cached_property
    def _op_by_op(self) -> PhaseCode:
        return self._compiled_by("eager")

    def backward(self, missing: frozenset[int]) -> CompiledBackward:
        return super().backward(missing) if missing in self.backwards else self._op_by_op.backward(missing)

    def seen(self, backward: Backward | None) -> Phases:
        phases, usual = self._graphs
        if backward in self.backwards.values():
            backward = usual
        return phases if backward is None else replace(phases, backward=backward)

    def program(self, home: Home, around: Around) -> CallProgram:
        return self._run(self, home, around)

    def alone(self, home: Home, around: Around, backend: str) -> CallProgram:
        """The same, compiled for these sizes alone."""
        return self._run(self._compiled_by(backend), home, around)

    def _run(self, code: PhaseCode, home: Home, around: Around) -> CallProgram:
        ours = RankSides(self.ends.inputs, home.spec, home.mesh.get_rank())
        return Program(code, ours, home.observers, around)
