"""Processes with a GPU each: `GpuPool`, which is `tests.ranks.RankPool` over NCCL, and one GPU in this process."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from passes.ir.torch_compat import default_store
from tests.ranks import RankPool

__all__ = ["Axes", "GpuPool", "axes_of", "gpu_mesh", "one_gpu"]

Axes = tuple[tuple[str, int], ...]
"""Names and sizes of a mesh, as a rank gets them."""


class GpuPool:
    """Rank i of a run has GPU i. The pool's processes and their logs are `RankPool`'s."""

    def __init__(self, grace_seconds: float = 10.0) -> None:
        self._pool = RankPool(timeout_seconds=600.0, grace_seconds=grace_seconds, start_method="spawn")

    def run(
        self, fn: Callable[..., Any], *args: Any, world: int, nccl_seconds: float = 300.0, **kwargs: Any
    ) -> list[Any]:
        """[fn(rank, *args, **kwargs) for every rank]. nccl_seconds: after which NCCL gives up on a collective.

        Raises RankFailure as `RankPool.run` does.
        """
        return self._pool.run(_on_gpu, nccl_seconds, fn, args, kwargs, world=world)

    def __enter__(self) -> GpuPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()


def _on_gpu(
    rank: int, nccl_seconds: float, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The worker made a gloo group; NCCL takes its place, and its store. The worker destroys what it finds."""
    world, store, device = dist.get_world_size(), default_store(), torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.destroy_process_group()
    dist.init_process_group(
        "nccl",
        store=dist.PrefixStore("nccl", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=nccl_seconds),
        device_id=device,
    )
    result = fn(rank, *args, **kwargs)
    torch.cuda.synchronize()
    return result


@contextlib.contextmanager
def one_gpu() -> Generator[DeviceMesh]:
    """A process group of this process alone over NCCL, and its mesh of one GPU, axis "a"."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        try:
            yield gpu_mesh((("a", 1),))
        finally:
            dist.destroy_process_group()
            torch.compiler.reset()


def gpu_mesh(axes: Axes) -> DeviceMesh:
    return init_device_mesh("cuda", tuple(n for _, n in axes), mesh_dim_names=tuple(a for a, _ in axes))


def axes_of(dims: int) -> Axes:
    """All GPUs of this machine (a power of two of them) in 1, 2 or 3 axes: (n), (2, n/2), (2, 2, n/4)."""
    count = 2 ** int(math.log2(torch.cuda.device_count()))
    front = (("a", 2), ("b", 2))[: dims - 1]
    return (*front, ("abc"[dims - 1], count >> (dims - 1)))
