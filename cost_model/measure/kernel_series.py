"""The series of `kernel_work`, and what a profile keeps of their curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from cost_model.measure.device_series import least_seconds
from cost_model.measure.kernel_work import (
    ATTENTION_PASSES,
    CONVOLUTION_PASSES,
    Attend,
    attention_flops,
    attention_work,
    convolution_flops,
    convolution_work,
    pooling_flops,
    pooling_work,
    update_work,
    updated_together,
)
from cost_model.measure.sampling import Series
from cost_model.measure.statistics import SampledCurve, median, monotone
from cost_model.measurements import DeviceRates, MatmulRates, UpdateRates

__all__ = ["kernel_series", "with_kernel_rates"]

_CONVOLUTIONS = {
    "cpu": ((2, 16, 16), (4, 32, 16), (8, 64, 16), (8, 64, 32)),
    "cuda": ((8, 64, 16), (16, 64, 32), (32, 128, 32), (64, 256, 32)),
}
_NARROW_CONVOLUTIONS = {
    "cpu": ((1, 8, 16), (1, 8, 64), (1, 8, 128)),
    "cuda": ((8, 8, 64), (8, 8, 256), (16, 8, 512)),
}
_ATTENTIONS = {
    "cpu": ((1, 4, 64, 64), (2, 4, 128, 64), (2, 8, 256, 64), (2, 8, 512, 64)),
    "cuda": ((2, 8, 256, 64), (4, 16, 512, 64), (4, 16, 2048, 64), (4, 16, 4096, 128)),
}
_POOLINGS = {
    "cpu": ((2, 16, 16), (8, 16, 32), (8, 64, 32)),
    "cuda": ((16, 64, 32), (32, 128, 32), (64, 256, 64)),
}
_UPDATES = {"cpu": (2**6, 2**20, 2**22, 2**24), "cuda": (2**6, 2**22, 2**26, 2**28)}

_Shape = TypeVar("_Shape")


def kernel_series(
    device: torch.device, mesh: DeviceMesh | None, attend: Attend | None = None
) -> list[Series]:
    """Convolutions, attention, max-pooling in the dtype the device is used with most, then the AdamW update.

    mesh: the mesh that holds the parameters; None without processes. attend: computes an attention.
    """
    dtype = getattr(torch, _dtype(device))
    convolutions = _by_size(_of(_CONVOLUTIONS, device), convolution_flops)
    attentions = _by_size(_of(_ATTENTIONS, device), attention_flops)
    narrow = _by_size(_of(_NARROW_CONVOLUTIONS, device), convolution_flops)
    poolings = _by_size(_of(_POOLINGS, device), pooling_flops)
    works: list[tuple[str, tuple[int, ...], Callable[[int], Callable[[], object]]]] = [
        ("convolutions", tuple(convolutions), lambda n: convolution_work(convolutions[n], dtype, device)),
        ("attention", tuple(attentions), lambda n: attention_work(attentions[n], dtype, device, attend)),
        ("max-pooling", tuple(poolings), lambda n: pooling_work(poolings[n], dtype, device)),
        ("narrow convolutions", tuple(narrow), lambda n: convolution_work(narrow[n], dtype, device)),
        ("AdamW update", _of(_UPDATES, device), lambda nbytes: update_work(nbytes, device, mesh)),
    ]
    return [
        Series(name, sizes, prepare, median, least_seconds(device), ahead=True)
        for name, sizes, prepare in works
    ]


def with_kernel_rates(
    rates: DeviceRates, curves: Sequence[SampledCurve], device: torch.device
) -> DeviceRates:
    """`rates` with those of the curves of `kernel_series`."""
    convolution, attention, pooling, narrow, update = curves
    slope = (update.seconds[-1] - update.seconds[0]) / (update.sizes[-1] - update.sizes[0])
    return replace(
        rates,
        convolution=(_rates(_dtype(device), convolution, CONVOLUTION_PASSES),),
        attention=(_rates(_dtype(device), attention, ATTENTION_PASSES),),
        pooling=(_rates(_dtype(device), pooling, 1.0),),
        narrow_convolution=(_rates(_dtype(device), narrow, CONVOLUTION_PASSES),),
        # Curves are monotone, but a noisy machine may leave no difference to divide by.
        update=UpdateRates(
            update.seconds[0] / updated_together(device),
            1.0 / slope if slope > 0 else rates.memory_bytes_per_second,
        ),
    )


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def _of(by_type: Mapping[str, _Shape], device: torch.device) -> _Shape:
    return by_type["cuda" if device.type == "cuda" else "cpu"]


def _by_size(shapes: Sequence[_Shape], flops: Callable[[_Shape], int]) -> dict[int, _Shape]:
    return {flops(shape): shape for shape in shapes}


def _rates(dtype: str, curve: SampledCurve, passes: float) -> MatmulRates:
    """Rates by the forward's operations. A curve's seconds are of `passes` times as many operations."""
    flops = tuple(map(float, curve.sizes))
    seconds = monotone([s / passes for s in curve.seconds])
    return MatmulRates(dtype, flops, tuple(n / s for n, s in zip(flops, seconds, strict=True)), curve.spread)
