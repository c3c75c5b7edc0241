"""Fourier transforms, conjugates, and complex numbers beside real ones."""

from __future__ import annotations

import pytest
import torch

from tests.rules.registered import Draw, aten, check

COMPLEX = torch.complex128


@pytest.mark.parametrize(
    ("shape", "dims", "scale"),
    [((1, 3, 4), [2], 0), ((3, 2, 5), [1, 2], 1), ((2, 5, 4), [2, 0], 2), ((2, 3, 2), [0, 1, 2], 0)],
    ids=str,
)
def test_transforms(shape: tuple[int, ...], dims: list[int], scale: int) -> None:
    """There, back and of complex numbers; a dim of 2 or 3 leaves some of four ranks nothing."""
    draw = Draw(0)
    real, complex_ = draw.floats(*shape), draw.floats(*shape, dtype=COMPLEX)
    half = aten._fft_r2c.default(real, dims, scale, True)
    shared = {f"d{d}" for d in range(3) if d not in dims and shape[d] > 1}
    for rule in (
        check(aten._fft_r2c.default, real, dims, scale, draw.pick(True, False)),
        check(aten._fft_c2r.default, half, dims, scale, shape[dims[-1]]),
        check(aten._fft_c2c.default, complex_, dims, scale, draw.pick(True, False)),
    ):
        assert set(rule.splittable) == shared
        assert rule.linear == (frozenset({0}),)


def test_pairs_of_real_numbers() -> None:
    draw = Draw(0)
    z = draw.floats(3, 2, dtype=COMPLEX)
    linear = (frozenset({0}),)
    assert check(aten.conj_physical.default, z).linear == linear
    assert check(aten.view_as_real.default, z).linear == linear
    assert check(aten.view_as_complex.default, torch.view_as_real(z)).linear == linear
    assert check(aten.complex.default, z.real.clone(), z.imag.clone()).linear == (frozenset({0, 1}),)
