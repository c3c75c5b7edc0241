"""Where plans run for a few real steps, on copies of a model, and the clock of this rank."""

from __future__ import annotations

import logging
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.devices import local_device
from autoshard.runtime.process_groups import whole_group
from autoshard.runtime.race_entry import RaceEntry
from autoshard.watching.agreement import collectively, everyones, in_company
from cost_model.errors import RankError

__all__ = ["WARM_STEPS", "Track", "steps_within"]

WARM_STEPS = 2
_MOST_STEPS, _SECONDS = 25, 1.5
"""Of a plan that are timed, and how long they may take: short steps run more often."""

_log = logging.getLogger("autoshard")


def steps_within(seconds: float, least: int) -> int:
    """How many steps of so many seconds are timed, `least` at least."""
    return max(least, min(_MOST_STEPS, int(_SECONDS / max(seconds, 1e-9))))


class Track:
    """All ranks come to each method together. occasion: what the plans run for, in what is said of a failure."""

    def __init__(self, mesh: DeviceMesh, occasion: str) -> None:
        self._mesh, self._occasion, self.device_type = mesh, occasion, mesh.device_type
        self._token = torch.zeros(1, device=local_device(mesh))
        self._group = whole_group(mesh) if mesh.size() > 1 else None

    def room(self, memory_limit: int | None) -> int:
        """Bytes there are for plans on the fullest rank."""
        free = _free_bytes(self._mesh)
        mine = free if memory_limit is None else min(free, memory_limit)
        return min(everyones(self._mesh, mine, what=f"memory for {self._occasion}"))

    def copied(self, name: str, entry: RaceEntry) -> bool:
        """Whether there is memory for its copies, on all ranks."""
        try:
            collectively(self._mesh, entry.copies, what=f"copies for {self._occasion} of {name}")
        except RankError:
            raise
        except Exception as error:  # on all ranks
            _log.warning("%s without %s, for lack of its copies: %s", self._occasion, name, error)
            entry.free()
            return False
        return True

    def warm(self, name: str, entry: RaceEntry) -> float:
        """Seconds of the last of the first steps, on the slowest rank."""
        with self._in_company(name):
            entry.begin()
        mine = [self.step(name, entry) for _ in range(WARM_STEPS)][-1]
        return max(everyones(self._mesh, mine, what=f"a step of {self._occasion}"))

    def step(self, name: str, entry: RaceEntry) -> float:
        """Seconds from when all ranks are there."""
        with self._in_company(name):
            self._meet()
            begin = time.perf_counter()
            entry.step()
            self._synchronize()
            return time.perf_counter() - begin

    def _in_company(self, name: str) -> AbstractContextManager[None]:
        return in_company(self._mesh, f"{self._occasion} of {name}")

    def _meet(self) -> None:
        if self._group is not None:
            dist.all_reduce(self._token, group=self._group)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._mesh.device_type != "cpu":
            torch.get_device_module(self._mesh.device_type).synchronize()


def _free_bytes(mesh: DeviceMesh) -> int:
    """Of this rank's device; of the host's memory its share, as far as that is known."""
    if mesh.device_type == "cuda":
        return torch.cuda.mem_get_info(local_device(mesh))[0]
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size()))
    try:
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(known["MemAvailable"].split()[0]) * 1024 // max(1, ranks)
    except (OSError, ValueError, KeyError):
        return 0
