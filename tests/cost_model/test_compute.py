from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.compute import ComputePrices
from cost_model.measurements import MatmulRates, UpdateRates
from cost_model.profile import Profile
from cost_model.timed import KernelWork

SHIPPED = [ComputePrices(Profile.named(name)) for name in Profile.names()]
DTYPES = ("float32", "bfloat16", "float16", "float64")


def test_matmul_at_the_measured_sizes(round_profile: Profile) -> None:
    prices = ComputePrices(round_profile)
    assert prices.matmul_seconds(1e6, "float32") == pytest.approx(1e-6)
    assert prices.matmul_seconds(1e8, "float32") == pytest.approx(1e-5)
    assert prices.matmul_seconds(1e8, "bfloat16") == pytest.approx(5e-6)


def test_matmul_between_and_beyond(round_profile: Profile) -> None:
    prices = ComputePrices(round_profile)
    assert prices.matmul_seconds(1e7, "float32") == pytest.approx(1e-5 / 10**0.5)  # 1 us to 10 us, half way
    assert prices.matmul_seconds(1e5, "float32") == pytest.approx(1e-7)  # at 1 Tflop/s
    assert prices.matmul_seconds(1e10, "float32") == pytest.approx(1e-3)  # at 10 Tflop/s
    assert prices.matmul_seconds(0, "float32") == 0.0


def test_a_dtype_without_a_rate_gets_the_slowest(round_profile: Profile) -> None:
    prices = ComputePrices(round_profile)
    assert prices.matmul_seconds(1e8, "int64") == prices.matmul_seconds(1e8, "float32")


def test_roofline(round_profile: Profile) -> None:
    prices = ComputePrices(replace(round_profile, device_type="cuda"))
    assert prices.launch_seconds == 2e-6
    assert prices.memory_seconds(1e6) == pytest.approx(1e-6)
    assert prices.work_seconds(KernelWork(1e8, 1e6, "float32")) == pytest.approx(
        2e-6 + 10e-6
    )  # the product takes longer
    assert prices.work_seconds(KernelWork(1e8, 50e6, "float32")) == pytest.approx(
        2e-6 + 50e-6
    )  # the memory does
    assert prices.work_seconds(KernelWork(0, 1e6, "int64")) == pytest.approx(3e-6)
    assert prices.work_seconds(KernelWork(0, 0, "bool")) == pytest.approx(2e-6)


def test_a_profile_of_another_device_is_flagged(round_profile: Profile) -> None:
    assert ComputePrices(round_profile, "cuda").foreign
    assert not ComputePrices(round_profile, "cpu").foreign
    assert not ComputePrices(round_profile).foreign
    assert not ComputePrices(replace(round_profile, device_type="cuda"), "cuda").foreign


@given(
    st.sampled_from(SHIPPED),
    st.sampled_from(DTYPES),
    st.floats(0, 1e16),
    st.floats(0, 1e16),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
)
def test_never_falls(
    prices: ComputePrices, dtype: str, flops: float, more: float, nbytes: int, larger: int
) -> None:
    (f0, f1), (b0, b1) = sorted((flops, more)), sorted((nbytes, larger))
    assert (
        prices.launch_seconds
        <= prices.work_seconds(KernelWork(f0, b0, dtype))
        <= prices.work_seconds(KernelWork(f1, b1, dtype))
    )


def test_nominal_rates_stay_under_the_data_sheets() -> None:
    peaks = {
        "h100": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12},
        "a100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
    }
    for name, by_dtype in peaks.items():
        prices = ComputePrices(Profile.named(name))
        for dtype, peak in by_dtype.items():
            assert dtype in {rates.dtype for rates in prices.profile.device.matmul}
            for flops in (1e6, 1e9, 1e12, 1e15):
                assert flops / prices.matmul_seconds(flops, dtype) < peak


def test_convolution_and_attention_have_rates_of_their_own(round_profile: Profile) -> None:
    slow = (MatmulRates("float32", (1e6, 1e8), (1e11, 1e11)),)
    prices = ComputePrices(replace(round_profile, device=replace(round_profile.device, convolution=slow)))
    assert prices.arithmetic_seconds("convolution", 1e7, "float32") == pytest.approx(1e-4)
    # Neither this kind nor this dtype was measured: as a product.
    assert prices.arithmetic_seconds("attention", 1e7, "float32") == prices.matmul_seconds(1e7, "float32")
    product = prices.matmul_seconds(1e7, "bfloat16")
    assert prices.arithmetic_seconds("convolution", 1e7, "bfloat16") == product
    launch = round_profile.device.launch_seconds
    assert prices.work_seconds(KernelWork(1e7, 0, "float32", "convolution")) == pytest.approx(launch + 1e-4)


def test_pointwise_work_runs_at_the_best_rate(round_profile: Profile) -> None:
    """A small product is slow for reasons that an op within a loop does not have."""
    rates = tuple(
        MatmulRates(t, (1e6, 1e9, 1e10), (1e9, best, best))
        for t, best in (("float32", 1e11), ("float64", 1e12))
    )
    prices = ComputePrices(replace(round_profile, device=replace(round_profile.device, matmul=rates)))
    assert prices.arithmetic_seconds(None, 1e6, "float32") == pytest.approx(1e-5)
    assert prices.arithmetic_seconds("matmul", 1e6, "float32") == pytest.approx(1e-3)
    assert prices.arithmetic_seconds(None, 1e6, "bfloat16") == pytest.approx(1e-5)  # in float32
    assert prices.arithmetic_seconds(None, 1e6, "float64") == pytest.approx(1e-6)


def test_narrow_convolutions_have_rates_of_their_own_or_those_of_others(round_profile: Profile) -> None:
    wide = (MatmulRates("float32", (1e6, 1e8), (1e11, 1e11)),)
    narrow = (MatmulRates("float32", (1e6, 1e8), (2e10, 2e10)),)
    device = replace(round_profile.device, convolution=wide)
    for rates, seconds in ((narrow, 5e-4), ((), 1e-4)):
        measured = replace(round_profile, device=replace(device, narrow_convolution=rates))
        prices = ComputePrices(measured)
        assert prices.arithmetic_seconds("narrow_convolution", 1e7, "float32") == pytest.approx(seconds)
        assert prices.arithmetic_seconds("convolution", 1e7, "float32") == pytest.approx(1e-4)


def test_on_cpus_a_product_waits_for_more_operands_than_it_was_measured_with(round_profile: Profile) -> None:
    """2e6 operations at 1e9 a second: 2 ms, of which 4 MB are 0.16 ms in 40,000 elements of float32; 4 MB take 4 ms.

    e = 100: the measured product loads and stores 4 e^2 elements, 160 KB, at 1 GB/s.
    """
    rates = (MatmulRates("float32", (2e6, 16e6), (1e9, 1e9)),)
    device = replace(round_profile.device, matmul=rates, memory_bytes_per_second=1e9, launch_seconds=1e-6)
    gpu = ComputePrices(replace(round_profile, device=device, device_type="cuda"))
    cpu = ComputePrices(replace(round_profile, device=device))
    assert gpu.kernel_seconds(2e6, 4e6, "float32") == pytest.approx(4e-3)
    assert cpu.kernel_seconds(2e6, 4e6, "float32") == pytest.approx(2e-3 - 0.16e-3 + 4e-3)
    assert cpu.kernel_seconds(2e6, 160e3, "float32") == pytest.approx(2e-3)
    assert cpu.kernel_seconds(2e6, 0, "float32") == pytest.approx(2e-3)
    assert cpu.kernel_seconds(0, 4e6, "float32") == pytest.approx(4e-3)
    assert cpu.kernel_seconds(2e6, 4e6, "float32", "attention") == pytest.approx(4e-3)


def test_update_measured_or_by_passes(round_profile: Profile) -> None:
    """1 TB/s of memory; 20 passes over 1 MB take 20 us."""
    assert ComputePrices(round_profile).update_seconds(1e6, 20) == pytest.approx(20e-6)
    measured = replace(round_profile.device, update=UpdateRates(1e-3, 1e9))
    prices = ComputePrices(replace(round_profile, device=measured))
    assert prices.update_seconds(1e6, 20) == pytest.approx(2e-3)


def test_nominal_products_on_gpus_wait_for_half_of_their_stores(round_profile: Profile) -> None:
    """1e8 operations at 20 TFLOP/s take 5 us; 10 MB of results at 1 TB/s 10 us, of which 5 are waited for."""
    nominal = ComputePrices(replace(round_profile, device_type="cuda", nominal=True))
    assert nominal.kernel_seconds(1e8, 10e6, "bfloat16", "matmul", 10e6) == pytest.approx(10e-6)
    assert nominal.kernel_seconds(1e8, 2e6, "bfloat16", "matmul", 2e6) == pytest.approx(6e-6)
    measured = ComputePrices(replace(round_profile, device_type="cuda"))
    assert measured.kernel_seconds(1e8, 2e6, "bfloat16", "matmul", 2e6) == pytest.approx(5e-6)
    assert nominal.kernel_seconds(1e8, 2e6, "bfloat16", "attention", 2e6) == pytest.approx(5e-6)


def test_products_of_8_bits() -> None:
    """By the profile's own rates, or as many times as fast as those of a wider dtype; loops by none of them."""
    h100, a100, cpu = (ComputePrices(Profile.named(name)) for name in ("h100", "a100", "cpu"))
    assert h100.matmul_seconds(1.1e12, "float8") == pytest.approx(1.1e12 / 1226e12)
    for flops in (1e9, 1e12):
        wide = a100.matmul_seconds(flops, "bfloat16")
        assert a100.matmul_seconds(flops, "float8") == a100.matmul_seconds(flops, "int8") == wide / 2
        assert cpu.matmul_seconds(flops, "float8") == pytest.approx(
            cpu.matmul_seconds(flops, "float32") / 0.7
        )
    assert h100.arithmetic_seconds(None, 1e9, "float8") == h100.arithmetic_seconds(None, 1e9, "float32")


@pytest.mark.parametrize(("inner", "columns", "measured"), [(5120, 8192, 1.31e-3), (8192, 5120, 1.26e-3)])
def test_products_of_experts_are_each_as_fast_as_one_of_its_size(
    inner: int, columns: int, measured: float
) -> None:
    """8,192 rows of 16 experts in bfloat16, as an H100 took them. [pytorch/ao pull request 2490]"""
    prices = ComputePrices(Profile.named("h100"))
    flops, stored = 2.0 * 8192 * inner * columns, 2.0 * 8192 * columns
    loaded = 2.0 * (8192 + 16 * columns) * inner
    seconds = prices.kernel_seconds(flops, loaded + stored, "bfloat16", "matmul", stored, 16)
    assert seconds == pytest.approx(measured, rel=0.07)
    assert seconds > 1.1 * prices.kernel_seconds(flops, loaded + stored, "bfloat16", "matmul", stored)
