"""Graphs of calls that differ in sizes alone: captured once with symbols for sizes, and read off for others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from autoshard.global_call import GlobalCall
from autoshard.plan.plan import Plan
from autoshard.runtime.call_program import Around, CallProgram, Checks
from autoshard.runtime.executable import Home, Running
from autoshard.runtime.guards import Guards
from autoshard.runtime.leaves import CallEnds
from autoshard.runtime.making import Call
from autoshard.runtime.module import Mode
from autoshard.runtime.sized_programs import PhaseCodeAt, SizedProgram, sized_program
from autoshard.runtime.step import Program
from autoshard.watching.agreement import collectively, everyones
from autoshard.watching.check_calls import kind_text, turns_of
from passes.capture import Captured, flatten_call
from passes.ir.sized_graph import SizedJoint, alike
from passes.ir.torch_sizes import SizeSymbols, SymbolicShapes

_log = logging.getLogger("autoshard")

Shapes = Sequence[tuple[int, ...]]
"""Global shapes of a call's tensors."""
CaptureAs = Callable[..., Captured]
"""Captures a call. sizes: its shapes in symbols (`canonical_capture`)."""

_ATTEMPTS = 3


def _kind_of(model: nn.Module, whole: GlobalCall) -> tuple[Hashable, Shapes]:
    """(what calls have in common that differ in sizes alone, their sizes)."""
    _, key = flatten_call(whole.args, whole.kwargs)
    looks = tuple((len(t.shape), t.dtype, t.requires_grad, t.placements) for t in key.tensors)
    return (Mode(model).key(), key.tree, looks), [t.shape for t in key.tensors]


@dataclass(frozen=True)
class SizeNames:
    """Which dims of a call's tensors are one size: those that were alike in two calls. places: of each tensor, per dim
    which size it is, or the number that it always was."""

    places: tuple[tuple[tuple[str, int], ...], ...]
    count: int

    @staticmethod
    def of(one: Shapes, two: Shapes) -> SizeNames:
        """Dims of 0 or 1 are no sizes: what is done with these is something else."""
        known: dict[tuple[int, int], int] = {}
        place = lambda pair: (
            ("size", known.setdefault(pair, len(known))) if min(pair) > 1 else ("is", pair[1])
        )
        places = [tuple(map(place, zip(a, b, strict=True))) for a, b in zip(one, two, strict=True)]
        return SizeNames(tuple(places), len(known))

    def values(self, shapes: Shapes) -> tuple[int, ...] | None:
        """None where dims differ that were alike."""
        found: dict[int, int] = {}
        for shape, places in zip(shapes, self.places, strict=True):
            for number, (kind, index) in zip(shape, places, strict=True):
                if number != (index if kind == "is" else found.setdefault(index, number)):
                    return None
        return tuple(found[index] for index in range(self.count))

    def symbolic(self, values: Sequence[int]) -> SymbolicShapes:
        symbols = SizeSymbols(values)
        size = lambda place: symbols.sizes[place[1]] if place[0] == "size" else place[1]
        return SymbolicShapes(symbols, [tuple(map(size, places)) for places in self.places])


@dataclass(frozen=True)
class SizedCall:
    """A call captured with symbols. guards: what its graph depends on in the model."""

    kind: Hashable
    names: SizeNames
    captured: Captured
    joint: SizedJoint
    guards: Guards
    programs: list[SizedProgram] = field(default_factory=list)

    def ready(self, shapes: Shapes) -> tuple[SizedProgram, tuple[int, ...], list[Any]] | None:
        """(the program for these shapes, their sizes, what it takes)."""
        if not self.programs or (values := self.names.values(shapes)) is None or not self.guards.hold():
            return None
        for program in self.programs:
            if (numbers := program.evaluate(values)) is not None:
                return program, values, numbers
        return None

    def at(self, shapes: Shapes) -> tuple[Captured, SizedAt] | None:
        values = self.names.values(shapes)
        joint = None if values is None else self.joint.at(values)
        if values is None or joint is None:
            return None
        return replace(self.captured, joint=joint), SizedAt(self, values)


@dataclass(frozen=True)
class SizedAt:
    """A call captured with symbols, and sizes for which it is."""

    call: SizedCall
    values: tuple[int, ...]


@dataclass(frozen=True)
class Ready:
    """A program for all sizes, for those of one call."""

    home: Home
    sized: SizedCall
    program: SizedProgram
    values: tuple[int, ...]
    numbers: list[Any]
    whole: GlobalCall

    @property
    def name(self) -> tuple[int, tuple[int, ...]]:
        return self.program.number, self.values

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def captured(self) -> Captured:
        return self.sized.captured

    @property
    def guards(self) -> Guards:
        return self.sized.guards

    @cached_property
    def ends(self) -> CallEnds:
        return self.program.code.ends(self.numbers)

    @cached_property
    def _code(self) -> PhaseCodeAt:
        return PhaseCodeAt(self.program.code, self.numbers)

    @cached_property
    def _kind(self) -> str:
        shown = [str(key) for key in flatten_call(self.whole.args, self.whole.kwargs)[1].tensors]
        program = f"program {self.program.number} for sizes {self.values}"
        return kind_text(self.home.model, shown, self.captured.joint, program)

    def running(self) -> Running:
        return Running(self.captured, self.ends, self.made("eager"), self.plan)

    def made(self, backend: str) -> CallProgram:
        """Op by op at once; compiled for these sizes alone by another backend, on all ranks together."""
        home, code = self.home, self._code
        if backend != "eager":
            with home.stages("compiling the plan", (self._kind, backend)):
                code = collectively(home.mesh, lambda: self._code.alone(backend), what="compiling a plan")
        around = Around(turns_of(home.watch, self._kind), Checks(self.captured.call))
        return Program(code, self.ends.inputs, home.spec, home.mesh.get_rank(), home.observers, around)


@dataclass
class _Kind:
    """first: the first call, and its shapes. attempts: left to capture one with symbols."""

    first: tuple[Captured, Shapes] | None = None
    sized: list[SizedCall] = field(default_factory=list)
    attempts: int = _ATTEMPTS


class SizedCalls:
    """Of one model."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._programs = 0

    @property
    def has_programs(self) -> bool:
        """The same on all ranks."""
        return self._programs > 0

    def forget_programs(self) -> None:
        """Their graphs stay."""
        for kind in self._kinds.values():
            for sized in kind.sized:
                sized.programs.clear()
        self._programs = 0

    def add_program(self, call: Call, sized: SizedAt, plan: Plan) -> None:
        """One for calls like `call`, if there can be one. All ranks come here together."""
        program = sized_program(call, self._programs, sized.call.joint, sized.values, plan)
        if program is not None:
            sized.call.programs.append(program)
            self._programs += 1

    def ready(self, home: Home, whole: GlobalCall | None) -> Ready | None:
        """What runs a call by a program there is, if all ranks have that one."""
        found = None if whole is None else self._ready(home, whole)
        agreed = everyones(home.mesh, None if found is None else found.name, what="a program for other sizes")
        return found if found is not None and all(one == found.name for one in agreed) else None

    def _ready(self, home: Home, whole: GlobalCall) -> Ready | None:
        found = self.known(home.model, whole)
        return None if found is None else Ready(home, *found, whole)

    def known(
        self, model: nn.Module, whole: GlobalCall
    ) -> tuple[SizedCall, SizedProgram, tuple[int, ...], list[Any]] | None:
        """Of a call: its graph, the program for it, its sizes, and what that takes; None where there is none."""
        kind, shapes = _kind_of(model, whole)
        for sized in self._kinds[kind].sized if kind in self._kinds else ():
            if (found := sized.ready(shapes)) is not None:
                return sized, *found
        return None

    def captured(
        self, model: nn.Module, whole: GlobalCall, capture: CaptureAs
    ) -> tuple[Captured, SizedAt | None]:
        """The graph of a call: of the first of its kind by a capture, of the second by one with symbols, and of the
        others by what that says of their sizes."""
        kind, shapes = _kind_of(model, whole)
        known = self._kinds.setdefault(kind, _Kind())
        known.sized = [one for one in known.sized if one.guards.hold()]
        for one in known.sized:
            if (found := one.at(shapes)) is not None:
                return found
        if known.first is not None and known.attempts and known.first[1] != shapes:
            known.attempts -= 1
            if (found := self._with_symbols(model, kind, known.first, shapes, capture)) is not None:
                known.sized.append(found[1].call)
                return found
            if known.attempts and not known.sized:
                known.attempts -= 1
        found = capture()
        if not found.call.checks:
            known.first = found, shapes
        return found, None

    def _with_symbols(
        self,
        model: nn.Module,
        kind: Hashable,
        first: tuple[Captured, Shapes],
        shapes: Shapes,
        capture: CaptureAs,
    ) -> tuple[Captured, SizedAt] | None:
        """Only where it says of a call that was captured what that capture said."""
        before, before_shapes = first
        names = SizeNames.of(before_shapes, shapes)
        try:
            values = names.values(shapes)
            assert values is not None
            symbolic = names.symbolic(values)
            captured = capture(sizes=symbolic)
            if replace(captured.call, key=before.call.key) != before.call:
                return None
            joint = SizedJoint(symbolic.symbols, names.count, captured.joint)
            sized = SizedCall(kind, names, captured, joint, Guards(model, captured.reads))
            found, there = sized.at(shapes), sized.at(before_shapes)
        except Exception as error:  # whatever code says to a number that is a symbol
            _log.debug("no graph for all sizes: %s", error)
            return None
        if there is None:
            before, there = capture(), found
        if found is None or there is None or not alike(before.joint, there[0].joint):
            return None
        return found
