"""One rank's program for all sizes of a call: lowered and compiled with symbols for sizes, run on their values."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_fits import axes_in
from autoshard.runtime.beside import Beside, compiling
from autoshard.runtime.executable import Home
from autoshard.runtime.making import Call, ends_of, lowered_stages, lowered_whole, staging_of
from autoshard.runtime.process_groups import groups_for
from autoshard.runtime.sized_code import CodeAt, PhaseCodeAt, SizedCode, SizedPhases
from autoshard.runtime.sized_pieces import LoweredPiece, PiecesCodeAt, SizedPieces
from autoshard.watching.agreement import collectively, everyones
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.ir.sized_graph import SizedJoint
from passes.ir.torch_sizes import Evaluation, SizeSymbols, evaluation, symbolic_sizes
from passes.layout.layout import Layout
from passes.micro_batches.cut_batch import cut_for_stages, piece_places, when_cut
from passes.micro_batches.sized_piece import PieceSizes, SizedCut
from passes.plan.sized_plan import in_symbols
from passes.stages.stage_graphs import stage_graphs

_log = logging.getLogger("autoshard")


def is_for_sizes(plan: Plan) -> bool:
    """Whether a plan may have a program for all sizes: not where it says how many rows a piece of a head has, or a
    rank's part of what goes in or comes out."""
    if plan.head_pieces > 1:
        return False
    ends = (*plan.inputs.values(), *plan.outputs.values())
    return not any(one is not None and one.counts_rows for one in ends)


@dataclass(frozen=True)
class Agreed:
    """Code, and of values of its sizes the numbers that it takes; None where something does not hold that was asked on
    some rank."""

    code: Any
    evaluate: Evaluation

    def numbers(self, values: Sequence[int]) -> Sequence[Any] | None:
        return self.evaluate(values) if len(values) == len(self.code.symbols.sizes) else None


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
    return Agreed(code, evaluation(len(code.symbols.sizes), holds, code.codes))


class SizedProgram:
    """A program for all sizes: op by op at first, compiled from its third call on, beside the steps if these are tuned
    there. number: the same on all ranks. inputs: layouts of those that ranks pass parts of. codes: of a batch in pieces
    one for each of which other things hold. cut: how it is cut. is_settled: whether nothing more will be compiled for
    all sizes."""

    def __init__(
        self,
        number: int,
        plan: Plan,
        inputs: Mapping[int, Layout],
        codes: Sequence[Agreed],
        cut: SizedCut | None = None,
    ) -> None:
        self.number, self.plan, self.inputs, self._agreed, self._cut = number, plan, inputs, codes, cut
        self.is_settled = False
        self._calls, self._due = 0, MOST_EAGER + 1
        self._beside: Beside | None = None

    def at(self, sizes: Sequence[int]) -> CodeAt | None:
        """None where something does not hold of them. The same on all ranks."""
        found = self.numbers(sizes)
        if found is None:
            return None
        code, numbers = found[0]
        return PhaseCodeAt(code, numbers) if isinstance(code, SizedPhases) else PiecesCodeAt(found)

    def numbers(self, sizes: Sequence[int]) -> list[tuple[Any, Sequence[Any]]] | None:
        """Of every piece its code, and the numbers that this takes."""
        pieces = [tuple(sizes)] if self._cut is None else _values(self._cut.pieces(sizes))
        found: list[tuple[Any, Sequence[Any]]] = []
        for values in pieces or ():
            ways = ((one.code, one.numbers(values)) for one in self._agreed)
            found += itertools.islice(((code, n) for code, n in ways if n is not None), 1)
        return found if pieces and len(found) == len(pieces) else None

    def called(self, home: Home, kind: str) -> None:
        """Op by op, once more, for any sizes. All ranks come here together."""
        self._calls += 1
        if self.is_settled or self._calls < self._due:
            return
        backend = home.settings.backend
        if home.settings.tune == "background" and not self._is_compiled_beside(home):
            self._due += min(self._calls, MOST_CALLS)
            return
        with home.stages("compiling the plan", (kind, backend)):
            made = [
                _agreed(home, lambda one=one: one.code.compiled(backend), "compiling a plan")
                for one in self._agreed
            ]
        compiled = [one for one in made if one is not None]
        all_of_them = len(compiled) == len(made)
        self._agreed, self.is_settled = compiled if all_of_them else self._agreed, True
        if not all_of_them:
            _log.info("%s compiles no program for all sizes, but each for itself", backend)

    def _is_compiled_beside(self, home: Home) -> bool:
        """Whether it is in the compiler's cache, on all ranks."""
        if self._beside is None:
            backend, codes = home.settings.backend, [one.code for one in self._agreed]
            self._beside = compiling(home, symbolic_sizes()(lambda: [one.compiled(backend) for one in codes]))
        self._beside.news()
        return all(everyones(home.mesh, self._beside.ended, what="whether a program is compiled"))

    def end(self) -> None:
        """What goes on beside the steps."""
        if self._beside is not None:
            self._beside.end()


MOST_CALLS = 64
"""Calls after which ranks ask each other again how far they are."""
MOST_KINDS = 4
"""Of pieces, each with code of its own: even and uneven ones, the first and later ones."""
MOST_EAGER = 2
"""Calls that run op by op: a last, smaller batch comes once an epoch, and compiling it takes longer than running it."""


def sized_program(
    call: Call, number: int, joint: SizedJoint, values: Sequence[int], plan: Plan
) -> SizedProgram | None:
    """The program of a graph in symbols; None where some rank has none. All ranks come here together.

    values: of the sizes of `call`, which is planned: as these they count. The plan's layouts and transfers are those of
    all sizes for which the same holds: whatever making the program asked of sizes comes out alike for them on every
    rank."""
    home, cut = call.home, None
    groups_for(
        home.mesh, sorted({axes for stage in plan.stages for axes in axes_in(stage)})
    )  # made by all together
    if plan.micro_batches > 1:
        cut = collectively(home.mesh, lambda: _cut(call, joint, values, plan), what="cutting a batch")
        if cut is None:
            return None
    pieces = [None] if cut is None else cut.pieces(values)
    codes: list[Agreed] = []
    for index, piece in reversed(list(enumerate(pieces or ()))):
        own = tuple(values) if piece is None else piece.values
        if any(one.numbers(own) is not None for one in codes):
            continue
        if len(codes) == MOST_KINDS:
            return None
        make = lambda index=index, piece=piece: _code(call, joint, values, plan, cut, index, piece)
        if (made := _agreed(home, make, "lowering a plan")) is None:
            return None
        codes.append(made)
    return SizedProgram(number, plan, call.layouts.inputs, codes, cut)


def _values(pieces: Sequence[PieceSizes] | None) -> list[tuple[int, ...]] | None:
    return None if pieces is None else [one.values for one in pieces]


def _cut(call: Call, joint: SizedJoint, values: Sequence[int], plan: Plan) -> SizedCut | None:
    """How calls of all sizes are cut; None where that follows from no sizes."""
    try:
        _, times = when_cut(call.whole.joint, plan.micro_batches)
        with symbolic_sizes():
            symbols = SizeSymbols(values)
            graph = joint.at(values, symbols)
            assert graph is not None
            return SizedCut.of(graph, times, symbols)
    except Exception as error:  # alike on all ranks: the graph is of the whole model
        _log.debug("no pieces of all sizes: %s", error, exc_info=True)
        return None


def _code(
    call: Call,
    joint: SizedJoint,
    values: Sequence[int],
    plan: Plan,
    cut: SizedCut | None,
    index: int,
    piece: PieceSizes | None,
) -> SizedCode:
    """Of a whole call, or of a piece of it."""
    home = call.home
    symbols = SizeSymbols(values if piece is None else piece.values)
    graph = joint.at(values, symbols)
    assert graph is not None
    if cut is not None and piece is not None:
        graph = cut.graph(graph, index, piece, symbols)
    base = call.cut(plan).joint
    place = piece_places(base)[index]
    if isinstance(plan, PipelinePlan):
        if cut is None:
            graph = cut_for_stages(graph, 1)
        # Cut as the graph in numbers is.
        of_stages = stage_graphs(replace(base, others=(graph,)), plan.cut)
        graphs = [replace(one, joint=one.joint.others[0]) for one in of_stages]
        staging = staging_of(home.mesh, graph, plan, graphs)
        pairs = zip(plan.stages, graphs, strict=True)
        plans = [_at_place(stage, place, one.joint, staging.ends.spec) for stage, one in pairs]
        programs = [program for (program,) in lowered_stages(home, staging, plans)]
        ends = ends_of(home.mesh, graph, call.layouts, plan)
        return SizedPieces(LoweredPiece(tuple(programs), base.pieces, ends, staging), symbols)
    plan_of_all = _at_place(plan, place, graph, home.spec)
    (program,) = lowered_whole(home, graph, plan_of_all)
    ends = ends_of(home.mesh, graph, call.layouts, plan_of_all)
    if cut is None:
        return SizedPhases(program, ends, symbols)
    return SizedPieces(LoweredPiece((program,), base.pieces, ends), symbols)


def _at_place(plan: Plan, place: int, graph: JointGraph, spec: MeshSpec) -> Plan:
    """The plan of pieces of one size, in symbols."""
    return replace(plan, records=in_symbols(plan.sizes[place], graph, spec), other_sizes=())
