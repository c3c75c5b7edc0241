"""What ranks must have alike in a kind of call, checked at its first calls and then now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.watching.agreement import everyones
from autoshard.watching.sums import Figure, as_sums, difference, sums_of, tolerance_of, weights_of
from autoshard.watching.watch import Watch
from cost_model.errors import RankError
from cost_model.mesh import MeshSpec
from passes.capture.call import flatten_call, tensor_names
from passes.ir.joint import JointGraph
from passes.ir.torch_dtensor import local_of
from passes.layout.layout import Layout
from passes.plan.describe import graph_hash


def kind_of(model: nn.Module, joint: JointGraph) -> str:
    """The same on all ranks for the same program: global shapes for people, and the hash of all that it computes."""
    pairs = zip(joint.inputs, joint.placeholders, strict=True)
    shapes = [_shown(node.meta["val"]) for spec, node in pairs if spec.kind == "input"]
    mode = "training" if model.training else "eval"
    mode += ", gradients" if any(spec.kind == "tangent" for spec in joint.inputs) else ", no gradients"
    return f"{type(model).__name__}({', '.join(shapes)}), {mode}, program {graph_hash(joint)[:8]}"


def local_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """This rank's tensors, for people."""
    tensors, key = flatten_call(args, kwargs)
    names = tensor_names(key)
    return ", ".join(f"{name} {_shown(tensor)}" for name, tensor in zip(names, tensors, strict=True))


def tensor_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Of this rank's tensors."""
    tensors, _ = flatten_call(args, kwargs)
    return [tuple(t.to_local().shape) if isinstance(t, DTensor) else tuple(t.shape) for t in tensors]


def turns_of(watch: Watch | None, kind: str) -> Callable[[str], AbstractContextManager[Any]]:
    """Of "forward" or "backward": the turn in which all ranks run it."""
    if watch is None:
        return lambda phase: nullcontext()
    keys = {phase: f"{phase} of {kind}" for phase in ("forward", "backward")}
    return lambda phase: watch.turn(keys[phase])


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


SAMPLED = 64
"""Values of a tensor at most, others in each comparison."""
LEAST_TOLERANCE = 1e-5
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Replicas:
    """Of one model: its parameters, and `buffers` by path, which every rank has whole."""

    def __init__(self, model: nn.Module, buffers: Sequence[str]) -> None:
        self._model, self._buffers = model, buffers
        self._lengths: tuple[int, ...] = ()
        self._weights = self._rows = torch.empty(0)

    def sampled(self, number: int) -> tuple[tuple[Figure, ...], Tensor]:
        """Of each its figure and [tensor, 5] sums on their device, as of `sums_of`. number: of this comparison."""
        figures: list[Figure] = []
        samples: list[Tensor] = []
        for figure, tensor in self._held():
            figures.append(figure)
            samples.append(_sample(tensor, number))
        if not samples:
            return (), sums_of([])
        values = torch.cat(samples).double().nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
        self._prepare(tuple(map(len, samples)), values.device)
        columns = torch.cat([values * self._weights, values.abs()[None]])
        sums = torch.zeros(len(figures), len(columns), dtype=torch.float64, device=values.device)
        return tuple(figures), sums.index_add_(0, self._rows, columns.T)

    def _held(self) -> Iterator[tuple[Figure, Tensor]]:
        for name, parameter in self._model.named_parameters():
            part = _part(parameter) if isinstance(parameter, DTensor) else None
            tensor = local_of(parameter)
            if part is not None and _is_compared(tensor):
                yield ("parameter", name, part, _tolerance(tensor)), tensor
        for name in self._buffers:
            owner, _, attribute = name.rpartition(".")
            tensor = getattr(self._model.get_submodule(owner), attribute)
            if _is_compared(tensor):
                yield ("buffer", name, "", _tolerance(tensor)), tensor

    def _prepare(self, lengths: tuple[int, ...], device: torch.device) -> None:
        """Weights and rows of all samples, which stay while the model's tensors do."""
        if lengths != self._lengths or self._rows.device != device:
            self._lengths = lengths
            self._rows = torch.repeat_interleave(torch.tensor(lengths)).to(device)
            self._weights = weights_of(torch.arange(sum(lengths), device=device))


def _part(parameter: DTensor) -> str | None:
    """What this rank has of it, "" for all; None if no other rank has the same."""
    mesh, placements = parameter.device_mesh, parameter.placements
    here = mesh.get_coordinate()
    axes = range(len(placements))
    if here is None or not any(placements[a].is_replicate() and mesh.size(a) > 1 for a in axes):
        return None
    return ", ".join(f"{here[a]} of {placements[a]}" for a in axes if not placements[a].is_replicate())


def _is_compared(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.dtype in _DTYPES and tensor.numel() > 0 and not tensor.is_meta


def _tolerance(tensor: Tensor) -> float:
    """A few roundings apart replicas may be, where each rank computes its own."""
    return max(LEAST_TOLERANCE, 4 * torch.finfo(tensor.dtype).eps)


def _sample(tensor: Tensor, number: int) -> Tensor:
    """Values at equal distances; where the first is looks random, so that in time each value is among them."""
    numel = tensor.numel()
    step = -(-numel // SAMPLED)
    count = numel // step
    # Numbers are multiples of a power of two, which the upper bits of the product do not show.
    start = (number * 0x9E3779B97F4A7C15 % 2**64 >> 20) % (numel - step * (count - 1))
    return tensor.detach().flatten()[start::step][:count]


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
