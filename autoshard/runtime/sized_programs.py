"""One rank's program for all sizes of a call, or of a piece of one: lowered and compiled with symbols for sizes, run on
their values.

Where a piece begins and how many samples it has are sizes of their own (`passes.micro_batches.cut_batch`), so that
one program is that of all pieces, even and uneven ones, as far as what was asked of sizes holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_fits import axes_in
from autoshard.plan.sized_parts import InSymbols, SizedPlan, may_mix
from autoshard.runtime.beside import Beside, compiling
from autoshard.runtime.call_program import Around, CallProgram
from autoshard.runtime.compiled_pieces import PiecesRun, call_gradients, program_in_pieces
from autoshard.runtime.executable import Home
from autoshard.runtime.leaves import Compiler, PieceCode, PiecesOnRank, RankSides
from autoshard.runtime.making import Call, ends_of, lowered_stages, lowered_whole, staging_of
from autoshard.runtime.pipeline_program import Staging, pipeline_gradients
from autoshard.runtime.pipeline_stage import StageOnRank, StageRun
from autoshard.runtime.process_groups import groups_for, local_device
from autoshard.runtime.sized_code import (
    CompilerAt,
    CompileSized,
    Lowered,
    PhaseCodeAt,
    SizedCode,
    SizedCompiler,
    SizedPhases,
)
from autoshard.watching.agreement import collectively, everyones
from cost_model.errors import log
from passes.compile.compile_graph import compile_sized
from passes.ir.joint import GraphInput
from passes.ir.process_state import collector_paused
from passes.ir.sized_graph import Looks, Numbers, Sized, SizedJoint, SizedModule
from passes.ir.torch_sizes import Evaluation, SizeSymbols, evaluation, symbolic_sizes
from passes.layout.layout import Layout
from passes.lower.rank_program import RankProgram
from passes.micro_batches.cut_batch import PieceSizes


class _SizedPiece:
    """A rank's program of a piece, of the whole model or of a stage."""

    def __init__(self, pieces: PiecesOnRank, numbers: Numbers, compile_: SizedCompiler) -> None:
        self.pieces, self._compile = pieces, compile_
        (code,) = pieces.codes
        self._parts = code.parts
        self._cut = Sized((code.parts.given, code.parts.left), numbers)
        self._looks = Sized([value for *_, value in pieces.placeholders()], numbers)
        self._module = SizedModule(pieces.programs[0].local.module, numbers)

    def code(self, numbers: Sequence[Any]) -> PieceCode:
        given, left = self._cut.at(numbers)
        return PieceCode(replace(self._parts, given=given, left=left), CompilerAt(self._compile, numbers))

    def looks(self, numbers: Sequence[Any]) -> list[Tensor]:
        """Of the placeholders."""
        return self._looks.at(numbers)

    def program(self, numbers: Sequence[Any]) -> RankProgram:
        program = self.pieces.programs[0]
        module = self._module.at(numbers, Looks(self._module.looks, numbers))
        return replace(program, local=replace(program.local, module=module))


AtNumbers = tuple[_SizedPiece, Sequence[Any]]


class _PiecesAt(PiecesOnRank):
    """All pieces of a call of some sizes. early: of the same without gradients."""

    def __init__(self, found: Sequence[AtNumbers], early: Sequence[AtNumbers]) -> None:
        self._found, self._early = found, early
        pieces = found[0][0].pieces
        self.inputs, self.outputs, self.reads = pieces.inputs, pieces.outputs, pieces.reads
        self._names = [name for _, name, _ in pieces.placeholders()]

    @property
    def count(self) -> int:
        return len(self._found)

    @cached_property
    def programs(self) -> tuple[RankProgram, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(one.program(numbers) for one, numbers in self._found)

    @cached_property
    def codes(self) -> list[PieceCode]:
        return [one.code(numbers) for one, numbers in self._found]

    def placeholders(self, piece: int = 0) -> list[tuple[GraphInput, str, Tensor]]:
        one, numbers = self._found[piece]
        return list(zip(self.inputs, self._names, one.looks(numbers), strict=True))

    def without_gradients(self) -> PiecesOnRank:
        return _PiecesAt(self._early, ())


class SizedPieces(SizedCode):
    """Of a piece."""

    def _compile_all(self, numbers: Numbers) -> None:
        lowered, compile_ = self.lowered, self.compile_
        pieces = [PiecesOnRank([program], lowered.pieces, compile_) for program in lowered.programs]
        staging = lowered.staging
        if staging is None:
            gradients = call_gradients(pieces[0])
        else:
            gradients = pipeline_gradients(staging.ends, staging.on_rank(pieces))
        self.stages = [_SizedPiece(one, numbers, compile_) for one in pieces]
        self.early = (
            []
            if gradients.has_loss
            else [_SizedPiece(one.without_gradients(), numbers, compile_) for one in pieces]
        )
        for place, one in (*enumerate(self.stages), *enumerate(self.early)):
            if staging is None:
                PiecesRun(one.pieces.codes).prepare()
            else:
                StageRun(StageOnRank(staging.graphs[place], one.pieces)).prepare_for(staging.schedule)
        self.ends = Sized(lowered.ends, numbers)
        self._met = None if staging is None else Sized(staging.ends, numbers)

    def rank_program(self, numbers: Sequence[Any]) -> RankProgram:
        return self.stages[0].program(numbers)

    def staging(self, numbers: Sequence[Any]) -> Staging | None:
        """Where the call meets the stages."""
        if self.lowered.staging is None or self._met is None:
            return None
        return replace(self.lowered.staging, ends=self._met.at(numbers))


class _PiecesCodeAt:
    """What runs a call of some sizes. found: of every piece its code, and the numbers that this takes."""

    def __init__(self, found: Sequence[tuple[SizedPieces, Sequence[Any]]]) -> None:
        (first, numbers), *_ = self._found = found
        self.backend = first.backend if len({code.backend for code, _ in found}) == 1 else "eager"
        self.ends = first.ends.at(numbers)
        self._staging, self._pieces = first.staging(numbers), first.lowered.pieces
        every = range(len(first.stages))
        early = lambda i: [(code.early[i], numbers) for code, numbers in found] if first.early else []
        self.stages = [_PiecesAt([(code.stages[i], n) for code, n in found], early(i)) for i in every]

    def program(self, home: Home, around: Around) -> CallProgram:
        return self._run(self.stages, home, around)

    def alone(self, home: Home, around: Around, backend: str) -> CallProgram:
        compile_ = Compiler(backend)
        pieces = [PiecesOnRank(one.programs, self._pieces, compile_) for one in self.stages]
        return self._run(pieces, home, around)

    def _run(self, pieces: Sequence[PiecesOnRank], home: Home, around: Around) -> CallProgram:
        if self._staging is not None:
            return self._staging.program(pieces, home.stage_clocks, around)
        ours = RankSides(self.ends.inputs, home.spec, home.mesh.get_rank())
        return program_in_pieces(pieces[0], ours, local_device(home.mesh), home.observers, around)


def code_of(lowered: Lowered, symbols: SizeSymbols, compile_as: CompileSized = compile_sized) -> SizedCode:
    kind = SizedPhases if lowered.staging is None and lowered.pieces == 1 else SizedPieces
    return kind(lowered, symbols, compile_as=compile_as)


_CodeAt = PhaseCodeAt | _PiecesCodeAt


@dataclass(frozen=True)
class Agreed:
    """Code, and of values of its sizes the numbers that it takes; None where something does not hold that was asked on
    some rank."""

    code: SizedCode
    evaluate: Evaluation

    def numbers(self, values: Sequence[int]) -> Sequence[Any] | None:
        return self.evaluate(values) if len(values) == len(self.code.symbols.sizes) else None


def _agreed(home: Home, make: Callable[[], SizedCode], what: str) -> Agreed | None:
    """What every rank makes; None where some rank cannot. All ranks together."""
    made = lambda: _if_there_is(collector_paused()(symbolic_sizes()(make)))
    code = collectively(home.mesh, made, what=what)
    asked = everyones(home.mesh, None if code is None else code.holds, what="what holds of sizes")
    known = [holds for holds in asked if holds is not None]
    if code is None or len(known) < len(asked):
        return None
    holds = list(dict.fromkeys(itertools.chain.from_iterable(known)))
    return Agreed(code, evaluation(len(code.symbols.sizes), holds, code.codes))


T = TypeVar("T")


def _if_there_is(make: Callable[[], T]) -> T | None:
    """None where a pass, or a compiler, wants numbers."""
    try:
        return make()
    except Exception as error:
        log.debug("no program for all sizes: %s", error, exc_info=True)
        return None


class SizedProgram:
    """A program for all sizes: op by op at first, compiled from its third call on, beside the steps if these are tuned
    there. number: the same on all ranks. inputs: layouts of those that ranks pass parts of. codes: of a batch in pieces
    one for each of which other things hold. is_settled: whether nothing more will be compiled for all sizes."""

    def __init__(
        self, number: int, sized: SizedPlan, inputs: Mapping[int, Layout], codes: Sequence[Agreed]
    ) -> None:
        self.number, self.plan, self.inputs, self.codes = number, sized.plan, inputs, list(codes)
        self._cut, self._plans = sized.cut, [sized.plan]
        self._begin()

    def _begin(self) -> None:
        self.is_settled = False
        self._calls, self._due = 0, MOST_EAGER + 1
        self._beside: Beside | None = None

    def takes(self, sized: SizedPlan, inputs: Mapping[int, Layout]) -> bool:
        """Whether pieces of another plan may run beside those of this one."""
        alike = all(may_mix(sized.plan, plan) for plan in self._plans)
        return sized.cut is not None and self.inputs == inputs and alike

    def add(self, sized: SizedPlan, codes: Sequence[Agreed]) -> None:
        self.end()
        self._plans.append(sized.plan)
        self.codes += codes
        self._begin()

    def at(self, sizes: Sequence[int]) -> _CodeAt | None:
        """None where something does not hold of them. The same on all ranks."""
        found = self.found(sizes)
        if found is None:
            return None
        known: Any = [(one.code, one.numbers(values)) for one, values in found]
        return PhaseCodeAt(*known[0]) if isinstance(known[0][0], SizedPhases) else _PiecesCodeAt(known)

    def found(self, sizes: Sequence[int]) -> list[tuple[Agreed, tuple[int, ...]]] | None:
        """Of every piece its code, and the values of its sizes; None where there is none of some piece."""
        pieces = [PieceSizes.of_whole(sizes)] if self._cut is None else self._cut.pieces(sizes)
        found: list[tuple[Agreed, tuple[int, ...]]] = []
        for values in [one.values for one in pieces or ()]:
            if (one := first_that_takes(values, self.codes)) is None:
                return None
            found.append((one, values))
        return found or None

    def called(self, home: Home, kind: str) -> None:
        """Op by op, once more, for any sizes. All ranks come here together."""
        self._calls += 1
        if self.is_settled or self._calls < self._due:
            return
        backend = home.settings.backend
        if home.settings.tune == "background" and not self._is_compiled_beside(home):
            # Calls after which ranks ask each other again how far they are.
            self._due += min(self._calls, 64)
            return
        with home.stages("compiling the plan", (kind, backend)):
            run = lambda code: code if code.backend == backend else code.compiled(backend)
            made = [_agreed(home, lambda one=one: run(one.code), "compiling a plan") for one in self.codes]
        compiled = [one for one in made if one is not None]
        all_of_them = len(compiled) == len(made)
        self.codes, self.is_settled = compiled if all_of_them else self.codes, True
        if not all_of_them:
            log.info("%s compiles no program for all sizes, but each for itself", backend)

    def _is_compiled_beside(self, home: Home) -> bool:
        """Whether it is in the compiler's cache, on all ranks."""
        if self._beside is None:
            backend, codes = home.settings.backend, [one.code for one in self.codes]
            self._beside = compiling(home, symbolic_sizes()(lambda: [one.compiled(backend) for one in codes]))
        self._beside.news()
        return all(everyones(home.mesh, self._beside.ended, what="whether a program is compiled"))

    def end(self) -> None:
        """What goes on beside the steps."""
        if self._beside is not None:
            self._beside.end()


MOST_EAGER = 2
"""Calls that run op by op: a last, smaller batch comes once an epoch, and compiling it takes longer than running it."""


Make = Callable[[int, PieceSizes], Agreed | None]


def first_that_takes(values: Sequence[int], codes: Sequence[Agreed]) -> Agreed | None:
    return next((one for one in codes if one.numbers(values) is not None), None)


def with_code(
    number: int, sized: SizedPlan, inputs: Mapping[int, Layout], known: Sequence[SizedProgram], make: Make
) -> SizedProgram | None:
    """The program of a plan, or one of `known` to which code is added; None where there is none. make: code of the
    piece at an index."""
    same = next((one for one in known if one.takes(sized, inputs)), None)
    codes: list[Agreed] = []
    for index, piece in reversed(list(enumerate(sized.pieces))):
        if first_that_takes(piece.values, [*codes, *(same.codes if same else ())]) is not None:
            continue
        # Of pieces, each with code of its own: even and uneven ones, the first and later ones.
        if len(codes) == 4 or (made := make(index, piece)) is None:
            return None
        codes.append(made)
    if same is None:
        return SizedProgram(number, sized, inputs, codes)
    same.add(sized, codes)
    return same


def sized_program(
    call: Call,
    number: int,
    joint: SizedJoint,
    values: Sequence[int],
    plan: Plan,
    known: Sequence[SizedProgram] = (),
) -> SizedProgram | None:
    """`with_code` of a graph in symbols; None where some rank has none. All ranks come here together.

    values: of the sizes of `call`, which is planned: as these they count. The plan's layouts and transfers are those of
    all sizes for which the same holds: whatever making the program asked of sizes comes out alike for them on every
    rank."""
    home, base = call.home, call.cut(plan).joint
    # All ranks make groups and meshes together.
    groups_for(home.mesh, sorted({axes for stage in plan.stages for axes in axes_in(stage)}))
    call.ends(plan)
    cut = lambda: SizedPlan.of(joint, values, plan, call.whole.joint, base)
    # Whether it can be: alike on all ranks, as the graph is of the whole model.
    if (sized := collectively(home.mesh, lambda: _if_there_is(cut), what="cutting a batch")) is None:
        return None
    lower = lambda index, piece: _lowered(call, sized.of_piece(index, piece))
    make = lambda index, piece: _agreed(home, lambda: lower(index, piece), "lowering a plan")
    return with_code(number, sized, call.layouts.inputs, known, make)


def _lowered(call: Call, one: InSymbols) -> SizedCode:
    home, plan, staging = call.home, one.plan, None
    if isinstance(plan, PipelinePlan):
        staging = staging_of(home.mesh, one.graph, plan, [graph for graph, _ in one.stages])
        ours = lowered_stages(home, staging, [stage for _, stage in one.stages])
    else:
        ours = [lowered_whole(home, one.graph, plan)]
    programs = [program for (program,) in ours]
    ends = ends_of(home.mesh, one.graph, call.layouts, plan)
    return code_of(Lowered(programs, one.graph.pieces, ends, staging), one.symbols)
