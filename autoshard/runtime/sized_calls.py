"""Graphs of calls that differ in sizes alone: captured once with symbols for sizes, and read off for others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autoshard.runtime.guards import Guards
from autoshard.runtime.sized_programs import SizedProgram
from passes.capture import Captured
from passes.capture.call import CallKey
from passes.ir.sized_graph import SizedJoint, alike
from passes.ir.torch_sizes import SizeSymbols, SymbolicShapes

_log = logging.getLogger("autoshard")

Shapes = Sequence[tuple[int, ...]]
"""Global shapes of a call's tensors."""
CaptureAs = Callable[[SymbolicShapes | None], Captured]
"""Captures a call, with its shapes as they are or in symbols."""

_ATTEMPTS = 3


def structure_of(key: CallKey) -> Hashable:
    """What calls have in common that differ in sizes alone."""
    return key.tree, tuple((len(t.shape), t.dtype, t.requires_grad, t.placements) for t in key.tensors)


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
    symbols: SizeSymbols
    joint: SizedJoint
    guards: Guards
    programs: list[SizedProgram] = field(default_factory=list)

    def ready(self, shapes: Shapes) -> tuple[int, tuple[int, ...], list[Any]] | None:
        """(which program is for these shapes, their sizes, what it takes)."""
        if not self.programs or (values := self.names.values(shapes)) is None or not self.guards.hold():
            return None
        for place, program in enumerate(self.programs):
            if (numbers := program.evaluate(values)) is not None:
                return place, values, numbers
        return None

    def at(self, shapes: Shapes) -> Captured | None:
        values = self.names.values(shapes)
        joint = None if values is None else self.joint.at(values)
        return None if joint is None else replace(self.captured, joint=joint)


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

    @property
    def has_programs(self) -> bool:
        return any(one.programs for known in self._kinds.values() for one in known.sized)

    def of(self, kind: Hashable) -> list[SizedCall]:
        return self._kinds[kind].sized if kind in self._kinds else []

    def captured(
        self, model: nn.Module, kind: Hashable, shapes: Shapes, capture: CaptureAs
    ) -> tuple[Captured, SizedCall | None]:
        """The graph of a call: of the first of its kind by a capture, of the second by one with symbols, and of the
        others by what that says of their sizes. kind: what else decides the graph."""
        known = self._kinds.setdefault(kind, _Kind())
        known.sized = [one for one in known.sized if one.guards.hold()]
        for one in known.sized:
            if (found := one.at(shapes)) is not None:
                return found, one
        if known.first is not None and known.attempts and known.first[1] != shapes:
            known.attempts -= 1
            if (found := self._with_symbols(model, kind, known.first, shapes, capture)) is not None:
                known.sized.append(found[1])
                return found
            if known.attempts and not known.sized:
                known.attempts -= 1
        found = capture(None)
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
    ) -> tuple[Captured, SizedCall] | None:
        """Only where it says of a call that was captured what that capture said."""
        before, before_shapes = first
        names = SizeNames.of(before_shapes, shapes)
        try:
            values = names.values(shapes)
            assert values is not None
            symbolic = names.symbolic(values)
            captured = capture(symbolic)
            if replace(captured.call, key=before.call.key) != before.call:
                return None
            joint = SizedJoint(symbolic.symbols, names.count, captured.joint)
            sized = SizedCall(kind, names, captured, symbolic.symbols, joint, Guards(model, captured.reads))
            found, there = sized.at(shapes), sized.at(before_shapes)
        except Exception as error:  # whatever code says to a number that is a symbol
            _log.debug("no graph for all sizes: %s", error)
            return None
        if there is None:
            before, there = capture(None), found
        if found is None or there is None or not alike(before.joint, there.joint):
            return None
        return found, sized
