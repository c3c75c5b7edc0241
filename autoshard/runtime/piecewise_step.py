"""A compiled step whose batch is run in pieces, as a differentiable function.

With a scalar loss, which alone gets a gradient, the call that returns it runs forward and backward of every piece, as
if the loss's gradient were 1; `backward()` multiplies what was found by the gradient there is, which is exact, since a
backward is linear in it. Without one the call runs the forwards alone, and the backward runs each piece again, forward
and backward, so that no piece keeps anything for later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from autoshard.runtime.input_side import InputSide, conform, expected
from autoshard.runtime.leaves import Leaves
from autoshard.runtime.step import autocast_off, check_first_order, no_turn
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.compile.compile_graph import Compiled, compile_graph
from passes.ir.joint import GraphInput
from passes.ir.torch_dtensor import local_of
from passes.lower.piece_values import given_values, leave, step_results
from passes.lower.piecewise import RankPieces, split_pieces, without_gradients
from passes.lower.rank_program import RankProgram

__all__ = ["PiecewiseProgram"]

Turn = Callable[[str], AbstractContextManager[Any]]
Known = dict[str, Tensor]


class PiecewiseProgram:
    """What `autoshard.runtime.step.Program` is, of the programs of all pieces, in the order in which they run."""

    def __init__(
        self,
        programs: Sequence[RankProgram],
        sides: Sequence[InputSide],
        spec: MeshSpec,
        rank: int,
        backend: str = "inductor",
        turn: Turn = no_turn,
    ) -> None:
        first = programs[0]
        self.outputs = first.outputs
        self._turn, self.device_type = turn, spec.device_type
        placeholders = [n for n in first.local.module.graph.nodes if n.op == "placeholder"]
        pairs = list(zip(placeholders, first.inputs, strict=True))
        self._names = [node.name for node, _ in pairs]
        given = [(node, kind) for node, kind in pairs if kind.kind != "tangent"]
        self._leaf_names = [node.name for node, _ in given]
        kinds = [kind.kind for _, kind in given]
        self.leaves = Leaves(kinds, [node.meta["val"] for node, _ in given], sides, spec, rank)
        self._tangents = [
            (node.name, kind, node.meta["val"]) for node, kind in pairs if _is_tangent(node, kind)
        ]
        compile_ = _Compiler(backend)
        self._whole = _Step(programs, compile_)
        self._early = (
            self._whole if self.has_loss else _Step(list(map(without_gradients, programs)), compile_)
        )
        self._returned = [place for place, o in enumerate(self.outputs) if o.kind == "output"]
        indices = {kind.index for kind in first.inputs if kind.kind == "tangent"}
        self._ends = [self.outputs[place].index for place in self._returned]
        self._constant = [place for place, index in enumerate(self._ends) if index not in indices]
        self._graded = [place for place, o in enumerate(self.outputs) if o.kind == "grad"]
        self.gradients = [self.outputs[place] for place in self._graded]

    @property
    def has_loss(self) -> bool:
        """Whether one scalar alone gets a gradient."""
        return len(self._tangents) == 1 and self._tangents[0][2].ndim == 0

    def __call__(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return _PiecewiseStep.apply(self, *leaves)  # type: ignore[return-value]

    def run(self, leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """(outputs, gradients if the loss's is 1, else of nothing). New values of buffers are written."""
        known = self._known(leaves)
        if self.has_loss:
            ((name, _, value),) = self._tangents
            known[name] = torch.ones((), dtype=value.dtype, device=self._device(leaves))
        with autocast_off(self.device_type), self._turn("forward"), torch.no_grad():
            results = self._early.run(known, self._names)
            for place, end in enumerate(self.outputs):
                if end.kind == "buffer":
                    local_of(leaves[end.index]).copy_(results[place])  # type: ignore[arg-type]
        outputs = tuple(results[place] for place in self._returned)
        return outputs, [results[place] for place in self._graded]  # type: ignore[return-value]

    def run_again(self, leaves: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of a call with these leaves, its outputs having the gradients `tangents`."""
        known = self._known(leaves)
        given = dict(zip(self._ends, tangents, strict=True))
        for name, kind, value in self._tangents:
            tangent = given[kind.index]
            (like,) = expected([value])
            if tangent is None:
                tangent = torch.zeros(value.shape, dtype=value.dtype, device=self._device(leaves))
            known[name] = conform(tangent, like)
        with autocast_off(self.device_type), self._turn("backward"), torch.no_grad():
            results = self._whole.run(known, self._names)
        return [results[place] for place in self._graded]

    def constant_outputs(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of `outputs` that never have a gradient."""
        return [outputs[i] for i in self._constant]

    def overwritten(self, leaves: Sequence[Tensor]) -> dict[int, Tensor]:
        """What a call reads of buffers that it writes, to be read again."""
        return {end.index: leaves[end.index].clone() for end in self.outputs if end.kind == "buffer"}

    def unexpected(self, tangents: Sequence[Tensor | None]) -> list[int]:
        """Outputs that got a gradient though a loss alone was to."""
        loss = self._tangents[0][1].index
        return [
            i for i, tangent in zip(self._ends, tangents, strict=True) if tangent is not None and i != loss
        ]

    def loss_tangent(self, tangents: Sequence[Tensor | None]) -> Tensor | None:
        return tangents[self._ends.index(self._tangents[0][1].index)]

    def _known(self, leaves: Sequence[Tensor]) -> Known:
        return dict(zip(self._leaf_names, self.leaves.local(leaves), strict=True))

    def _device(self, leaves: Sequence[Tensor]) -> torch.device:
        return next((leaf.device for leaf in leaves), torch.device(self.device_type))


def _is_tangent(node: fx.Node, spec: GraphInput) -> bool:
    return spec.kind == "tangent" and bool(node.users)


class _Compiler:
    """Equal graphs are compiled once: pieces mostly are."""

    def __init__(self, backend: str) -> None:
        self.joins = backend == "eager"  # a compiler joins more itself
        self._backend = backend
        self._known: dict[str, tuple[Compiled, tuple[Tensor, ...]]] = {}

    def __call__(self, module: fx.GraphModule) -> tuple[Compiled, tuple[Tensor, ...]]:
        text = "\n".join(node.format_node() or "" for node in module.graph.nodes)
        values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        key = f"{text} {[(v.shape, v.stride(), v.dtype) for v in values]}"
        if key not in self._known:
            self._known[key] = compile_graph(module, self._backend), expected(values)
        return self._known[key]


class _Piece:
    """Forward and backward of a piece, compiled."""

    def __init__(self, parts: RankPieces, compile_: _Compiler) -> None:
        self._parts = parts
        phases = parts.piece.complete()
        self._late = [spec.kind == "tangent" for spec in parts.piece.inputs]
        self._outputs = len(phases.outputs)
        self._forward, self._takes = compile_(phases.forward)
        self._backward = phases.backward
        if self._backward is not None:
            self._run_backward, self._takes_back = compile_(self._backward.module)

    def run(self, known: Known) -> None:
        given = given_values(self._parts.given, known)
        early = [value for value, late in zip(given, self._late, strict=True) if not late]
        early = [conform(value, like) for value, like in zip(early, self._takes, strict=True)]
        results = self._forward(list(early))
        found = list(results[: self._outputs])
        if self._backward is not None:
            saved = [*(early[i] for i in self._backward.passed), *(results[i] for i in self._backward.saved)]
            tangents = [value for value, late in zip(given, self._late, strict=True) if late]
            inputs = [
                conform(value, like)  # type: ignore[arg-type]
                for value, like in zip([*saved, *tangents], self._takes_back, strict=True)
            ]
            del results, saved, early
            found += self._run_backward(inputs)
        leave(self._parts.left, found, known)  # type: ignore[arg-type]


class _Step:
    """All of a step, compiled."""

    def __init__(self, programs: Sequence[RankProgram], compile_: _Compiler) -> None:
        parts = [split_pieces(program) for program in programs]
        if compile_.joins:
            parts = [one.joined() for one in parts]
        self._first = parts[0]
        self._before, self._takes = compile_(self._first.before)
        self._pieces = [_Piece(one, compile_) for one in parts]
        self._after, self._reads = compile_(self._first.after)

    def run(self, known: Known, names: Sequence[str]) -> list[Tensor | None]:
        """The results of the step. known: values of placeholders, to which all that is made is added."""
        first = self._first
        taken = [conform(known[n], like) for n, like in zip(first.taken, self._takes, strict=True)]
        known.update(zip(first.made, self._before(taken), strict=True))  # type: ignore[arg-type]
        for piece in self._pieces:
            piece.run(known)
        read = [conform(known[n], like) for n, like in zip(first.read, self._reads, strict=True)]
        known.update(zip(first.ended, self._after(read), strict=True))  # type: ignore[arg-type]
        return step_results(first, known, names)


class _PiecewiseStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: PiecewiseProgram, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.program = program
        ctx.looks = program.leaves.looks(leaves)
        ctx.set_materialize_grads(False)
        overwritten = {} if program.has_loss else program.overwritten(leaves)
        outputs, gradients = program.run(leaves)
        ctx.mark_non_differentiable(*program.constant_outputs(outputs))
        if program.has_loss:
            ctx.absent = [gradient is None for gradient in gradients]
            ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        else:
            ctx.save_for_backward(*(overwritten.get(i, leaf) for i, leaf in enumerate(leaves)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        check_first_order()
        program: PiecewiseProgram = ctx.program
        tangents = tuple(t.full_tensor() if isinstance(t, DTensor) else t for t in tangents)
        found = _scaled(ctx, program, tangents) if program.has_loss else _again(ctx, program, tangents)
        needed = ctx.needs_input_grad[1:]
        return (None, *program.leaves.gradients(ctx.looks, needed, program.gradients, found))


def _scaled(ctx: Any, program: PiecewiseProgram, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    if program.unexpected(tangents):
        raise ShardingError(
            f"outputs {program.unexpected(tangents)} get a gradient besides the loss: with micro_batches, forward and "
            "backward of each run when the loss is computed\n  try: micro_batches=1, or the whole loss in the model"
        )
    tangent = program.loss_tangent(tangents)
    if tangent is None:
        return [None] * len(ctx.absent)
    saved = iter(list(ctx.saved_tensors))
    ctx.maybe_clear_saved_tensors()
    return [None if absent else next(saved).mul(tangent) for absent in ctx.absent]


def _again(ctx: Any, program: PiecewiseProgram, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    leaves = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return program.run_again(leaves, tangents)
