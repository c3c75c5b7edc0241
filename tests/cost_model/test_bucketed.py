"""Shares of a bucket, by hand: 90 us to start and 1 ns a byte."""

from __future__ import annotations

import pytest

from cost_model.collectives import BucketedPrices, Seconds
from cost_model.compute import ComputePrices
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile

MESH = MeshSpec({"x": 4})


def bucketed(price: Seconds, round_profile: Profile) -> BucketedPrices:
    """Kernels of 2 us and 1 TB/s."""
    return BucketedPrices(price, MESH, ComputePrices(round_profile))


def line(kind: str, axes: tuple[str, ...], nbytes: float) -> float:
    return 90e-6 + 1e-9 * nbytes


def test_a_bucket_is_full_where_starting_takes_a_tenth(round_profile: Profile) -> None:
    """90 us are a tenth of 900 us, so 810 kB of travelling; the next power of two is 2^20."""
    assert bucketed(line, round_profile).limit("all_reduce", ("x",)) == 2**20


def test_small_ones_share_the_start(round_profile: Profile) -> None:
    prices = bucketed(line, round_profile)
    full = 90e-6 + 1e-9 * 2**20
    # Copied in, a quarter; and out, all of it, by a kernel of its own: read and written.
    copies = 2e-6 + 2 * 1.25 * 2**10 / 1e12
    assert prices.seconds("all_gather", ("x",), 2**10) == pytest.approx(full / 1024 + copies)
    assert prices.seconds("reduce_scatter", ("x",), 2**19) == pytest.approx(full / 2 + 2 * 2**19 / 1e12)


def test_large_ones_and_what_is_not_merged_pay_alone(round_profile: Profile) -> None:
    prices = bucketed(line, round_profile)
    assert prices.seconds("all_reduce", ("x",), 2**22) == line("", (), 2**22)
    assert prices.seconds("all_to_all", ("x",), 2**10) == line("", (), 2**10)


def test_never_falls_with_bytes(round_profile: Profile) -> None:
    prices = bucketed(line, round_profile)
    seconds = [prices.seconds("all_reduce", ("x",), n) for n in range(2**20 - 4096, 2**20 + 4096, 512)]
    assert seconds == sorted(seconds)


def test_bandwidth_alone_needs_no_bucket(round_profile: Profile) -> None:
    prices = bucketed(lambda kind, axes, nbytes: 1e-9 * nbytes, round_profile)
    assert prices.seconds("all_reduce", ("x",), 1000) == pytest.approx(1e-6)


def test_large_ones_that_cost_more_a_byte_hide_no_start(round_profile: Profile) -> None:
    """3 ms to start and 0.1 us a byte, more beyond 2^18 bytes: a tenth of 30 ms, so 270 kB; the next power is 2^19."""

    def slow(kind: str, axes: tuple[str, ...], nbytes: float) -> float:
        return 3e-3 + 1e-7 * nbytes + 2e-8 * max(0.0, nbytes - 2**18)

    assert bucketed(slow, round_profile).limit("all_reduce", ("x",)) == 2**19
