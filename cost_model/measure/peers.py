"""The ranks of a mesh agree on what they measure: all go on, or all raise."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cost_model.errors import ProfileError

__all__ = ["Peers", "world_peers"]

T = TypeVar("T")


class Peers:
    """This rank among `size`. Without a group it is alone, and every exchange is with itself.

    Exchanges go over gloo on the CPU, whatever the mesh computes on: an error on one rank, say out of
    device memory, still reaches the others.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def everyones(self, value: T) -> list[T]:
        """Every rank's `value`, by rank. It must pickle."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def numbers(self, *mine: float) -> list[tuple[float, ...]]:
        """Every rank's numbers, by rank: `everyones` at half its price."""
        if self._group is None:
            return [mine]
        found = [torch.empty(len(mine), dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor(mine, dtype=torch.float64), group=self._group)
        return [tuple(numbers.tolist()) for numbers in found]

    def first(self, value: T) -> T:
        """Rank 0's `value`."""
        if self._group is None:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group_src=0, group=self._group)
        return box[0]

    def barrier(self) -> None:
        """Returns when every rank is here."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def collectively(self, what: str, fn: Callable[[], T]) -> T:
        """fn() on every rank; where it raises on any, this raises ProfileError on all.

        `fn` must not wait for other ranks: one that raised would leave them waiting.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = fn()
        except Exception as raised:
            error = raised
        said = self.everyones(None if error is None else f"{type(error).__name__}: {error}")
        failed = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if failed:
            rank, text = failed[0]
            raise ProfileError(
                f"measuring {what} failed on rank {rank}: {text}\n"
                "  try: look at that rank; with too little memory, measure with a smaller largest size"
            ) from error
        return result


@contextmanager
def world_peers(device_type: str, timeout: timedelta = timedelta(minutes=5)) -> Generator[Peers]:
    """All ranks of the world, which enter together. device_type: of the world's collectives.

    The world's own group serves where it computes on CPUs.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield Peers(None)
    elif device_type == "cpu":
        yield Peers(dist.group.WORLD)
    else:
        # A counter of the world names the group: a group of a subset of ranks that is made again would
        # find the addresses of the one before in the store.
        group = dist.new_group(timeout=timeout, backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        try:
            yield Peers(group)
        finally:
            dist.destroy_process_group(group)
