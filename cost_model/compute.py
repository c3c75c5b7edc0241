"""Seconds of one kernel on one device: `ComputePrices`, a roofline over measured rates."""

from __future__ import annotations

from typing import Literal

from cost_model.curve import Curve
from cost_model.measurements import MatmulRates
from cost_model.profile import Profile

__all__ = ["ComputePrices", "Kind"]

Kind = Literal["matmul", "convolution", "attention"]
"""Ops that count in operations, by what rate they reach."""


class ComputePrices:
    """Prices of kernels under `profile`.

        op_seconds = launch + max(flops / rate(flops, dtype), nbytes / memory bandwidth)

    device_type: where the plan will run, if known. A profile of another device type still prices (a
    plan for GPUs may be tried on CPUs); `foreign` then says that the numbers are another device's.
    """

    def __init__(self, profile: Profile, device_type: str | None = None) -> None:
        self.profile = profile
        self.foreign = device_type is not None and device_type != profile.device_type
        self._launch = profile.device.launch_seconds
        self._seconds_per_byte = 1.0 / profile.device.memory_bytes_per_second
        self._matmul = {rates.dtype: _time_curve(rates) for rates in profile.device.matmul}
        self._kinds: dict[Kind, dict[str, Curve]] = {
            "matmul": self._matmul,
            "convolution": {rates.dtype: _time_curve(rates) for rates in profile.device.convolution},
            "attention": {rates.dtype: _time_curve(rates) for rates in profile.device.attention},
        }
        self._slowest = _time_curve(min(profile.device.matmul, key=lambda rates: rates.flops_per_second[-1]))

    @property
    def launch_seconds(self) -> float:
        """Constant part of every kernel."""
        return self._launch

    def has_rate(self, dtype_name: str) -> bool:
        """Whether the profile has a matrix-product rate for this dtype ("float32", "bfloat16", ...)."""
        return dtype_name in self._matmul

    def matmul_seconds(self, flops: float, dtype_name: str) -> float:
        """Arithmetic time of a matrix product of `flops` = 2 m n k operations, without launch.

        The rate is measured by size: time is interpolated between the measured sizes and proportional
        to flops outside them. A dtype without a rate (`has_rate`) gets the profile's slowest rate.
        """
        return self._matmul.get(dtype_name, self._slowest)(flops) if flops else 0.0

    def memory_seconds(self, nbytes: float) -> float:
        """Time to read and write `nbytes` of device memory in all, without launch."""
        return nbytes * self._seconds_per_byte

    def arithmetic_seconds(self, kind: Kind, flops: float, dtype_name: str) -> float:
        """`flops` operations of one op of that kind; without measured rates of its own, as a matrix product."""
        own = self._kinds[kind].get(dtype_name) if flops else None
        return self.matmul_seconds(flops, dtype_name) if own is None else own(flops)

    def op_seconds(self, flops: float, nbytes: float, dtype_name: str, kind: Kind = "matmul") -> float:
        """launch + max(arithmetic_seconds, memory_seconds). Pointwise kernels pass flops=0."""
        arithmetic = self.arithmetic_seconds(kind, flops, dtype_name)
        return self._launch + max(arithmetic, self.memory_seconds(nbytes))

    def update_seconds(self, nbytes: float, passes: int) -> float:
        """The optimizer's update of one parameter of which this device holds `nbytes`: measured, or
        `passes` arrays of that size read and written."""
        update = self.profile.device.update
        if update is None:
            return self.memory_seconds(passes * nbytes)
        return update.launch_seconds + nbytes / update.bytes_per_second


def _time_curve(rates: MatmulRates) -> Curve:
    """flops -> seconds; outside the measured sizes the nearest measured rate holds."""
    times = [size / rate for size, rate in zip(rates.flops, rates.flops_per_second, strict=True)]
    below = times[0] / rates.flops[0]
    return Curve(rates.flops, times, below, times[-1] / rates.flops[-1])
