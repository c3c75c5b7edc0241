"""Everybody in the race but those by hand (`by_hand`): autoshard with its own plan, with pinned plans, raced plans.

Each contestant trains its own copy of the same seeded model with the same AdamW on the same global batch; those
that split the batch get this rank's slice of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard import Plan, Profile, autoshard
from autoshard.reporting.tracks import held_nbytes
from benchmarks.models import family_constraints
from benchmarks.racing.workloads import Batch, Workload

__all__ = ["PINNED", "Build", "Meshes", "Race", "Runner", "alone", "planned", "process_group"]

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Meshes:
    """All ranks in one axis, and hosts x ranks of a host (2 x 2 on one host, and where a host has one rank)."""

    flat: DeviceMesh
    grid: DeviceMesh


@dataclass(frozen=True)
class Race:
    """What all contestants have in common. backend: "eager", or torch.compile's for all alike."""

    workload: Workload
    meshes: Meshes
    profile: Profile | str
    backend: str
    memory_limit: int | None
    seed: int = 0

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.workload.build()

    def batch(self) -> Batch:
        torch.manual_seed(self.seed + 1)
        return self.workload.batch()

    def compiled(self, model: nn.Module, **options: Any) -> Callable[..., Tensor]:
        """options: of the compiler."""
        if self.backend == "eager":
            return model
        return torch.compile(model, backend=self.backend, options=options or None)


class Runner:
    """One contestant, ready to train. plan: autoshard's; None for the others."""

    def __init__(
        self,
        call: Callable[..., Tensor],
        model: nn.Module,
        batch: Batch,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        plan: Plan | None = None,
    ) -> None:
        self._call = call
        self._batch = batch
        self._around = around
        self._model = model
        self._optimizer = torch.optim.AdamW(_groups(model), lr=LEARNING_RATE, fused=True)
        self.plan = plan

    def step(self) -> Tensor:
        """Forward, backward, update; this rank's loss."""
        with self._around():
            loss = self._call(*self._batch)
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def state_bytes(self) -> int:
        """Bytes of this rank's parameters, their gradients and the state of AdamW."""
        tensors = list(self._model.parameters())
        kept = [value for state in self._optimizer.state.values() for value in state.values()]
        return sum(_local_bytes(t) for t in (*tensors, *tensors, *kept) if isinstance(t, Tensor))

    def held_bytes(self) -> int:
        """Bytes that a step finds and leaves on this rank: parameters, buffers, the states of AdamW and the batch."""
        owned = (*self._model.parameters(), *self._model.buffers(), *self._batch)
        return held_nbytes(owned, self._model.parameters(), [self._optimizer])


Build = Callable[[Race], Runner]


def alone(race: Race) -> Runner:
    """No parallelism: the whole batch in this process."""
    model = race.model()
    return Runner(model, model, race.batch())


def planned(
    race: Race,
    constraints: dict[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    raced: int | None = None,
    time_limit: float = 60.0,
) -> Runner:
    """autoshard on `mesh` (None: the grid), free or with pinned parameters. raced: plans to race. time_limit: in
    seconds."""
    model, batch = race.model(), race.batch()
    autoshard(
        model,
        mesh or race.meshes.grid,
        batch,
        profile=race.profile,
        memory_limit=race.memory_limit,
        constraints=constraints,
        backend=race.backend,
        time_limit=time_limit,
        race=raced,
        tune="first",
    )
    return Runner(model, model, batch, plan=model.autoshard_plan)  # type: ignore[arg-type]


def _pins(family: str) -> Callable[[Workload], dict[str, Any]]:
    return lambda workload: family_constraints(family, 2, columns=workload.columns, rows=workload.rows)


PINNED = {f"pinned as {family}": _pins(family) for family in ("DDP", "FSDP", "TP")}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters of one kind and mesh together: the fused update does not take them mixed."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(
            parameter
        )
    return [{"params": parameters} for parameters in groups.values()]


def _local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """gloo over all ranks that torchrun started."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
