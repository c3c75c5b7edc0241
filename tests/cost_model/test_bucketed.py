"""Shares of a bucket, by hand: 90 us to start and 1 ns a byte."""

from __future__ import annotations

import pytest

from cost_model.bucketed import BucketedPrices


def line(kind: str, axes: tuple[str, ...], nbytes: float) -> float:
    return 90e-6 + 1e-9 * nbytes


def test_a_bucket_is_full_where_starting_takes_a_tenth() -> None:
    """90 us are a tenth of 900 us, so 810 kB of travelling; the next power of two is 2^20."""
    assert BucketedPrices(line).limit("all_reduce", ("x",)) == 2**20


def test_small_ones_share_the_start() -> None:
    prices = BucketedPrices(line)
    full = 90e-6 + 1e-9 * 2**20
    assert prices.seconds("all_gather", ("x",), 2**10) == pytest.approx(full / 1024)
    assert prices.seconds("reduce_scatter", ("x",), 2**19) == pytest.approx(full / 2)


def test_large_ones_and_what_is_not_merged_pay_alone() -> None:
    prices = BucketedPrices(line)
    assert prices.seconds("all_reduce", ("x",), 2**22) == line("", (), 2**22)
    assert prices.seconds("all_to_all", ("x",), 2**10) == line("", (), 2**10)


def test_never_falls_with_bytes() -> None:
    prices = BucketedPrices(line)
    seconds = [prices.seconds("all_reduce", ("x",), n) for n in range(2**20 - 4096, 2**20 + 4096, 512)]
    assert seconds == sorted(seconds)


def test_bandwidth_alone_needs_no_bucket() -> None:
    prices = BucketedPrices(lambda kind, axes, nbytes: 1e-9 * nbytes)
    assert prices.seconds("all_reduce", ("x",), 1000) == pytest.approx(1e-6)
