"""What every pass is, and how a sequence of them is run, verified or not."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import fx

from passes.ir.graph_properties import (
    ENDS,
    INVARIANTS,
    RANK_INVARIANTS,
    BrokenGraphError,
    HasGraph,
    Kept,
    Property,
)
from passes.ir.joint import JointGraph

G = TypeVar("G", bound=HasGraph)


@dataclass(frozen=True)
class Pass(ABC, Generic[G]):
    """A rewrite of a graph. Its fields are its options; its name is its class in kebab-case.

    requires: properties of the graph that it is given.
    ensures:  properties of the graph that it returns. They hold until a pass says that it breaks them.
    breaks:   properties that may hold before and not after.
    keeps:    what it does not change.

    A pass owns the graph it is given and may rewrite it in place; copy first to keep the original.
    """

    requires: ClassVar[tuple[Property[Any], ...]] = ()
    ensures: ClassVar[tuple[Property[Any], ...]] = ()
    breaks: ClassVar[tuple[Property[Any], ...]] = ()
    keeps: ClassVar[tuple[Kept[Any], ...]] = ()

    @property
    def name(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    @abstractmethod
    def __call__(self, graph: G, /) -> G: ...


@dataclass(frozen=True)
class GraphPass(Pass[JointGraph]):
    """A rewrite of a joint graph. `passes.ir.graph_properties` says what holds before and after every one.

    Beyond that, and not checked: outputs and gradients are the same functions of the inputs, rounding aside.
    """

    keeps = (ENDS,)


@dataclass(frozen=True)
class RankPass(Pass[fx.GraphModule]):
    """A rewrite of one rank's forward or backward. `passes.ir.graph_properties` says what holds before and after."""


def run_passes(joint: JointGraph, passes: Iterable[GraphPass]) -> JointGraph:
    """`joint` after `passes`. With AUTOSHARD_VERIFY=1 in the environment every graph on the way is checked.

    Raises BrokenGraphError, then, naming the pass, the property, the node and its source line.
    """
    return _runner()(joint, tuple(passes), INVARIANTS)


def run_rank_passes(module: fx.GraphModule, passes: Iterable[RankPass]) -> fx.GraphModule:
    """`run_passes` for one rank's graph."""
    return _runner()(module, tuple(passes), RANK_INVARIANTS)


def properties_after(graph_pass: Pass[Any], before: Sequence[Property[Any]]) -> tuple[Property[Any], ...]:
    """What holds after a pass, of what held before it and what it ensures."""
    kept = [held for held in before if held not in graph_pass.breaks and held not in graph_pass.ensures]
    return (*kept, *graph_pass.ensures)


def _runner() -> Callable[[G, Sequence[Pass[G]], Sequence[Property[G]]], G]:
    return _verified if os.environ.get("AUTOSHARD_VERIFY") == "1" else _plain


def _plain(graph: G, passes: Sequence[Pass[G]], invariants: Sequence[Property[G]]) -> G:
    for graph_pass in passes:
        graph = graph_pass(graph)
    return graph


def _verified(graph: G, passes: Sequence[Pass[G]], invariants: Sequence[Property[G]]) -> G:
    """`_plain`, with the invariants, all that was ensured and not broken, and what is kept, checked after each."""
    held: tuple[Property[Any], ...] = ()
    for first, graph_pass in enumerate(passes):
        required = graph_pass.requires if first else (*invariants, *graph_pass.requires)
        _check(graph, required, f"{graph_pass.name} requires")
        before = [(kept, kept.lines(graph)) for kept in graph_pass.keeps]
        graph = graph_pass(graph)
        held = properties_after(graph_pass, held)
        _check(graph, (*invariants, *held), f"{graph_pass.name} breaks")
        for kept, lines in before:
            change = kept.change(lines, kept.lines(graph))
            if change is not None:
                raise _error(f"{graph_pass.name} keeps", kept.name, change)
    return graph


def _check(graph: G, properties: Sequence[Property[G]], what: str) -> None:
    for stated in properties:
        violation = stated.violation(graph)
        if violation is not None:
            raise _error(what, stated.name, violation)


def _error(what: str, name: str, violation: str) -> BrokenGraphError:
    return BrokenGraphError(
        f"{what}: {name}\n  {violation}\n  try: report this with the model; AUTOSHARD_VERIFY=0 runs without the check"
    )
