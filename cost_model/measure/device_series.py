"""The series that measure one device, and the rates of a profile from their curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from cost_model.measure.compute_work import (
    LAUNCHES,
    launch_work,
    matmul_edge,
    matmul_flops,
    matmul_work,
    memory_work,
)
from cost_model.measure.sampling import Series
from cost_model.measure.statistics import SampledCurve, median
from cost_model.measurements import DeviceRates, MatmulRates

__all__ = ["DTYPES", "device_rates", "device_series", "least_seconds"]

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}

_LEAST_SECONDS = {"cpu": 60e-3, "cuda": 5e-3}
"""In 60 ms all ranks that share a core have had their turns. Four ranks on two cores reach 90 GFLOP/s each alone; they
measured 57 with 10 ms and 45, their share, with 60 ms. A GPU is not shared, and products of 8192 have to fit in the
seconds of a start: with 60 ms those of an H100 ended at 1024, and their rate, half of the best, stood for all above."""

_EDGES = {"cpu": (16, 32, 64, 128, 256, 512, 1024, 2048), "cuda": (64, 128, 256, 512, 1024, 2048, 4096, 8192)}
_MEMORY_NBYTES = {"cpu": (2**22, 2**23, 2**24, 2**25), "cuda": (2**24, 2**26, 2**28, 2**29)}


def device_series(device: torch.device) -> list[Series]:
    """Launch, memory, then products by dtype, as `device_rates` reads them. All ranks compute at once, because
    they share cores and memory in a step. A rate is the median rank's."""
    works: list[tuple[str, tuple[int, ...], Callable[[int], Callable[[], object]], int]] = [
        ("launch", (LAUNCHES,), lambda _: launch_work(device), 1),
        ("memory", _of(_MEMORY_NBYTES, device), lambda nbytes: memory_work(nbytes, device), 1),
    ]
    products = tuple(matmul_flops(edge) for edge in _of(_EDGES, device))
    works += [(f"{name} products", products, partial(_matmul, t, device), 2) for name, t in DTYPES.items()]
    # Every second size of products is always measured, up to the fifth.
    return [
        Series(
            name, sizes, prepare, median, least_seconds(device), sizes[: 2 * apart + 1 : apart], ahead=True
        )
        for name, sizes, prepare, apart in works
    ]


def device_rates(curves: Sequence[SampledCurve]) -> DeviceRates:
    """The rates from the curves of `device_series`. Memory bandwidth is that of the largest array."""
    launch, memory, *products = curves
    return DeviceRates(
        launch_seconds=launch.seconds[0] / LAUNCHES,
        memory_bytes_per_second=memory.sizes[-1] / memory.seconds[-1],
        matmul=tuple(_matmul_rates(name, curve) for name, curve in zip(DTYPES, products, strict=True)),
    )


def least_seconds(device: torch.device) -> float:
    """The least seconds of a repetition."""
    return _LEAST_SECONDS["cuda" if device.type == "cuda" else "cpu"]


def _of(by_type: Mapping[str, tuple[int, ...]], device: torch.device) -> tuple[int, ...]:
    return by_type["cuda" if device.type == "cuda" else "cpu"]


def _matmul(dtype: torch.dtype, device: torch.device, flops: int) -> Callable[[], object]:
    return matmul_work(matmul_edge(flops), dtype, device)


def _matmul_rates(dtype: str, curve: SampledCurve) -> MatmulRates:
    flops = tuple(map(float, curve.sizes))
    # Two products at a time. Sizes are powers of two, so that no rounding makes a longer time shorter.
    rates = tuple(2 * size / seconds for size, seconds in zip(flops, curve.seconds, strict=True))
    return MatmulRates(dtype, flops, rates, curve.spread)
