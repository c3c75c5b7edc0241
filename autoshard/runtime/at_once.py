"""Which outputs of a call get a gradient, and what `backward()` does where the call runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.runtime.leaves import Leaves, conform, expected, own_outputs
from autoshard.runtime.step import check_first_order
from cost_model.errors import ShardingError
from passes.ir.autocast_off import autocast_off
from passes.ir.joint import GraphInput, GraphOutput
from passes.ir.torch_dtensor import local_of
from passes.lower.missing_tangents import all_but_the_loss

__all__ = ["AtOnce", "CallGradients"]


class CallGradients:
    """outputs, inputs: of a call's graph. tangents: per output that gets a gradient which is read, its index and a
    tensor like its gradient on this rank.

    buffers: (place among the results, leaf) of new values. gradients: the ends that are gradients, in order.
    """

    def __init__(
        self,
        outputs: Sequence[GraphOutput],
        inputs: Sequence[GraphInput],
        tangents: Sequence[tuple[int, Tensor]],
    ) -> None:
        self._tangents = list(tangents)
        self._returned = [place for place, end in enumerate(outputs) if end.kind == "output"]
        self._ends = [outputs[place].index for place in self._returned]
        self.buffers = [(place, end.index) for place, end in enumerate(outputs) if end.kind == "buffer"]
        self._graded = [place for place, end in enumerate(outputs) if end.kind == "grad"]
        self.gradients = [outputs[place] for place in self._graded]
        indices = {kind.index for kind in inputs if kind.kind == "tangent"}
        self._constant = [place for place, index in enumerate(self._ends) if index not in indices]

    @property
    def has_loss(self) -> bool:
        """Whether one scalar alone gets a gradient."""
        return len(self._tangents) == 1 and self._tangents[0][1].ndim == 0

    @property
    def differentiated(self) -> list[int]:
        """Positions, among a call's outputs, of those that a usual step differentiates."""
        unread = all_but_the_loss({index: value.ndim for index, value in self._tangents})
        wanted = {index for index, _ in self._tangents} - unread
        return [place for place, index in enumerate(self._ends) if index in wanted]

    def loss_is_one(self, device: torch.device) -> dict[int, Tensor]:
        ((index, value),) = self._tangents
        return {index: torch.ones((), dtype=value.dtype, device=device)}

    def given(self, tangents: Sequence[Tensor | None], device: torch.device) -> dict[int, Tensor]:
        """By index of the output; zeros where autograd has none. tangents: per output."""
        known = dict(zip(self._ends, tangents, strict=True))
        found: dict[int, Tensor] = {}
        for index, value in self._tangents:
            (like,) = expected([value])
            tangent = known[index]
            if tangent is None:
                tangent = torch.zeros(value.shape, dtype=value.dtype, device=device)
            found[index] = conform(tangent, like)
        return found

    def returned(self, results: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        return tuple(results[place] for place in self._returned)  # type: ignore[misc]

    def gradients_in(self, results: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [results[place] for place in self._graded]

    def constant(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of `outputs` that never have a gradient."""
        return [outputs[i] for i in self._constant]

    def overwritten(self, leaves: Sequence[Tensor]) -> dict[int, Tensor]:
        """What a call reads of buffers that it writes, to be read again."""
        return {leaf: leaves[leaf].clone() for _, leaf in self.buffers}

    def loss_tangent(self, tangents: Sequence[Tensor | None]) -> Tensor | None:
        """Raises ShardingError if another output got a gradient."""
        loss = self._tangents[0][0]
        others = [
            i for i, tangent in zip(self._ends, tangents, strict=True) if tangent is not None and i != loss
        ]
        if others:
            raise ShardingError(
                f"outputs {others} get a gradient besides the loss: in pieces and stages forward and backward run "
                "when the loss is computed\n  try: micro_batches=1 without stages, or the whole loss in the model"
            )
        return tangents[self._ends.index(loss)]


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


class AtOnce:
    """A step whose batch is run in pieces, of the whole model or of stages, as a differentiable function of its leaves.

    With a scalar loss, which alone gets a gradient, the call that returns it runs forward and backward of every piece,
    as if the loss's gradient were 1; `backward()` multiplies what was found by the gradient there is, which is exact,
    since a backward is linear in it. Without one the call runs the forwards alone, by `early`, and the backward runs
    each piece again, forward and backward, so that no piece keeps anything for later.

    turn, checks: as of `autoshard.runtime.step.Program`.
    """

    def __init__(
        self,
        leaves: Leaves,
        ends: CallGradients,
        body: Body,
        early: Body,
        device: torch.device,
        turn: Callable[[str], AbstractContextManager[Any]],
        checks: Callable[[Sequence[Tensor], bool], Callable[[], None]],
    ) -> None:
        self.leaves, self.ends, self._body, self._early = leaves, ends, body, early
        self._device, self._turn, self._checks = device, turn, checks

    @property
    def differentiated(self) -> list[int]:
        """Positions, among a call's outputs, of those that a usual step differentiates."""
        return self.ends.differentiated

    def __call__(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return _AtOnce.apply(self, *leaves) if self.ends.gradients else self.run(leaves)[0]  # type: ignore[return-value]

    def run(self, leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """(outputs, gradients if the loss's is 1, else of nothing). New values of buffers are written."""
        ends, values = self.ends, self.leaves.local(leaves)
        loss = ends.loss_is_one(self._device) if ends.has_loss else {}
        with autocast_off(), self._turn("forward"), torch.no_grad():
            results = self._early.run(leaves, values, loss, backward=ends.has_loss)
            outputs = ends.returned(results)
            self._checks(outputs, False)
            for place, leaf in ends.buffers:
                local_of(leaves[leaf]).copy_(results[place])  # type: ignore[arg-type]
        return own_outputs(outputs, leaves), ends.gradients_in(results)

    def run_again(self, leaves: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of a call with these leaves, its outputs having the gradients `tangents`."""
        values, given = self.leaves.local(leaves), self.ends.given(tangents, self._device)
        with autocast_off(), self._turn("backward"), torch.no_grad():
            return self.ends.gradients_in(self._body.run(leaves, values, given, backward=True))


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: AtOnce, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.program = program
        ctx.looks = program.leaves.looks(leaves)
        ctx.set_materialize_grads(False)
        overwritten = {} if program.ends.has_loss else program.ends.overwritten(leaves)
        outputs, gradients = program.run(leaves)
        ctx.mark_non_differentiable(*program.ends.constant(outputs))
        if program.ends.has_loss:
            ctx.absent = [gradient is None for gradient in gradients]
            ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        else:
            ctx.save_for_backward(*(overwritten.get(i, leaf) for i, leaf in enumerate(leaves)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        check_first_order()
        program: AtOnce = ctx.program
        tangents = tuple(t.full_tensor() if isinstance(t, DTensor) else t for t in tangents)
        found = _scaled(ctx, program, tangents) if program.ends.has_loss else _again(ctx, program, tangents)
        needed = ctx.needs_input_grad[1:]
        return (None, *program.leaves.gradients(ctx.looks, needed, program.ends.gradients, found))


def _scaled(ctx: Any, program: AtOnce, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    tangent = program.ends.loss_tangent(tangents)
    if tangent is None:
        return [None] * len(ctx.absent)
    saved = iter(list(ctx.saved_tensors))
    ctx.maybe_clear_saved_tensors()
    return [None if absent else next(saved).mul(tangent) for absent in ctx.absent]


def _again(ctx: Any, program: AtOnce, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    leaves = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return program.run_again(leaves, tangents)
