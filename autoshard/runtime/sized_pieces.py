"""A rank's program of one piece of a batch in symbols, and what runs all pieces of a call of any size by it.

Where a piece begins and how many samples it has are sizes of their own (`passes.micro_batches.sized_piece`), so that
one program is that of all pieces, even and uneven ones, as far as what was asked of sizes holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from autoshard.runtime.call_program import Around, CallProgram
from autoshard.runtime.compiled_pieces import PiecesRun, call_gradients, program_in_pieces
from autoshard.runtime.executable import Home
from autoshard.runtime.leaves import CallEnds
from autoshard.runtime.piece_code import Compiler, PieceCode, PiecesOnRank
from autoshard.runtime.pipeline_program import Staging, pipeline_gradients
from autoshard.runtime.pipeline_stage import StageOnRank, StageRun
from autoshard.runtime.process_groups import local_device
from autoshard.runtime.sized_code import CompilerAt, CompileSized, PhaseCodeAt, SizedCompiler, SizedPhases
from passes.compile.compile_graph import compile_sized
from passes.ir.joint import GraphInput
from passes.ir.sized_graph import Looks, Numbers, Sized, SizedModule
from passes.ir.torch_sizes import SizeSymbols
from passes.lower.rank_program import RankProgram


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


@dataclass(frozen=True)
class LoweredPiece:
    """In symbols. programs: of one piece, of the whole model or of each of this rank's stages. pieces: of the graphs
    that they are of. staging: of a pipeline."""

    programs: Sequence[RankProgram]
    pieces: int
    ends: CallEnds
    staging: Staging | None = None


class SizedPieces:
    """As `SizedPhases`, a piece."""

    def __init__(
        self,
        lowered: LoweredPiece,
        symbols: SizeSymbols,
        backend: str = "eager",
        compile_as: CompileSized = compile_sized,
    ) -> None:
        self.lowered, self.symbols, self.backend = lowered, symbols, backend
        self._compile_as = compile_as
        numbers = Numbers(symbols)
        compile_ = SizedCompiler(symbols, numbers, backend, compile_as)
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
        self._compile_all()
        self.ends = Sized(lowered.ends, numbers)
        self._met = None if staging is None else Sized(staging.ends, numbers)
        self.codes, self.holds = numbers.codes(), numbers.holds()

    def _compile_all(self) -> None:
        staging = self.lowered.staging
        for sized in (self.stages, self.early):
            for place, one in enumerate(sized):
                if staging is None:
                    PiecesRun(one.pieces.codes).prepare()
                else:
                    StageRun(StageOnRank(staging.graphs[place], one.pieces)).prepare_for(staging.schedule)

    def compiled(self, backend: str) -> SizedPieces:
        return SizedPieces(self.lowered, self.symbols, backend, self._compile_as)

    def rank_program(self, numbers: Sequence[Any]) -> RankProgram:
        return self.stages[0].program(numbers)

    def staging(self, numbers: Sequence[Any]) -> Staging | None:
        """Where the call meets the stages."""
        if self.lowered.staging is None or self._met is None:
            return None
        return replace(self.lowered.staging, ends=self._met.at(numbers))


class PiecesCodeAt:
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
        device, rank = local_device(home.mesh), home.mesh.get_rank()
        return program_in_pieces(pieces[0], self.ends.inputs, home.spec, rank, device, home.observers, around)


SizedCode = SizedPhases | SizedPieces
CodeAt = PhaseCodeAt | PiecesCodeAt
