"""`AutoshardAccelerator`: the Accelerator of accelerate, which makes what it prepares parallel on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from autoshard.api import autoshard
from autoshard.integrations import (
    WholeModel,
    WholeOptimizer,
    draw_as_rank_0,
    load_random,
    mesh_of_all,
    refused,
    save_random,
    whole_state,
)
from autoshard.runtime.session import Session

try:
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import DistributedType, find_batch_size, recursively_apply
except ImportError as error:
    raise ImportError(
        f"AutoshardAccelerator needs accelerate: {error}\n  try: pip install 'autoshard[trainer]'"
    ) from error


class AutoshardAccelerator(Accelerator):
    """The Accelerator of accelerate, whose `prepare` makes models parallel on a mesh of all processes.

        accelerator = AutoshardAccelerator(mesh={"dp": 4, "tp": 2})
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    mesh:    a DeviceMesh, or its sizes by name; None: one axis of all processes.
    options: of `autoshard`, such as {"memory_limit": "70GB"}. With {"batch": "per_rank"} loaders give each rank samples
             of its own, as accelerate's do.

    A loader's batch is the whole batch: every rank reads the same, in one process's order, and `gather` and `reduce`
    return what they get. `save_state` writes what one process writes, and `load_state` goes on on any number of
    processes. All else is the Accelerator's; with one process, everything.

    Raises ShardingError for a mesh of another number of devices, and for arguments that a parallel model cannot keep.
    """

    def __init__(
        self,
        *args: Any,
        mesh: DeviceMesh | Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._options = dict(options or {})
        if "in_placements" in self._options:
            raise refused("in_placements", "accelerate's loaders", "options={'batch': 'per_rank'}")
        if self.distributed_type in (
            DistributedType.FSDP,
            DistributedType.DEEPSPEED,
            DistributedType.MEGATRON_LM,
        ):
            raise refused(
                f"accelerate's {self.distributed_type.value}",
                "autoshard, which is the parallelism",
                "accelerate launch --multi_gpu, or torchrun",
            )
        if self.project_configuration.save_on_each_node:
            raise refused(
                "save_on_each_node=True", "values gathered on rank 0", "a folder that all nodes see"
            )
        self._parallel, self._same = dist.is_initialized(), False
        if self._parallel or mesh is not None:
            self._mesh = mesh_of_all(mesh, self.device.type)
            self._same = self._options.get("batch") != "per_rank"
            self.dataloader_config.split_batches |= self._same  # a scheduler steps once for a batch
        if self._parallel:
            self.register_save_state_pre_hook(self._save_random)
            self.register_load_state_pre_hook(load_random)

    @classmethod
    def take(cls, accelerator: Accelerator, per_rank: bool) -> None:
        """Make `accelerator` one of these. per_rank: loaders give each rank samples of its own.

        It prepares models that are parallel already."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, AutoshardAccelerator)
        accelerator._parallel, accelerator._same = True, not per_rank

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if self._parallel and Session.of(model) is None:
            model = autoshard(model.to(self.device), self._mesh, **self._options)
        # In evaluation mode accelerate adds its autocast, and no DDP.
        return super().prepare_model(model, device_placement, evaluation_mode or self._parallel)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        if not self._same or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        seeded = data_loader.worker_init_fn
        if isinstance(seeded, functools.partial) and "rank" in seeded.keywords:
            data_loader.worker_init_fn = functools.partial(seeded, rank=0)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement,
            rng_types=["torch"],  # at every epoch that of rank 0
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        _count_last_batch(prepared)
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        return tensor if self._same else super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As of the last batch of one process: a value repeated for each row of a batch is cut to those that it has."""
        if not self._same:
            return super().gather_for_metrics(input_data, use_gather_object)
        rest = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        return recursively_apply(lambda x: x[:rest] if x.ndim else x, input_data) if rest > 0 else input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor if self._same else super().reduce(tensor, reduction, scale)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole on rank 0, empty on others. Every rank calls it."""
        return whole_state(model) if self._parallel else super().get_state_dict(model, unwrap)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        if not self._parallel:
            return super().save_state(*args, **kwargs)
        optimizers: list[Any] = self._optimizers
        self._optimizers = [WholeOptimizer(self._model_of(one), one.optimizer) for one in optimizers]
        try:
            return super().save_state(*args, **kwargs)
        finally:
            self._optimizers = optimizers

    def _save_random(self, models: list[nn.Module], _: object, folder: str) -> None:
        if self.is_main_process:
            save_random(models, folder)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        if not self._parallel:
            return super().load_state(*args, **kwargs)
        last = self.register_load_state_pre_hook(_take_whole)
        try:
            super().load_state(*args, **kwargs)
        finally:
            last.remove()
        draw_as_rank_0()  # more processes may go on than have saved

    def _model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return next(one for one in self._models if any(id(p) in own for p in one.parameters()))


def _take_whole(models: list[Any], _: object) -> None:
    models[:] = map(WholeModel, models)


def _count_last_batch(prepared: Any) -> None:
    """Let the loader's remainder be the rows of its last batch, also where its data have no length."""
    plain: Any = type(prepared.base_dataloader)

    def batches(loader: Any) -> Iterator[Any]:
        rows = None
        for batch in plain.__iter__(loader):
            rows = find_batch_size(batch)
            yield batch
        prepared.remainder = rows or -1

    prepared.base_dataloader.__class__ = type(plain.__name__, (plain,), {"__iter__": batches})
