"""Graphs of calls that differ in sizes alone: captured once with symbols for sizes, and read off for others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from autoshard.global_call import GlobalCall
from autoshard.plan.plan import Plan
from autoshard.plan.sized_parts import is_for_sizes
from autoshard.runtime.call_program import Around, CallProgram, Checks
from autoshard.runtime.executable import Home, MadeAhead, Running
from autoshard.runtime.guards import Guards
from autoshard.runtime.making import Call, prepared
from autoshard.runtime.module import Mode
from autoshard.runtime.sized_programs import MOST_EAGER, SizedProgram, sized_program
from autoshard.watching.agreement import collectively, everyones
from autoshard.watching.check_calls import kind_text, turns_of
from cost_model.errors import log
from passes.capture import Captured, flatten_call
from passes.ir.size_names import Dim, Shapes, SizeNames
from passes.ir.sized_graph import SizedJoint, alike
from passes.ir.torch_sizes import SizesLost
from passes.layout.layout import Layout

CaptureAs = Callable[..., Captured]
"""Captures a call. sizes: its shapes in symbols (`canonical_capture`)."""

_ATTEMPTS = 3


def _kind_of(model: nn.Module, whole: GlobalCall) -> tuple[Hashable, Shapes]:
    """(what calls have in common that differ in sizes alone, their sizes)."""
    _, key = flatten_call(whole.args, whole.kwargs)
    looks = tuple((len(t.shape), t.dtype, t.requires_grad, t.placements, t.lies) for t in key.tensors)
    return (Mode(model).key(), key.tree, looks), [t.shape for t in key.tensors]


@dataclass
class SizedCall:
    """A call captured with symbols. guards: what its graph depends on in the model. fixes: which of its sizes the model
    fixes, as one that is unrolled over a sequence does. failures: to make a program of it, the same on all ranks."""

    names: SizeNames
    captured: Captured
    joint: SizedJoint
    guards: Guards
    fixes: Sequence[bool]
    programs: list[SizedProgram] = field(default_factory=list)
    failures: int = 0

    def ready(
        self, shapes: Shapes, layouts: Mapping[int, Layout]
    ) -> tuple[SizedProgram, tuple[int, ...]] | None:
        """(the program for these shapes, their sizes)."""
        if not self.programs or (values := self.names.values(shapes)) is None or not self.guards.hold():
            return None
        fits = lambda one: one.inputs == layouts and one.found(values) is not None
        return next(((one, values) for one in self.programs if fits(one)), None)

    def at(self, shapes: Shapes) -> tuple[Captured, SizedAt] | None:
        if (values := self.names.values(shapes)) is None or (joint := self.joint.at(values)) is None:
            return None
        return replace(self.captured, joint=joint), SizedAt(self, values)


@dataclass(frozen=True)
class SizedAt:
    """A call captured with symbols, and sizes for which it is."""

    call: SizedCall
    values: tuple[int, ...]


class AtSizes(MadeAhead):
    """A program for all sizes, for those of one call. It runs op by op until that program is compiled; where it is not
    for these sizes, they are compiled for alone."""

    is_remade = True

    def __init__(
        self, home: Home, whole: GlobalCall, sized: SizedCall, program: SizedProgram, values: tuple[int, ...]
    ) -> None:
        self.guards, self._home, self._program, self._values = sized.guards, home, program, values
        shown = [str(key) for key in flatten_call(whole.args, whole.kwargs)[1].tensors]
        text = f"program {program.number} for sizes {values}"
        self._kind = kind_text(home.model, shown, sized.captured.joint, text)
        self._around = Around(turns_of(home.watch, self._kind), Checks(sized.captured.call))
        code = program.at(values)
        assert code is not None
        self._alone = partial(code.alone, home, self._around)
        run = code.program(home, self._around)
        super().__init__(Running(sized.captured, code.ends, run, program.plan), None)
        self._is_final = code.backend == home.settings.backend

    def next(self) -> Running:
        if not self._is_final and (program := self._compiled()) is not None:
            self.running, self._is_final = replace(self.running, program=program), True
        return self.running

    def _compiled(self) -> CallProgram | None:
        """None: not yet."""
        self._calls += 1
        home, backend = self._home, self._home.settings.backend
        self._program.called(home, self._kind)
        code = self._program.at(self._values)
        if code is not None and code.backend == backend:
            return code.program(home, self._around)
        if not self._program.is_settled or self._calls <= MOST_EAGER:
            return None
        with home.stages("compiling the plan", (self._kind, backend)):
            return collectively(home.mesh, lambda: prepared(self._alone(backend)), what="compiling a plan")


@dataclass
class _Kind:
    """first: the first call, and its shapes. attempts: left to capture one with symbols, until one serves another."""

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
                for program in sized.programs:
                    program.end()
                sized.programs.clear()
        self._programs = 0

    def added(
        self, call: Call, whole: GlobalCall, sized: SizedAt | None, planned: Callable[[], Plan]
    ) -> AtSizes | None:
        """What runs `call` by a new program for all sizes, if there can be one. planned: its plan. All ranks come here
        together."""
        # To make a program of a graph in symbols: more of them would fail as well.
        may_be = sized is not None and sized.call.failures < 2
        if not all(everyones(call.home.mesh, may_be, what="whether there are symbols for sizes")):
            return None
        assert sized is not None
        plan, program = planned(), None
        if is_for_sizes(plan):
            known = sized.call.programs
            program = sized_program(call, self._programs, sized.call.joint, sized.values, plan, known)
        if program is None:
            sized.call.failures += 1
            return None
        if program.number == self._programs:  # a new one
            sized.call.programs.append(program)
            self._programs += 1
        return AtSizes(call.home, whole, sized.call, program, sized.values)

    def ready(self, home: Home, whole: GlobalCall | None) -> AtSizes | None:
        """What runs a call by a program there is, if all ranks have that one."""
        found = None if whole is None else self.known(home.model, whole)
        name = None if found is None else (found[1].number, found[2])
        agreed = everyones(home.mesh, name, what="a program for other sizes")
        if whole is None or found is None or any(one != name for one in agreed):
            return None
        return AtSizes(home, whole, *found)

    def known(
        self, model: nn.Module, whole: GlobalCall
    ) -> tuple[SizedCall, SizedProgram, tuple[int, ...]] | None:
        """Of a call: its graph, the program for it, and its sizes; None where there is none."""
        kind, shapes = _kind_of(model, whole)
        for sized in self._kinds[kind].sized if kind in self._kinds else ():
            if (found := sized.ready(shapes, whole.layouts)) is not None:
                self._kinds[kind].attempts = _ATTEMPTS
                return sized, *found
        return None

    def captured(
        self, model: nn.Module, whole: GlobalCall, capture: CaptureAs, dynamic: Collection[Dim] = ()
    ) -> tuple[Captured, SizedAt | None]:
        """The graph of a call: of the first of its kind by a capture, of the second by one with symbols, and of the
        others by what that says of their sizes. dynamic: dims that are symbols at once."""
        kind, shapes = _kind_of(model, whole)
        known = self._kinds.setdefault(kind, _Kind())
        known.sized = [one for one in known.sized if one.guards.hold()]
        for one in known.sized:
            if (found := one.at(shapes)) is not None:
                known.attempts = _ATTEMPTS
                return found
        plain: Captured | None = None
        if known.first is not None:
            names = SizeNames.of(known.first[1], shapes)
        else:
            names = SizeNames.given(shapes, dynamic)
            plain = _plain(known, shapes, capture) if names.count else None
        if known.first is not None and known.attempts and (plain is not None or known.first[1] != shapes):
            known.attempts -= 1
            first = known.first
            try:
                found = self._with_symbols(model, names, known, shapes, capture)
                known.sized.append(found[1].call)
                # Other lengths of what is unrolled have graphs of their own, each for all batches.
                known.attempts += any(found[1].call.fixes) and not all(found[1].call.fixes)
                return found
            except Exception as error:  # whatever code says to a number that is a symbol
                level = logging.DEBUG if plain is None else logging.WARNING
                log.log(level, "no graph for all sizes, each is captured by itself: %s", error)
            if known.first is not first:  # captured meanwhile, to compare with
                plain = known.first[0]
            if known.attempts and not known.sized:
                known.attempts -= 1
        return plain or _plain(known, shapes, capture), None

    def _with_symbols(
        self, model: nn.Module, names: SizeNames, known: _Kind, shapes: Shapes, capture: CaptureAs
    ) -> tuple[Captured, SizedAt]:
        """Only where it says of a call that was captured what that capture said."""
        values = names.values(shapes)
        assert values is not None and known.first is not None
        before, before_shapes = known.first
        symbolic = names.symbolic(values)
        captured = capture(sizes=symbolic)
        same = lambda other: replace(captured.call, key=other.call.key) == other.call
        if not same(before):
            # The first call of all may fill a cache, that others find.
            before, before_shapes = _plain(known, shapes, capture), shapes
        if not same(before):
            raise SizesLost("what the call returns or changes depends on them")
        joint = SizedJoint(symbolic.symbols, names.count, captured.joint)
        sized = SizedCall(names, captured, joint, Guards(model, captured.reads), symbolic.symbols.are_fixed)
        found, there = sized.at(shapes), sized.at(before_shapes)
        if there is None:
            before, there = capture(), found
        if found is None or there is None or not alike(before.joint, there[0].joint):
            raise SizesLost("the model computes something else at each")
        return found


def _plain(kind: _Kind, shapes: Shapes, capture: CaptureAs) -> Captured:
    """The graph of these sizes alone."""
    found = capture()
    if not found.call.checks:
        kind.first = found, shapes
    return found
