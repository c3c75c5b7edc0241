"""Classes in place of other libraries' own, which do what a parallel model needs. Each module imports its library.

Their checkpoints are as one process has them: values gathered on rank 0, and what random ops draw next.
"""

from __future__ import annotations

import os
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from autoshard.api import random_state
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec


def refused(given: str, other: str, remedy: str) -> ShardingError:
    """That an argument does not go with something else."""
    return ShardingError(f"{given} does not go with {other}\n  try: {remedy}")


def mesh_of_all(mesh: DeviceMesh | Mapping[str, int] | None, device_type: str) -> DeviceMesh:
    """A mesh of all processes; None: of one axis. Its sizes may be given by name.

    Raises ShardingError for more or fewer devices than processes."""
    if not dist.is_initialized():
        raise ShardingError(
            "mesh is given, and torchrun did not start this process\n  try: torchrun --nproc-per-node N script.py, "
            "or mesh=None for one process"
        )
    ranks = dist.get_world_size()
    if isinstance(mesh, DeviceMesh):
        spec = MeshSpec.of(mesh)
    else:
        spec = MeshSpec({"ranks": ranks} if mesh is None else mesh, device_type)
    if spec.device_count != ranks:
        raise ShardingError(
            f"mesh {spec} has {spec.device_count} devices, and {ranks} processes run\n"
            f"  try: torchrun --nproc-per-node {spec.device_count}, or sizes of {ranks} in all"
        )
    return (
        mesh
        if isinstance(mesh, DeviceMesh)
        else init_device_mesh(device_type, spec.sizes, mesh_dim_names=spec.names)
    )


_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_RANDOM = "autoshard_random.pt"


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The model's state dict, whole on rank 0; names of one parameter have one tensor. Every rank calls it."""
    # By its type accelerate knows the state of a model.
    whole = OrderedDict(get_model_state_dict(model, options=_WHOLE))
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in whole:
            whole[name] = whole[first.setdefault(id(parameter), name)]
    return whole


class WholeOptimizer:
    """An optimizer whose state dict is whole on rank 0, in the form of one process. Every rank makes it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not optimizer.state:  # torch would make one by a step, which optimizers count
            self._state = optimizer.state_dict()
            return
        whole = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
        self._state = whole and FullyShardedDataParallel.rekey_optim_state_dict(
            whole, OptimStateKeyType.PARAM_ID, model, optim=optimizer
        )

    def state_dict(self) -> dict[str, Any]:
        return self._state


class WholeModel:
    """A model for what loads into it, and asks first in which memory its values lie: names of one are in one place."""

    def __init__(self, model: nn.Module) -> None:
        self.load_state_dict, self._state_dict = model.load_state_dict, model.state_dict

    def state_dict(self) -> dict[str, Any]:
        places: dict[int, Tensor] = {}
        values = self._state_dict(keep_vars=True).items()
        return {name: places.setdefault(id(value), torch.zeros(1)) for name, value in values}


def random_states(models: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """What dropout of each parallel model draws next."""
    return [random_state(model).state_dict() for model in models]


def load_random_states(models: Iterable[nn.Module], states: Iterable[dict[str, Any]]) -> None:
    for model, state in zip(models, states, strict=False):
        random_state(model).load_state_dict(state)


def save_random(models: Iterable[nn.Module], folder: str | os.PathLike[str]) -> None:
    torch.save(random_states(models), Path(folder) / _RANDOM)


def load_random(models: Iterable[nn.Module], folder: str | os.PathLike[str]) -> None:
    """Nothing where one process without `autoshard` wrote the folder."""
    if (path := Path(folder) / _RANDOM).exists():
        load_random_states(models, torch.load(path, weights_only=True))


def draw_as_rank_0() -> None:
    """From now on torch, numpy and `random` draw, on every rank's CPU, what they draw on rank 0: loaders shuffle by
    it."""
    states: list[Any] = [torch.get_rng_state(), np.random.get_state(), random.getstate()]
    dist.broadcast_object_list(states)
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
