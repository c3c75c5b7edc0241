"""One compiled program of a call, forward and backward; or, of a batch in pieces, one that runs both at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from autoshard.runtime.call_program import Around, CallGradients, CallProgram
from autoshard.runtime.leaves import InputSide, Leaves, conform, expected, own_outputs
from autoshard.runtime.observe import Observer, PhaseRun, observed
from cost_model.mesh import MeshSpec
from passes.compile.compile_graph import Compiled, compile_graph
from passes.ir.autocast_off import autocast_off
from passes.ir.joint import GraphOutput
from passes.lower.phases import Backward
from passes.lower.rank_program import RankProgram


class Program(CallProgram):
    """The two graphs of a rank, compiled, run on the values of one call.

    The backward is compiled on first use for every set of outputs that get no gradient.

    observers: told when a forward or backward begins and ends; may change while the program lives.
    """

    def __init__(
        self,
        program: RankProgram,
        sides: Sequence[InputSide],
        spec: MeshSpec,
        rank: int,
        backend: str = "inductor",
        observers: Sequence[Observer] = (),
        around: Around = Around(),  # noqa: B008  (it cannot change)
    ) -> None:
        phases = program.phases
        self._program = program
        self.phases = phases
        self.backend = backend
        self._observers = observers
        self._forward = compile_graph(phases.forward, backend)
        kinds = [i.kind for i in phases.inputs]
        leaves = Leaves(kinds, _placeholder_values(phases.forward), sides, spec, rank)
        tangents = () if phases.backward is None else phases.backward.tangents
        values = [] if phases.backward is None else _placeholder_values(phases.backward.module)
        known = zip([t.index for t in tangents], values[len(values) - len(tangents) :], strict=True)
        super().__init__(leaves, CallGradients(phases.outputs, tangents, list(known)), around)
        self._backwards: dict[frozenset[int], _CompiledBackward] = {}

    @property
    def gradients(self) -> Sequence[GraphOutput]:
        return () if self.phases.backward is None else self.phases.backward.gradients

    def run_forward(
        self, leaves: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor], Callable[[], None]]:
        """kept: what is to be checked after the backward."""
        locals_ = self.leaves.local(leaves)
        run = lambda: PhaseRun("forward", self.phases, tuple(locals_))
        with autocast_off(), self.around.turn("forward"):
            with observed(self._observers, run):
                results = self._forward(list(locals_))
            outputs, late = self._settled(leaves, results, self.phases.backward is not None)
        saved: list[Tensor] = []
        if self.phases.backward is not None:
            saved = [locals_[i] for i in self.phases.backward.passed]
            saved += [results[i] for i in self.phases.backward.saved]  # type: ignore[misc]
        return own_outputs(outputs, locals_), saved, late

    def run_backward(
        self, saved: list[Tensor], tangents: Sequence[Tensor | None], kept: Callable[[], None]
    ) -> list[Tensor | None]:
        assert self.phases.backward is not None
        given = self.ends.by_index(tangents)
        missing = frozenset(t.index for t in self.phases.backward.tangents if given[t.index] is None)
        backward = self._backwards.get(missing)
        if backward is None:
            backward = self._backwards[missing] = self._compile_backward(missing)
        inputs = [saved[i] for i in backward.slots]
        for tangent, like in zip(backward.graph.tangents, backward.tangents, strict=True):
            inputs.append(conform(given[tangent.index], like))  # type: ignore[arg-type]
        saved.clear()
        given.clear()
        run = lambda: PhaseRun("backward", replace(self.phases, backward=backward.graph))
        with autocast_off(), self.around.turn("backward"), observed(self._observers, run):
            found = list(backward.run(inputs))
        kept()
        return found

    def compile_backward(self, missing: frozenset[int] = frozenset()) -> None:
        """Compile the backward for that set of outputs without gradient now, not on first use."""
        if missing not in self._backwards:
            self._backwards[missing] = self._compile_backward(missing)

    def _compile_backward(self, missing: frozenset[int]) -> _CompiledBackward:
        full = self.phases.backward
        assert full is not None
        graph = self._program.backward(missing)
        slots = [full.passed.index(p) for p in graph.passed]
        slots += [len(full.passed) + full.saved.index(s) for s in graph.saved]
        run = compile_graph(graph.module, self.backend)
        values = _placeholder_values(graph.module)
        return _CompiledBackward(graph, run, slots, expected(values[len(slots) :]))


@dataclass(frozen=True)
class _CompiledBackward:
    """graph, its code, which of the saved tensors it takes, and what its tangents look like."""

    graph: Backward
    run: Compiled
    slots: list[int]
    tangents: Sequence[Tensor]


def _placeholder_values(module: fx.GraphModule) -> list[Tensor]:
    return [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]


class Body(Protocol):
    """The compiled programs of a call that runs forward and backward at once."""

    def run(
        self,
        leaves: Sequence[Tensor],
        values: Sequence[Tensor],
        tangents: Mapping[int, Tensor],
        *,
        backward: bool,
    ) -> Sequence[Tensor | None]:
        """The results of the call's graph. values: this rank's parts of `leaves`. tangents: by index of the output."""
        ...


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
            results = self._early.run(leaves, values, loss, backward=ends.has_loss)
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
            return self.ends.gradients_in(self._body.run(saved, values, given, backward=True))
