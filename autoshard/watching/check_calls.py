"""What ranks must have alike in a kind of call, checked at its first calls and then now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.agreement import everyones
from autoshard.watching.replicas import Replicas
from autoshard.watching.sums import Figure, as_sums, difference, sums_of, tolerance_of
from autoshard.watching.watch import Watch
from cost_model.errors import RankError
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.ir.torch_dtensor import local_of
from passes.layout.layout import Layout

__all__ = ["CheckCalls", "CheckedInput", "checked_inputs"]

OFTEN = 3


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


class CheckCalls:
    """Of one kind of call: before its first run the ranks compare their inputs. Behind the step, at its next two calls
    and then at the pace of the watch, they compare inputs, replicas of the model's tensors and updates."""

    def __init__(
        self, mesh: DeviceMesh, watch: Watch | None, inputs: Sequence[CheckedInput], replicas: Replicas
    ) -> None:
        self._mesh, self._watch, self._inputs, self._replicas = mesh, watch, inputs, replicas
        self._figures: tuple[Figure, ...] = tuple(("input", i.name, i.part, i.tolerance) for i in inputs)
        self._calls = 0

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Raises RankError, on all ranks, at the first call whose inputs differ."""
        watch = self._watch
        if watch is None:
            return
        self._calls += 1
        due = watch.sums.pace.due()
        if self._calls > OFTEN and not due:
            return
        values = sums_of([local_of(tensors[i.index]) for i in self._inputs])
        if self._calls > 1:
            figures, replicas = self._replicas.sampled(watch.sums.pace.calls)
            together = torch.cat([values.to(replicas.device, non_blocking=True), replicas])
            watch.sums.note(watch.turns.count, self._figures + figures, together, watch.updates.told())
        elif self._inputs:
            everybody = everyones(self._mesh, as_sums(self._figures, values), what="a comparison of inputs")
            found = difference(dict(enumerate(everybody)))
            if found is not None:
                raise RankError(found)
