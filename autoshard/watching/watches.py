"""Which watch belongs to a mesh: one for all meshes over the same ranks of one process group."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.watching.watch import Watch
from passes.ir.torch_compat import default_store

__all__ = ["watch_of"]

# Turns are counted over all models and meshes of a process: the process group is the one thing that they share. A watch
# goes when its group does.
_WATCHES: weakref.WeakKeyDictionary[Any, dict[int, Watch]] = weakref.WeakKeyDictionary()


def watch_of(mesh: DeviceMesh) -> Watch | None:
    """The watch over the ranks of `mesh`, which starts when it is first asked for; None for a mesh of one rank."""
    if mesh.size() == 1:
        return None
    group = dist.group.WORLD
    watches = _WATCHES.setdefault(group, {})
    if mesh.size() not in watches:
        watch = Watch(default_store(), mesh.get_rank(), mesh.size(), group, mesh.device_type)
        watches[mesh.size()] = watch
        watch.start()
    return watches[mesh.size()]
