"""One compiled program of a call, forward and backward; or, of a batch in pieces, one that runs both at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from autoshard.runtime.call_program import Around, CallGradients, CallProgram
from autoshard.runtime.leaves import CompilesGraphs, Leaves, Like, RankSides, conform, own_outputs
from autoshard.runtime.observe import Observer, PhaseRun, observed
from passes.compile.compile_graph import Compiled
from passes.ir.joint import GraphInput, GraphOutput
from passes.ir.process_state import autocast_off
from passes.lower.phases import Backward, Phases
from passes.lower.rank_program import RankProgram, usually_missing


@dataclass(frozen=True)
class CompiledBackward:
    """graph, its code, which of the saved tensors it takes, and what its tangents look like."""

    graph: Backward
    run: Compiled
    slots: list[int]
    tangents: Like


class PhaseCode:
    """A rank's phases, compiled on first use; the backward for every set of outputs that get no gradient.

    values, tangents: of the placeholders of the forward, and of the backward's tangents."""

    def __init__(self, program: RankProgram, compile_: CompilesGraphs) -> None:
        self._program, self._compile = program, compile_
        self.phases = phases = program.phases
        self.values = placeholder_values(phases.forward)
        self.tangents = tangent_values(phases)
        self.backwards: dict[frozenset[int], Backward] = {}
        self._compiled: dict[frozenset[int], CompiledBackward] = {}

    def prepared(self) -> Iterator[None]:
        """With all that a usual step runs."""
        _ = self.forward
        yield
        if self.phases.backward is not None:
            self.backward(usually_missing(self.phases.backward))
            yield

    @cached_property
    def forward(self) -> Compiled:
        return self._compile(self.phases.forward)[0]

    def backward(self, missing: frozenset[int]) -> CompiledBackward:
        if missing not in self._compiled:
            if missing not in self.backwards:
                self.backwards[missing] = self._program.backward(missing)
            graph = self.backwards[missing]
            slots = slots_of(self.phases, graph)
            run, like = self._compile(graph.module)
            self._compiled[missing] = CompiledBackward(graph, run, slots, like[len(slots) :])
        return self._compiled[missing]

    def seen(self, backward: Backward | None) -> Phases:
        """What runs, for observers. backward: the one that does, in a backward."""
        return self.phases if backward is None else replace(self.phases, backward=backward)


class Program(CallProgram):
    """The two graphs of a rank, run on the values of one call.

    observers: told when a forward or backward begins and ends; may change while the program lives.
    """

    def __init__(
        self,
        code: PhaseCode,
        ours: RankSides,
        observers: Sequence[Observer] = (),
        around: Around | None = None,
    ) -> None:
        self.code, self.phases = code, code.phases
        self._observers = observers
        leaves = Leaves([i.kind for i in code.phases.inputs], code.values, ours)
        backward = code.phases.backward
        tangents = () if backward is None else backward.tangents
        known = zip([t.index for t in tangents], code.tangents, strict=True)
        super().__init__(
            leaves, CallGradients(code.phases.outputs, tangents, list(known)), around or Around()
        )

    def prepared(self) -> Iterator[None]:
        return self.code.prepared()

    @property
    def gradients(self) -> Sequence[GraphOutput]:
        return () if self.phases.backward is None else self.phases.backward.gradients

    def run_forward(
        self, leaves: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor], Callable[[], None]]:
        """kept: what is to be checked after the backward."""
        locals_ = self.leaves.local(leaves)
        run = lambda: PhaseRun("forward", self.code.seen(None), tuple(locals_))
        with autocast_off(), self.around.turn("forward"):
            with observed(self._observers, run):
                results = self.code.forward(list(locals_))
            outputs, late = self._settled(leaves, results, self.phases.backward is not None)
        saved: list[Tensor] = []
        if self.phases.backward is not None:
            saved = [locals_[i] for i in self.phases.backward.passed]
            saved += [results[i] for i in self.phases.backward.saved]  # type: ignore[misc]
        return own_outputs(outputs, locals_), saved, late

    def read_again(self, leaves: Sequence[Tensor]) -> list[tuple[GraphInput, Tensor]]:
        passed = () if self.phases.backward is None else self.phases.backward.passed
        read = [(self.phases.inputs[i], leaves[i]) for i in passed]
        return [(spec, leaf) for spec, leaf in read if isinstance(leaf, DTensor)]

    def run_backward(
        self, saved: list[Tensor], tangents: Sequence[Tensor | None], kept: Callable[[], None]
    ) -> list[Tensor | None]:
        assert self.phases.backward is not None
        given = self.ends.by_index(tangents)
        missing = frozenset(t.index for t in self.phases.backward.tangents if given[t.index] is None)
        backward = self.code.backward(missing)
        inputs = [saved[i] for i in backward.slots]
        for tangent, like in zip(backward.graph.tangents, backward.tangents, strict=True):
            inputs.append(conform(given[tangent.index], like))  # type: ignore[arg-type]
        saved.clear()
        given.clear()
        run = lambda: PhaseRun("backward", self.code.seen(backward.graph))
        with autocast_off(), self.around.turn("backward"), observed(self._observers, run):
            found = list(backward.run(inputs))
        kept()
        return found


def placeholder_values(module: fx.GraphModule) -> list[Tensor]:
    return [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]


def tangent_values(phases: Phases) -> list[Tensor]:
    """What the backward's tangents look like, which are the last of its placeholders."""
    if phases.backward is None:
        return []
    values = placeholder_values(phases.backward.module)
    return values[len(values) - len(phases.backward.tangents) :]


def slots_of(phases: Phases, backward: Backward) -> list[int]:
    """Which of the saved tensors a backward takes."""
    full = phases.backward
    assert full is not None
    slots = [full.passed.index(p) for p in backward.passed]
    return slots + [len(full.passed) + full.saved.index(s) for s in backward.saved]


Tensors = Sequence[Tensor]
Body = Callable[[Tensors, Tensors, Mapping[int, Tensor], bool], Sequence[Tensor | None]]
"""(leaves, values, tangents, backward) -> the results of a call's graph: its compiled programs, which run forward and
backward at once. values: this rank's parts of `leaves`. tangents: by index of the output."""


class AtOnce(CallProgram):
    """A step whose batch is run in pieces, of the whole model or of stages, as a differentiable function of its leaves.

    With a scalar loss, which alone gets a gradient, the call that returns it runs forward and backward of every piece,
    as if the loss's gradient were 1; `backward()` multiplies what was found by the gradient there is, which is exact,
    since a backward is linear in it. Without one the call runs the forwards alone, by `early`, and the backward runs
    each piece again, forward and backward, so that no piece keeps anything for later.
    """

    def __init__(
        self,
        leaves: Leaves,
        ends: CallGradients,
        body: Body,
        early: Body,
        device: torch.device,
        around: Around,
    ) -> None:
        super().__init__(leaves, ends, around)
        self._body, self._early, self._device = body, early, device

    @property
    def gradients(self) -> Sequence[GraphOutput]:
        return self.ends.gradients

    def run_forward(self, leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor], Any]:
        """With a loss its gradients are saved, and kept is which of them are None; else what is to be run again."""
        ends = self.ends
        overwritten = ends.overwritten(leaves) if ends.gradients and not ends.has_loss else {}
        values, loss = self.leaves.local(leaves), ends.loss_is_one(self._device) if ends.has_loss else {}
        with autocast_off(), self.around.turn("forward"), torch.no_grad():
            results = self._early(leaves, values, loss, ends.has_loss)
            outputs, _ = self._settled(leaves, results, later=False)
        outputs = own_outputs(outputs, leaves)
        if not ends.has_loss:
            again = [overwritten.get(i, leaf) for i, leaf in enumerate(leaves)] if ends.gradients else []
            return outputs, again, []
        found = ends.gradients_in(results)
        return outputs, [one for one in found if one is not None], [one is None for one in found]

    def run_backward(
        self, saved: list[Tensor], tangents: Sequence[Tensor | None], kept: Any
    ) -> list[Tensor | None]:
        if self.ends.has_loss:
            tangent, own = self.ends.loss_tangent(tangents), iter(saved)
            if tangent is None:
                return [None] * len(kept)
            return [None if absent else next(own).mul(tangent) for absent in kept]
        values, given = self.leaves.local(saved), self.ends.given(tangents, self._device)
        with autocast_off(), self.around.turn("backward"), torch.no_grad():
            return self.ends.gradients_in(self._body(saved, values, given, True))
