"""Seconds of one kernel on one device: `ComputePrices`, a roofline over measured rates."""

from __future__ import annotations

import re
from dataclasses import replace

from cost_model.measurements import KERNEL_KINDS, Curve, KernelKind, MatmulRates
from cost_model.memory import ADAMW
from cost_model.profile_record import ProfileRecord
from cost_model.timed import KernelKey, KernelWork, Priced, TimedPrices

STORE_SHARE = 0.5
"""The share of storing a product's result on a GPU that arithmetic does not hide. Four products of 4096 x 4096 take
68.2 us on an H100 with 256 operations a result and 110.9 us with 512. So 25.5 us are not arithmetic; the launch is 3 of
them, and storing 134 MB takes 46 us. [openxla/xla, xla/service/gpu/model/matmul_interpolator_data.h, sm_90]"""

NARROW_RATES = {
    ("cuda", "bfloat16"): {"float8": 2.0, "int8": 2.0},
    ("cpu", "float32"): {"float8": 0.7, "int8": 8.0},
}
"""How many times as fast as products of the dtype on the device those of 8 bits are that a profile has no rate for.
CUDA: the peaks in NVIDIA's data sheets of A100 and H100 (1,979 and 989 Tflop/s). CPU: torch 2.13, one core with AMX,
products of 256 to 1,024: 48 to 78 Gflop/s in float8, 860 to 930 in int8, 105 to 110 in float32."""


class ComputePrices:
    """Prices of kernels under `profile`.

        seconds = launch + max(flops / rate(flops, dtype), nbytes / memory bandwidth)

    A product on a CPU waits for what it loads beyond the operands that its rate was measured with:

        seconds = launch + max(flops / rate, bare(flops) + nbytes / memory bandwidth)

    where bare is flops / rate less the time to load the operands of the product that was measured.
    16 rows times a cold 768 x 3072 weight took 1.46 ms on one core. The arithmetic takes 0.90 ms at the measured rate,
    and 9.4 MB are loaded at 17 GB/s.

    A product on a GPU waits for half of its stores (`STORE_SHARE`). Measured rates include this wait, so only nominal
    profiles add it:

        seconds = launch + max(flops / rate + STORE_SHARE * stored / memory bandwidth, nbytes / memory bandwidth)

    device_type: where the plan will run, if known. A profile of another device type still prices (a
    plan for GPUs may be tried on CPUs); `foreign` then says that the numbers are another device's.
    timed: kernels that were timed; None: the model prices all.
    """

    def __init__(
        self, profile: ProfileRecord, device_type: str | None = None, timed: TimedPrices | None = None
    ) -> None:
        self.profile = profile
        self.timed = timed
        self._scales: dict[KernelKind | None, float] = {}
        self.foreign = device_type is not None and device_type != profile.device_type
        self.launch_seconds = profile.device.launch_seconds
        self._seconds_per_byte = 1.0 / profile.device.memory_bytes_per_second
        self._kinds: dict[KernelKind, dict[str, Curve]] = {
            kind: {rates.dtype: _time_curve(rates) for rates in profile.device.rates(kind)}
            for kind in KERNEL_KINDS
        }
        for rates in profile.device.matmul:
            for name, times in NARROW_RATES.get((profile.device_type, rates.dtype), {}).items():
                faster = tuple(times * rate for rate in rates.flops_per_second)
                curve = _time_curve(replace(rates, flops_per_second=faster))
                self._kinds["matmul"].setdefault(name, curve)
        self._kinds["narrow_convolution"] = self._kinds["convolution"] | self._kinds["narrow_convolution"]
        self._bare = {
            rates.dtype: _bare_curve(rates, self._seconds_per_byte)
            for rates in profile.device.matmul
            if profile.device_type == "cpu"
        }
        adds_stores = profile.nominal and profile.device_type == "cuda"
        self._seconds_per_stored = STORE_SHARE * self._seconds_per_byte if adds_stores else 0.0
        self._slowest = _time_curve(min(profile.device.matmul, key=lambda rates: rates.flops_per_second[-1]))
        best = {rates.dtype: max(rates.flops_per_second) for rates in profile.device.matmul}
        self._narrow, self._wide = (best.get(name, min(best.values())) for name in ("float32", "float64"))

    def matmul_seconds(self, flops: float, dtype_name: str) -> float:
        """Arithmetic time of a matrix product of `flops` = 2 m n k operations, without launch.

        The rate is measured by size: time is interpolated between the measured sizes and proportional
        to flops outside them. A dtype without a rate gets the profile's slowest rate.
        """
        return self._kinds["matmul"].get(dtype_name, self._slowest)(flops) if flops else 0.0

    def memory_seconds(self, nbytes: float) -> float:
        """Time to read and write `nbytes` of device memory in all, without launch."""
        return nbytes * self._seconds_per_byte

    def arithmetic_seconds(self, kind: KernelKind | None, flops: float, dtype_name: str) -> float:
        """Seconds of `flops` operations of one op of that kind. An op of a kind without rates counts as a matrix
        product; a narrow convolution counts as any other convolution. Without a kind it is pointwise and part of a
        loop, which computes in float32 or float64, and which no small size slows down: the best rate holds. (By the
        rate of a product of as many operations a norm's ops of 8 million floats took an H100 19 us each.)"""
        if kind is None:
            return flops / (self._wide if dtype_name == "float64" else self._narrow)
        own = self._kinds[kind].get(dtype_name) if flops else None
        return self.matmul_seconds(flops, dtype_name) if own is None else own(flops)

    def work_seconds(self, work: KernelWork, key: KernelKey | None = None) -> float:
        """Seconds of a kernel: timed where it was, or one near it (`cost_model.timed`); else as the model has it.
        key: what it is timed as; None: not at all."""
        if self.timed is None or key is None:
            return self._modelled(work)
        limit = work.limited_by
        if limit not in self._scales:
            self._scales[limit] = self.timed.scale(limit, self._modelled)
        return self.timed.seconds(key, work, self._modelled, self._scales[limit])

    def priced(self, key: KernelKey | None) -> Priced:
        """The origin of a kernel's `work_seconds`."""
        return "modelled" if self.timed is None or key is None else self.timed.priced(key)

    def _modelled(self, work: KernelWork) -> float:
        seconds = self.kernel_seconds(
            work.flops, work.nbytes, work.dtype, work.kind, work.stored, work.groups
        )
        return seconds + (self.launch_seconds if work.launched else 0.0)

    def kernel_seconds(
        self,
        flops: float,
        nbytes: float,
        dtype_name: str,
        kind: KernelKind | None = "matmul",
        stored: float = 0.0,
        groups: int = 1,
    ) -> float:
        """Seconds of a kernel that is running: its arithmetic, loads and stores, as the class says. stored: those of
        `nbytes` that are results. groups: of products that it makes, each as fast as one of its size alone: 16 of 512 x
        5120 x 8192 took an H100 1.31 ms, where one of as many operations in all takes 1.17. [pytorch/ao pull request
        2490]"""
        arithmetic = groups * self.arithmetic_seconds(kind, flops / groups, dtype_name)
        memory = self.memory_seconds(nbytes)
        if kind == "matmul" and flops:
            bare = self._bare.get(dtype_name)
            memory += groups * bare(flops / groups) if bare else 0.0
            arithmetic += stored * self._seconds_per_stored
        return max(arithmetic, memory)

    def update_seconds(self, nbytes: float, passes: int) -> float:
        """Seconds of the optimizer's update of one parameter, of which this device holds `nbytes`. AdamW's rate is
        measured, and others are taken to go by their `passes`; without a measurement, `passes` arrays of that size are
        read and written."""
        update = self.profile.device.update
        if update is None:
            return self.memory_seconds(passes * nbytes)
        return update.launch_seconds + passes / ADAMW.passes * nbytes / update.bytes_per_second


def _time_curve(rates: MatmulRates) -> Curve:
    """flops -> seconds; outside the measured sizes the nearest measured rate holds."""
    times = [size / rate for size, rate in zip(rates.flops, rates.flops_per_second, strict=True)]
    below = times[0] / rates.flops[0]
    return Curve(rates.flops, times, below, times[-1] / rates.flops[-1])


def _bare_curve(rates: MatmulRates, seconds_per_byte: float) -> Curve:
    """flops -> seconds of arithmetic alone. A product of 2 e^3 operations was measured as a square one and as one of
    e / 4 rows against a transposed weight of 2 e x 2 e (`cost_model.measure.kernel_work.matmul_work`). The two load
    and store 4 e^2 elements on average. The curve never falls, so that no price falls as operations are added."""
    times: list[float] = []
    for flops, rate in zip(rates.flops, rates.flops_per_second, strict=True):
        loads = 4 * (flops / 2) ** (2 / 3) * _element_nbytes(rates.dtype)
        times.append(max(flops / rate - loads * seconds_per_byte, *times, 1e-12))
    return Curve(rates.flops, times, times[0] / rates.flops[0], times[-1] / rates.flops[-1])


def _element_nbytes(dtype_name: str) -> int:
    """ "bfloat16" -> 2."""
    bits = re.search(r"\d+", dtype_name)
    return 4 if bits is None else max(1, int(bits.group()) // 8)
