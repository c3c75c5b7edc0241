"""The inputs of a kind of call that ranks must have alike, checked at its first calls and then now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.agreement import everyones
from autoshard.watching.input_sums import as_sums, difference, due, sums_of, tolerance_of
from autoshard.watching.watch import Watch
from cost_model.errors import RankError
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.ir.torch_dtensor import local_of
from passes.layout.layout import Layout

__all__ = ["CheckInputs", "CheckedInput", "checked_inputs"]


@dataclass(frozen=True)
class CheckedInput:
    """index: of the tensor in a call. part: what of the global tensor this rank has, "" for all."""

    index: int
    name: str
    part: str
    tolerance: float


def checked_inputs(
    joint: JointGraph, layouts: Mapping[int, Layout], mesh: MeshSpec, rank: int
) -> tuple[CheckedInput, ...]:
    """Those that some other rank must have alike; not addends of a sum, of which each rank has its own."""
    found: list[CheckedInput] = []
    for spec, node in zip(joint.inputs, joint.placeholders, strict=True):
        layout = layouts.get(spec.index)
        if spec.kind != "input" or (layout is not None and layout.partial):
            continue
        dims = () if layout is None else layout.dims
        parts = [f"{mesh.linear_index(rank, axes)} of dim {d}" for d, axes in enumerate(dims) if axes]
        tolerance = tolerance_of(node.meta["val"].dtype)
        found.append(CheckedInput(spec.index, spec.name, ", ".join(parts), tolerance))
    return tuple(found)


class CheckInputs:
    """Of one kind of call: before its first run the ranks compare, and later behind the step."""

    def __init__(self, mesh: DeviceMesh, watch: Watch | None, inputs: Sequence[CheckedInput]) -> None:
        self._mesh, self._watch, self._inputs = mesh, watch, inputs
        self._figures = tuple((i.name, i.part, i.tolerance) for i in inputs)
        self._calls = 0

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Raises RankError, on all ranks, at the first call whose inputs differ."""
        self._calls += 1
        if self._watch is None or not self._inputs or not due(self._calls):
            return
        values = sums_of([local_of(tensors[i.index]) for i in self._inputs])
        if self._calls > 1:
            self._watch.sums.note(self._watch.turns.count, self._figures, values)
            return
        everybody = everyones(self._mesh, as_sums(self._figures, values), what="a comparison of inputs")
        found = difference(dict(enumerate(everybody)))
        if found is not None:
            raise RankError(found)
