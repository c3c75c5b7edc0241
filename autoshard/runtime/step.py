"""One compiled program as a differentiable function: forward, saved tensors, backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from autoshard.calls.outputs import no_checks
from autoshard.runtime.leaves import InputSide, Leaves, conform, expected, own_outputs
from autoshard.runtime.observe import Observer, PhaseRun, observed
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.compile.compile_graph import Compiled, compile_graph
from passes.ir.autocast_off import autocast_off
from passes.ir.torch_dtensor import local_of
from passes.lower.missing_tangents import usually_missing
from passes.lower.phases import Backward
from passes.lower.rank_program import RankProgram

__all__ = ["Program", "check_first_order", "no_turn"]


def no_turn(phase: str) -> AbstractContextManager[Any]:
    return nullcontext()


class Program:
    """The two graphs of a rank, compiled, run on the values of one call.

        outputs = Program(program, sides, spec, rank, backend)(leaves)

    leaves:  one tensor per `phases.inputs`: parameters (DTensors or plain), buffers, constants, the
             call's tensors, the seed. DTensor arguments of the call come as shards (`plain_input`).
    outputs: the call's tensor outputs in the order of their index. New values of buffers are
             written into the buffers.

    Calls are independent: a second may run before the first's backward, and a graph may be retained.
    The backward is compiled on first use for every set of outputs that get no gradient.

    observers: told when a forward or backward begins and ends; may change while the program lives.
    turn: of "forward" or "backward": the block in which it runs, so that ranks know where the others are.
    checks: given a forward's outputs before buffers change, raises if they are not for this program; what it returns is
            called after the backward, if there is one.
    """

    def __init__(
        self,
        program: RankProgram,
        sides: Sequence[InputSide],
        spec: MeshSpec,
        rank: int,
        backend: str = "inductor",
        observers: Sequence[Observer] = (),
        turn: Callable[[str], AbstractContextManager[Any]] = no_turn,
        checks: Callable[[Sequence[Tensor], bool], Callable[[], None]] = no_checks,
    ) -> None:
        self._turn, self._checks = turn, checks
        phases = program.phases
        self._program = program
        self.phases = phases
        self.backend = backend
        self._observers = observers
        self._forward = compile_graph(phases.forward, backend)
        kinds = [i.kind for i in phases.inputs]
        self.leaves = Leaves(kinds, _placeholder_values(phases.forward), sides, spec, rank)
        self._buffers = [
            (position, o.index) for position, o in enumerate(phases.outputs) if o.kind == "buffer"
        ]
        self._returned = [position for position, o in enumerate(phases.outputs) if o.kind == "output"]
        self._places = {phases.outputs[p].index: i for i, p in enumerate(self._returned)}
        tangents = () if phases.backward is None else phases.backward.tangents
        indices = {t.index for t in tangents}
        self._constant = [i for i, p in enumerate(self._returned) if phases.outputs[p].index not in indices]
        self._backwards: dict[frozenset[int], _CompiledBackward] = {}

    @property
    def differentiated(self) -> list[int]:
        """Positions, among a call's outputs, of those that a usual step differentiates."""
        backward = self.phases.backward
        if backward is None:
            return []
        wanted = {t.index for t in backward.tangents} - usually_missing(backward)
        return sorted(place for index, place in self._places.items() if index in wanted)

    def __call__(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self.phases.backward is None:
            with torch.no_grad():
                outputs, _, _ = self.run_forward(leaves)
            return outputs
        return _Step.apply(self, *leaves)  # type: ignore[return-value]

    def run_forward(
        self, leaves: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor], Callable[[], None]]:
        """(outputs, tensors to save, what is to be checked after the backward). Outside autograd."""
        locals_ = self.leaves.local(leaves)
        run = lambda: PhaseRun("forward", self.phases, tuple(locals_))
        with autocast_off(), self._turn("forward"):
            with observed(self._observers, run):
                results = self._forward(list(locals_))
            outputs: list[Tensor] = [results[p] for p in self._returned]  # type: ignore[misc]
            late = self._checks(outputs, self.phases.backward is not None)
            for position, leaf in self._buffers:
                local_of(leaves[leaf]).copy_(results[position])  # type: ignore[arg-type]
        saved: list[Tensor] = []
        if self.phases.backward is not None:
            saved = [locals_[i] for i in self.phases.backward.passed]
            saved += [results[i] for i in self.phases.backward.saved]  # type: ignore[misc]
        return own_outputs(outputs, locals_), saved, late

    def run_backward(self, saved: list[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Local gradients, parallel to `phases.backward.gradients`. `saved` is emptied."""
        assert self.phases.backward is not None
        given = {t.index: tangents[self._places[t.index]] for t in self.phases.backward.tangents}
        missing = frozenset(index for index, tangent in given.items() if tangent is None)
        backward = self._backwards.get(missing)
        if backward is None:
            backward = self._backwards[missing] = self._compile_backward(missing)
        inputs = [saved[i] for i in backward.slots]
        for tangent, like in zip(backward.graph.tangents, backward.tangents, strict=True):
            inputs.append(conform(given[tangent.index], like))  # type: ignore[arg-type]
        saved.clear()
        given.clear()
        run = lambda: PhaseRun("backward", replace(self.phases, backward=backward.graph))
        with autocast_off(), self._turn("backward"), observed(self._observers, run):
            return list(backward.run(inputs))

    def compile_backward(self, missing: frozenset[int] = frozenset()) -> None:
        """Compile the backward for that set of outputs without gradient now, not on first use."""
        if missing not in self._backwards:
            self._backwards[missing] = self._compile_backward(missing)

    def constant_outputs(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of `outputs` that have no gradient."""
        return [outputs[i] for i in self._constant]

    def _compile_backward(self, missing: frozenset[int]) -> _CompiledBackward:
        full = self.phases.backward
        assert full is not None
        graph = self._program.backward(missing)
        slots = [full.passed.index(p) for p in graph.passed]
        slots += [len(full.passed) + full.saved.index(s) for s in graph.saved]
        run = compile_graph(graph.module, self.backend)
        values = _placeholder_values(graph.module)
        return _CompiledBackward(graph, run, slots, expected(values[len(slots) :]))


class _CompiledBackward:
    """graph, its code, which of the saved tensors it takes, and what its tangents look like."""

    def __init__(self, graph: Backward, run: Compiled, slots: list[int], tangents: Sequence[Tensor]) -> None:
        self.graph = graph
        self.run = run
        self.slots = slots
        self.tangents = tangents


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, *leaves: Tensor) -> tuple[Tensor, ...]:
        outputs, saved, ctx.late = program.run_forward(leaves)
        ctx.program = program
        ctx.looks = program.leaves.looks(leaves)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*program.constant_outputs(outputs))
        ctx.save_for_backward(*saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        check_first_order()
        program: Program = ctx.program
        saved = list(ctx.saved_tensors)
        # Where a loss has parameters in it too (a penalty), its gradient is a DTensor, the same on all ranks.
        tangents = tuple(t.full_tensor() if isinstance(t, DTensor) else t for t in tangents)
        # With retain_graph=False nobody needs them again: the backward may free each when it is done.
        ctx.maybe_clear_saved_tensors()
        assert program.phases.backward is not None
        found = program.run_backward(saved, tangents)
        ctx.late()
        # `needs_input_grad` is a new tuple at every look.
        needed = ctx.needs_input_grad[1:]
        return (None, *program.leaves.gradients(ctx.looks, needed, program.phases.backward.gradients, found))


def check_first_order() -> None:
    """ShardingError in a backward that is to be differentiated again: autograd records it for create_graph=True only.
    What ran would have no graph, and a penalty on these gradients no effect."""
    if torch.is_grad_enabled():
        raise ShardingError(
            "create_graph=True: the backward of a parallel model cannot be differentiated again\n"
            "  try: compute the penalty in the model's forward, with torch.autograd.grad(..., create_graph=True) "
            "there, and return it"
        )


def _placeholder_values(module: fx.GraphModule) -> list[Tensor]:
    return [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
