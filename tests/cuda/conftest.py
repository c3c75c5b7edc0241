"""Tests here need GPUs, and say how many: `@pytest.mark.cuda(gpus=4)`. `make gpu` runs them and writes a page.

A test writes figures for that page with `record_property`; no test asserts a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.cuda.gpus import GpuPool, one_gpu


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test for which this machine has too few GPUs, before any fixture looks for one."""
    marker = item.get_closest_marker("cuda")
    assert marker is not None, "a test in tests/cuda is marked: pytestmark = pytest.mark.cuda"
    wanted, here = marker.kwargs.get("gpus", 1), torch.cuda.device_count()
    if here < wanted:
        pytest.skip(f"needs {wanted} GPU{'s' if wanted > 1 else ''}; this machine has {here or 'none'}")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one GPU, axis "a", over NCCL, in this process."""
    with one_gpu() as made:
        yield made


@pytest.fixture(scope="session")
def gpus() -> Iterator[GpuPool]:
    """`gpus.run(fn, *args, world=n)`: fn(rank, *args) on n processes, a GPU each, over NCCL."""
    with GpuPool() as pool:
        yield pool
