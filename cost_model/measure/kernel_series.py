"""The series that measure one device, and the rates of a profile from their curves.

All ranks compute at once, because they share cores and memory in a step. A rate is the median rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from cost_model.measure.clock import Work
from cost_model.measure.kernel_work import (
    LAUNCHES,
    Attend,
    attention_flops,
    attention_work,
    convolution_flops,
    convolution_work,
    launch_work,
    matmul_edge,
    matmul_flops,
    matmul_work,
    memory_work,
    pooling_flops,
    pooling_work,
    update_work,
    updated_together,
)
from cost_model.measure.sampling import Series, by_device
from cost_model.measurements import DeviceRates, MatmulRates, SampledCurve, UpdateRates, median, monotone

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}

_LEAST_SECONDS = {"cpu": 60e-3, "cuda": 5e-3}
"""In 60 ms all ranks that share a core have had their turns. Four ranks on two cores reach 90 GFLOP/s each alone; they
measured 57 with 10 ms and 45, their share, with 60 ms. A GPU is not shared, and products of 8192 have to fit in the
seconds of a start: with 60 ms those of an H100 ended at 1024, and their rate, half of the best, stood for all above."""

_EDGES = {"cpu": (16, 32, 64, 128, 256, 512, 1024, 2048), "cuda": (64, 128, 256, 512, 1024, 2048, 4096, 8192)}
_MEMORY_NBYTES = {"cpu": (2**22, 2**23, 2**24, 2**25), "cuda": (2**24, 2**26, 2**28, 2**29)}
_UPDATES = {"cpu": (2**6, 2**20, 2**22, 2**24), "cuda": (2**6, 2**22, 2**26, 2**28)}


@dataclass(frozen=True)
class _Kernel:
    """A kind of `DeviceRates` that is measured in the dtype the device is used with most.

    shapes: by type of device. work: of a shape; passes: its operations over `flops`, which are the forward's.
    """

    name: str
    shapes: Mapping[str, Sequence[Any]]
    flops: Callable[[Any], int]
    work: Callable[..., Work]
    passes: float = 1.0


_KERNELS = {
    "convolution": _Kernel(
        "convolutions",
        {
            "cpu": ((2, 16, 16), (4, 32, 16), (8, 64, 16), (8, 64, 32)),
            "cuda": ((8, 64, 16), (16, 64, 32), (32, 128, 32), (64, 256, 32)),
        },
        convolution_flops,
        convolution_work,
        3.0,
    ),
    "attention": _Kernel(
        "attention",
        {
            "cpu": ((1, 4, 64, 64), (2, 4, 128, 64), (2, 8, 256, 64), (2, 8, 512, 64)),
            "cuda": ((2, 8, 256, 64), (4, 16, 512, 64), (4, 16, 2048, 64), (4, 16, 4096, 128)),
        },
        attention_flops,
        attention_work,
        3.5,
    ),
    "pooling": _Kernel(
        "max-pooling",
        {
            "cpu": ((2, 16, 16), (8, 16, 32), (8, 64, 32)),
            "cuda": ((16, 64, 32), (32, 128, 32), (64, 256, 64)),
        },
        pooling_flops,
        pooling_work,
    ),
    "narrow_convolution": _Kernel(
        "narrow convolutions",
        {
            "cpu": ((1, 8, 16), (1, 8, 64), (1, 8, 128)),
            "cuda": ((8, 8, 64), (8, 8, 256), (16, 8, 512)),
        },
        convolution_flops,
        convolution_work,
        3.0,
    ),
}


def device_series(device: torch.device) -> list[Series]:
    """Launch, memory, then products by dtype, as `device_rates` reads them."""
    sizes, least = tuple(matmul_flops(edge) for edge in by_device(_EDGES, device.type)), least_seconds(device)
    return [
        _series("launch", (LAUNCHES,), lambda _: launch_work(device), least),
        _series("memory", by_device(_MEMORY_NBYTES, device.type), partial(memory_work, device=device), least),
        # Every second size of products is always measured, up to the fifth.
        *(
            _series(
                f"{name} products", sizes, lambda n, t=dtype: matmul_work(matmul_edge(n), t, device), least, 2
            )
            for name, dtype in DTYPES.items()
        ),
    ]


def kernel_series(
    device: torch.device, mesh: DeviceMesh | None, attend: Attend | None = None
) -> list[Series]:
    """Convolutions, attention, max-pooling, then the AdamW update, as `with_kernel_rates` reads them.

    mesh: the mesh that holds the parameters; None without processes. attend: computes an attention.
    """
    found: list[Series] = []
    dtype, least = DTYPES[_dtype(device)], least_seconds(device)
    for kernel in _KERNELS.values():
        shapes = {kernel.flops(shape): shape for shape in by_device(kernel.shapes, device.type)}
        work = partial(attention_work, attend=attend) if kernel.work is attention_work else kernel.work
        prepare = lambda n, shapes=shapes, work=work: work(shapes[n], dtype, device)
        found.append(_series(kernel.name, tuple(shapes), prepare, least))
    update = lambda nbytes: update_work(nbytes, device, mesh)
    return [*found, _series("AdamW update", by_device(_UPDATES, device.type), update, least)]


def least_seconds(device: torch.device) -> float:
    """The least seconds of a repetition."""
    return by_device(_LEAST_SECONDS, device.type)


def _series(
    name: str, sizes: tuple[int, ...], prepare: Callable[[int], Work], least: float, apart: int = 1
) -> Series:
    """apart: of the sizes that are always measured."""
    return Series(name, sizes, prepare, median, least, sizes[: 2 * apart + 1 : apart], ahead=True)


def device_rates(curves: Sequence[SampledCurve]) -> DeviceRates:
    """The rates from the curves of `device_series`. Memory bandwidth is that of the largest array."""
    launch, memory, *products = curves
    return DeviceRates(
        launch_seconds=launch.seconds[0] / LAUNCHES,
        memory_bytes_per_second=memory.sizes[-1] / memory.seconds[-1],
        # Two products at a time.
        matmul=tuple(_rates(name, curve, 2.0) for name, curve in zip(DTYPES, products, strict=True)),
    )


def with_kernel_rates(
    rates: DeviceRates, curves: Sequence[SampledCurve], device: torch.device
) -> DeviceRates:
    """`rates` with those of the curves of `kernel_series`."""
    *kernels, update = curves
    slope = (update.seconds[-1] - update.seconds[0]) / (update.sizes[-1] - update.sizes[0])
    found = {
        kind: (_rates(_dtype(device), curve, kernel.passes),)
        for (kind, kernel), curve in zip(_KERNELS.items(), kernels, strict=True)
    }
    # Curves are monotone, but a noisy machine may leave no difference to divide by.
    bandwidth = 1.0 / slope if slope > 0 else rates.memory_bytes_per_second
    return replace(
        rates, **found, update=UpdateRates(update.seconds[0] / updated_together(device), bandwidth)
    )


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def _rates(dtype: str, curve: SampledCurve, passes: float) -> MatmulRates:
    """Rates by the forward's operations. A curve's seconds are of `passes` times as many operations."""
    flops = tuple(map(float, curve.sizes))
    seconds = monotone([s / passes for s in curve.seconds])
    return MatmulRates(dtype, flops, tuple(n / s for n, s in zip(flops, seconds, strict=True)), curve.spread)
