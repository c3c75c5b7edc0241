"""A few figures of the parameters and buffers of which other ranks have replicas, to be compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.watching.sums import Figure, sums_of, weights_of
from passes.ir.torch_dtensor import local_of

__all__ = ["Replicas"]

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
