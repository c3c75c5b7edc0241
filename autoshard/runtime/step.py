"""One compiled program as a differentiable function: forward, saved tensors, backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from autoshard.runtime.input_side import InputSide, conform, expected, sliced
from autoshard.runtime.observe import Observer, PhaseRun, observed
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.compile.compile_graph import Compiled, compile_graph
from passes.ir.torch_dtensor import dtensor_from, local_of, sharding_of
from passes.lower.phases import Backward
from passes.lower.rank_program import RankProgram

__all__ = ["Program"]


def _no_turn(phase: str) -> AbstractContextManager[Any]:
    return nullcontext()


def _no_tensor() -> None:
    return None


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
    may_slice: leaves that may come whole where the graph takes a part: all but parameters.
    turn: of "forward" or "backward": the block in which it runs, so that ranks know where the others are.
    """

    def __init__(
        self,
        program: RankProgram,
        sides: Sequence[InputSide],
        spec: MeshSpec,
        rank: int,
        backend: str = "inductor",
        observers: Sequence[Observer] = (),
        turn: Callable[[str], AbstractContextManager[Any]] = _no_turn,
    ) -> None:
        self._turn = turn
        phases = program.phases
        assert len(sides) == len(phases.inputs)
        self._program = program
        self.phases = phases
        self.backend = backend
        self.device_type = spec.device_type
        self._spec, self._rank = spec, rank
        self._observers = observers
        self._sides = tuple(sides)
        self._forward = compile_graph(phases.forward, backend)
        self._expected = expected(_placeholder_values(phases.forward))
        self._known: list[Callable[[], Tensor | None]] = [_no_tensor] * len(self._expected)
        # Parameters and buffers by far outnumber what may need slicing.
        kinds = [i.kind for i in phases.inputs]
        self.may_slice = [i for i, kind in enumerate(kinds) if kind != "param"]
        self._buffers = [
            (position, o.index) for position, o in enumerate(phases.outputs) if o.kind == "buffer"
        ]
        self._returned = [position for position, o in enumerate(phases.outputs) if o.kind == "output"]
        self._places = {phases.outputs[p].index: i for i, p in enumerate(self._returned)}
        tangents = () if phases.backward is None else phases.backward.tangents
        indices = {t.index for t in tangents}
        self._constant = [i for i, p in enumerate(self._returned) if phases.outputs[p].index not in indices]
        self._backwards: dict[frozenset[int], _CompiledBackward] = {}

    def __call__(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self.phases.backward is None:
            with torch.no_grad():
                outputs, _ = self.run_forward(leaves)
            return outputs
        return _Step.apply(self, *leaves)  # type: ignore[return-value]

    def run_forward(self, leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """(outputs, tensors to save). Outside autograd."""
        locals_ = self._localize(leaves)
        run = lambda: PhaseRun("forward", self.phases, tuple(locals_))
        with _autocast_off(self.device_type), self._turn("forward"), observed(self._observers, run):
            results = self._forward(list(locals_))
            for position, leaf in self._buffers:
                local_of(leaves[leaf]).copy_(results[position])  # type: ignore[arg-type]
        saved: list[Tensor] = []
        if self.phases.backward is not None:
            saved = [locals_[i] for i in self.phases.backward.passed]
            saved += [results[i] for i in self.phases.backward.saved]  # type: ignore[misc]
        return tuple(results[p] for p in self._returned), saved  # type: ignore[misc]

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
        with _autocast_off(self.device_type), self._turn("backward"), observed(self._observers, run):
            return list(backward.run(inputs))

    def compile_backward(self, missing: frozenset[int] = frozenset()) -> None:
        """Compile the backward for that set of outputs without gradient now, not on first use."""
        if missing not in self._backwards:
            self._backwards[missing] = self._compile_backward(missing)

    def constant_outputs(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of `outputs` that have no gradient."""
        return [outputs[i] for i in self._constant]

    def fit_gradient(self, gradient: Tensor, leaf: int, shape: torch.Size) -> Tensor:
        """The gradient of a leaf that came as a shard, where the graph returns it whole."""
        if gradient.shape == shape:
            return gradient
        return sliced(gradient, self._sides[leaf], self._spec, self._rank)

    def _localize(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        locals_ = [local_of(leaf) for leaf in leaves]
        for i in self.may_slice:
            if locals_[i].shape != self._expected[i].shape:
                locals_[i] = sliced(locals_[i], self._sides[i], self._spec, self._rank)
        for i, (value, known) in enumerate(zip(locals_, self._known, strict=True)):
            if known() is not value:
                locals_[i] = self._conformed(i, value)
        return locals_

    def _conformed(self, position: int, value: Tensor) -> Tensor:
        """`value` as the graph takes it. A parameter that is so already is remembered: it comes again at every step."""
        found = conform(value, self._expected[position])
        if found is value and position not in self.may_slice:
            self._known[position] = weakref.ref(value)
        return found

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
        outputs, saved = program.run_forward(leaves)
        ctx.program = program
        ctx.shardings = [sharding_of(leaf) for leaf in leaves]
        ctx.shapes = {i: leaves[i].shape for i in program.may_slice}
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*program.constant_outputs(outputs))
        ctx.save_for_backward(*saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Autograd records the backward only for create_graph=True. What ran here would have no graph, and a penalty
        # on these gradients no effect.
        if torch.is_grad_enabled():
            raise ShardingError(
                "create_graph=True: the backward of a parallel model cannot be differentiated again\n"
                "  try: compute the penalty in the model's forward, with torch.autograd.grad(..., create_graph=True) "
                "there, and return it"
            )
        program: Program = ctx.program
        saved = list(ctx.saved_tensors)
        # Where a loss has parameters in it too (a penalty), its gradient is a DTensor, the same on all ranks.
        tangents = tuple(t.full_tensor() if isinstance(t, DTensor) else t for t in tangents)
        # With retain_graph=False nobody needs them again: the backward may free each when it is done.
        ctx.maybe_clear_saved_tensors()
        assert program.phases.backward is not None
        gradients: list[Tensor | None] = [None] * len(ctx.shardings)
        needed = ctx.needs_input_grad  # a new tuple at every look
        for spec, gradient in zip(
            program.phases.backward.gradients, program.run_backward(saved, tangents), strict=True
        ):
            leaf = spec.index
            if gradient is None or not needed[leaf + 1]:
                continue
            sharding = ctx.shardings[leaf]
            if sharding is not None:
                gradient = dtensor_from(gradient, sharding)
            shape = ctx.shapes.get(leaf)
            gradients[leaf] = gradient if shape is None else program.fit_gradient(gradient, leaf, shape)
        return (None, *gradients)


def _placeholder_values(module: fx.GraphModule) -> list[Tensor]:
    return [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]


def _autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """The graph has its casts in it; autocast must not add any."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
