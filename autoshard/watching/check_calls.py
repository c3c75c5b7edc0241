"""What ranks must have alike in a kind of call, checked at its first calls and then now and then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.watching.agreement import everyones
from autoshard.watching.sums import Figure, as_sums, difference
from autoshard.watching.watch import Watch
from cost_model.errors import RankError
from cost_model.mesh import MeshSpec
from passes.capture.call import TensorKey, flatten_call, tensor_names
from passes.ir.joint import JointGraph
from passes.ir.torch_dtensor import local_of
from passes.layout.layout import Layout
from passes.plan.describe import graph_hash


def kind_of(model: nn.Module, joint: JointGraph) -> str:
    """The same on all ranks for the same program: global shapes for people, and the hash of all that it computes."""
    shapes = [str(TensorKey.of(node.meta["val"])) for node, spec in joint.given if spec.kind == "input"]
    return kind_text(model, shapes, joint, f"program {graph_hash(joint)[:8]}")


def kind_text(model: nn.Module, shapes: Sequence[str], joint: JointGraph, program: str) -> str:
    mode = "training" if model.training else "eval"
    mode += ", gradients" if any(spec.kind == "tangent" for spec in joint.inputs) else ", no gradients"
    return f"{type(model).__name__}({', '.join(shapes)}), {mode}, {program}"


def local_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """This rank's tensors, for people."""
    _, key = flatten_call(args, kwargs)
    return ", ".join(f"{name} {one}" for name, one in zip(tensor_names(key), key.tensors, strict=True))


def tensor_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of this rank's tensors."""
    tensors, _ = flatten_call(args, kwargs)
    return [tuple(t.to_local().shape) if isinstance(t, DTensor) else tuple(t.shape) for t in tensors]


def turns_of(watch: Watch | None, kind: str) -> Callable[[str], AbstractContextManager[Any]]:
    """ "forward" or "backward" -> the turn in which all ranks run it."""
    if watch is None:
        return lambda phase: nullcontext()
    keys = {phase: f"{phase} of {kind}" for phase in ("forward", "backward")}
    return lambda phase: watch.turn(keys[phase])


SLOPES = (0.6180339887498949, 0.4142135623730951, 0.7320508075688772, 0.2360679774997897)
"""Slopes of the weights. One sum of another batch may be within the tolerance by chance, once in a hundred; not all."""


def tolerance_of(dtype: torch.dtype) -> float:
    """How far apart rounding may be, as a part of the absolute sum, in which it cancels; integers are exact. Two
    batches of random values are about 1 / sqrt(values sampled) apart."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 1e-12
    return 2e-4 if dtype in (torch.float16, torch.bfloat16) else 1e-5


class Sampler:
    """Sums of up to `most` values of each of some tensors. Rows and weights stay while the tensors' sizes do."""

    def __init__(self, most: int) -> None:
        self._most, self._lengths = most, ()
        self._weights = self._rows = torch.empty(0)

    @torch.no_grad()
    def sums(self, tensors: Sequence[Tensor], number: int) -> Tensor:
        """[tensor, 5] on the tensors' device, without waiting for it: weighted sums of sampled values, and their
        absolute sum. number: of this comparison, in which other values are sampled than in the last."""
        samples = [_sample(tensor.detach(), number, self._most) for tensor in tensors]
        device = next((one.device for one in samples if one.device.type != "cpu"), torch.device("cpu"))
        sums = torch.zeros(len(samples), len(SLOPES) + 1, dtype=torch.float64, device=device)
        if not samples:
            return sums
        self._prepare(tuple(map(len, samples)), device)
        values = torch.cat([one.to(device, non_blocking=True) for one in samples]).double()
        values = values.nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
        columns = torch.cat([values * self._weights, values.abs()[None]])
        return sums.index_add_(0, self._rows, columns.T)

    def _prepare(self, lengths: tuple[int, ...], device: torch.device) -> None:
        """Weights between 0.5 and 1.5, [slope, value]: of a tensor's n-th value the same on every rank."""
        if lengths != self._lengths or self._rows.device != device:
            self._lengths = lengths
            self._rows = torch.repeat_interleave(torch.tensor(lengths)).to(device)
            places = torch.cat([torch.arange(1.0, length + 1, dtype=torch.float64) for length in lengths])
            slopes = torch.tensor(SLOPES, dtype=torch.float64)
            self._weights = (torch.frac(places * slopes[:, None]) + 0.5).to(device)


def _sample(tensor: Tensor, number: int, most: int) -> Tensor:
    """Values at equal distances; where the first is looks random, so that in time each value is among them."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    numel = tensor.numel()
    step = max(1, -(-numel // most))
    while math.gcd(step, numel) > 1:  # else all samples of a matrix might be of a few columns
        step += 1
    count = numel // step
    # Numbers are multiples of a power of two, which the upper bits of the product do not show.
    start = (number * 0x9E3779B97F4A7C15 % 2**64 >> 20) % (numel - step * (count - 1))
    if tensor.is_contiguous():
        values = tensor.view(-1)[start::step][:count]
    else:
        places = torch.arange(start, start + step * count, step, device=tensor.device)
        values = torch.take(tensor, places)
    return values if values.is_floating_point() and values.element_size() > 1 else values.double()


class Replicas:
    """Replicas in one model: its parameters, and `buffers` by path, which every rank has whole."""

    def __init__(self, model: nn.Module, buffers: Sequence[str]) -> None:
        self._model, self._buffers = model, buffers
        self._sampler = Sampler(64)

    def sampled(self, number: int) -> tuple[tuple[Figure, ...], Tensor]:
        """The figure of each, and their [tensor, 5] sums by `Sampler`."""
        held = list(self._held())
        return tuple(figure for figure, _ in held), self._sampler.sums([one for _, one in held], number)

    def _held(self) -> Iterator[tuple[Figure, Tensor]]:
        for name, parameter in self._model.named_parameters():
            part = _part(parameter) if isinstance(parameter, DTensor) else None
            tensor = local_of(parameter)
            if part is not None and _is_compared(tensor):
                yield ("parameter", name, part, _tolerance(tensor)), tensor
        for name in self._buffers:
            owner, _, attribute = name.rpartition(".")
            tensor = getattr(self._model.get_submodule(owner), attribute, None)
            if _is_compared(tensor):
                yield ("buffer", name, "", _tolerance(tensor)), tensor


def _part(parameter: DTensor) -> str | None:
    """The part of it that this rank has, "" for all; None if no other rank has the same."""
    mesh, placements = parameter.device_mesh, parameter.placements
    here = mesh.get_coordinate()
    axes = range(len(placements))
    if here is None or not any(placements[a].is_replicate() and mesh.size(a) > 1 for a in axes):
        return None
    return ", ".join(f"{here[a]} of {placements[a]}" for a in axes if not placements[a].is_replicate())


def _is_compared(tensor: object) -> TypeGuard[Tensor]:
    """Not what has become None, as a metric's last value that no program reads."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return False
    wide = tensor.is_floating_point() and tensor.element_size() > 1
    return wide and tensor.layout is torch.strided and tensor.numel() > 0


def _tolerance(tensor: Tensor) -> float:
    """A few roundings apart replicas may be, where each rank computes its own."""
    return max(1e-5, 4 * torch.finfo(tensor.dtype).eps)


def checked_inputs(
    joint: JointGraph, layouts: Mapping[int, Layout], mesh: MeshSpec, rank: int
) -> dict[int, Figure]:
    """By index in a call, those that some other rank must have alike; not addends of a sum, of which each rank has its
    own."""
    found: dict[int, Figure] = {}
    for node, spec in joint.given:
        layout = layouts.get(spec.index)
        if spec.kind != "input" or (layout is not None and layout.partial):
            continue
        dims = () if layout is None else layout.dims
        parts = [f"{mesh.linear_index(rank, axes)} of dim {d}" for d, axes in enumerate(dims) if axes]
        found[spec.index] = ("input", spec.name, ", ".join(parts), tolerance_of(node.meta["val"].dtype))
    return found


class CheckCalls:
    """Checks one kind of call: before its first run the ranks compare their inputs. Behind the step, at its next two
    calls and then at the pace of the watch, they compare inputs, replicas of the model's tensors and updates."""

    def __init__(
        self, mesh: DeviceMesh, watch: Watch | None, inputs: Mapping[int, Figure], replicas: Replicas
    ) -> None:
        self._mesh, self._watch, self._inputs, self._replicas = mesh, watch, tuple(inputs), replicas
        self._figures = tuple(inputs.values())
        self._sampler = Sampler(4096)
        self._calls = 0

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Raises RankError, on all ranks, at the first call whose inputs differ."""
        watch = self._watch
        if watch is None:
            return
        self._calls += 1
        due = watch.sums.pace.due()
        if self._calls > 3 and not due:
            return
        number = watch.sums.pace.calls
        values = self._sampler.sums([local_of(tensors[index]) for index in self._inputs], number)
        if self._calls > 1:
            figures, replicas = self._replicas.sampled(number)
            together = torch.cat([values.to(replicas.device, non_blocking=True), replicas])
            watch.sums.note(watch.turns.count, self._figures + figures, together, watch.updates.told())
        elif self._inputs:
            everybody = everyones(self._mesh, as_sums(self._figures, values), what="a comparison of inputs")
            found = difference(dict(enumerate(everybody)))
            if found is not None:
                raise RankError(found)
