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
from torch import Tensor

from autoshard.calls.checks import no_checks
from autoshard.runtime.call_gradients import CallGradients, in_pieces
from autoshard.runtime.compiled_pieces import Compiler, Known, StepInPieces
from autoshard.runtime.leaves import InputSide, Leaves
from autoshard.runtime.observe import InPieces, Observer
from autoshard.runtime.step import no_turn
from cost_model.mesh import MeshSpec
from passes.ir.autocast_off import autocast_off
from passes.ir.torch_dtensor import local_of
from passes.lower.piecewise import without_gradients
from passes.lower.rank_program import RankProgram

__all__ = ["PiecewiseProgram"]

Turn = Callable[[str], AbstractContextManager[Any]]


class PiecewiseProgram:
    """What `autoshard.runtime.step.Program` is, of the programs of all pieces, in the order in which they run."""

    def __init__(
        self,
        programs: Sequence[RankProgram],
        sides: Sequence[InputSide],
        spec: MeshSpec,
        rank: int,
        backend: str = "inductor",
        observers: Sequence[Observer] = (),
        turn: Turn = no_turn,
        checks: Callable[[Sequence[Tensor], bool], Callable[[], None]] = no_checks,
    ) -> None:
        first = programs[0]
        self._checks = checks
        self._turn, self._observers, self.device_type = turn, observers, spec.device_type
        placeholders = [n for n in first.local.module.graph.nodes if n.op == "placeholder"]
        pairs = list(zip(placeholders, first.inputs, strict=True))
        given = [(node, kind) for node, kind in pairs if kind.kind != "tangent"]
        self._leaf_names = [node.name for node, _ in given]
        kinds = [kind.kind for _, kind in given]
        self.leaves = Leaves(kinds, [node.meta["val"] for node, _ in given], sides, spec, rank)
        read = [(kind.index, node) for node, kind in pairs if kind.kind == "tangent" and node.users]
        self._tangent_names = {index: node.name for index, node in read}
        tangents = [(index, node.meta["val"]) for index, node in read]
        self.ends = CallGradients(first.outputs, first.inputs, tangents)
        compile_ = Compiler(backend)
        leaves = (*self._leaf_names, *self._tangent_names.values())
        self._whole = StepInPieces(InPieces(tuple(programs), leaves), compile_)
        self._early = self._whole
        if not self.ends.has_loss:
            early = InPieces(tuple(map(without_gradients, programs)), tuple(self._leaf_names))
            self._early = StepInPieces(early, compile_)

    @property
    def differentiated(self) -> list[int]:
        """Positions, among a call's outputs, of those that a usual step differentiates."""
        return self.ends.differentiated

    def __call__(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return in_pieces(self, leaves)

    def run(self, leaves: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """(outputs, gradients if the loss's is 1, else of nothing). New values of buffers are written."""
        known = self._known(leaves)
        if self.ends.has_loss:
            self._give(known, self.ends.loss_is_one(self._device(leaves)))
        with autocast_off(), self._turn("forward"), torch.no_grad():
            results = self._early.run(known, self._observers)
            outputs = self.ends.returned(results)
            self._checks(outputs, False)
            for place, leaf in self.ends.buffers:
                local_of(leaves[leaf]).copy_(results[place])  # type: ignore[arg-type]
        return outputs, self.ends.gradients_in(results)

    def run_again(self, leaves: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of a call with these leaves, its outputs having the gradients `tangents`."""
        known = self._known(leaves)
        self._give(known, self.ends.given(tangents, self._device(leaves)))
        with autocast_off(), self._turn("backward"), torch.no_grad():
            results = self._whole.run(known, self._observers)
        return self.ends.gradients_in(results)

    def _known(self, leaves: Sequence[Tensor]) -> Known:
        return dict(zip(self._leaf_names, self.leaves.local(leaves), strict=True))

    def _give(self, known: Known, tangents: dict[int, Tensor]) -> None:
        known.update({self._tangent_names[index]: value for index, value in tangents.items()})

    def _device(self, leaves: Sequence[Tensor]) -> torch.device:
        return next((leaf.device for leaf in leaves), torch.device(self.device_type))
