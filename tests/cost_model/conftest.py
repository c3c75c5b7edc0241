"""A profile with round numbers, for hand arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import settings

from cost_model.measurements import DeviceRates, LinkLevel, MatmulRates
from cost_model.profile import Profile

# A busy machine is no reason to fail: time is not what these tests check.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def round_profile() -> Profile:
    """Nodes of 4: inside 1 us a hop and 100 GB/s, between 10 us and 10 GB/s; 5 us to start a collective."""
    return Profile(
        name="round",
        nominal=False,
        device_type="cpu",
        hardware="none",
        software=(("torch", "2.13.0"),),
        date="2026-01-01",
        command="by hand",
        sources=(),
        collective_launch_seconds=5e-6,
        overlap_efficiency=0.5,
        links=(
            LinkLevel("inside", 4, 1e-6, 100e9, 200e9),
            LinkLevel("between", None, 10e-6, 10e9, 20e9),
        ),
        collectives=(),
        device=DeviceRates(
            launch_seconds=2e-6,
            memory_bytes_per_second=1e12,
            matmul=(
                MatmulRates("float32", (1e6, 1e8), (1e12, 10e12)),
                MatmulRates("bfloat16", (1e6, 1e8), (1e12, 20e12)),
            ),
        ),
    )
