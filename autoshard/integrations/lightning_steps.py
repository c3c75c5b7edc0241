"""Steps of a LightningModule that is parallel, whichever package its Trainer is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from autoshard.api import autoshard
from autoshard.integrations import (
    WholeOptimizer,
    draw_as_rank_0,
    load_random_states,
    mesh_of_all,
    random_states,
    refused,
    whole_state,
)
from autoshard.runtime.session import Session
from cost_model.errors import ShardingError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy as _Strategy
else:
    _Strategy = object

_RANDOM = "autoshard_random"


class ParallelSteps(_Strategy):
    """What a strategy does beside its package's `ModelParallelStrategy`, of which each `AutoshardStrategy` is made.

    add_worker_init: the package's own: (loader, rank) -> the loader's workers draw as that rank's.
    """

    add_worker_init: Callable[[object, int], None]
    lightning_restore_optimizer = True  # type: ignore[assignment]

    def __init__(
        self,
        mesh: DeviceMesh | Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
        modules: Sequence[str] | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=False, process_group_backend=process_group_backend, timeout=timeout
        )
        self._mesh, self._options, self._names = mesh, dict(options or {}), modules
        self._parts: Sequence[nn.Module] = ()
        given = [name for name in ("in_placements", "batch") if self._options.get(name, "global") != "global"]
        if given:
            what = f"options={{{given[0]!r}: {self._options[given[0]]!r}}}"
            raise refused(what, "steps that compute with a rank's rows outside the model", "batch='global'")

    def _get_process_group_backend(self) -> str:
        # Lightning broadcasts Python objects, which gloo does beside computation.
        given, on_gpus = self._process_group_backend, self.root_device.type == "cuda"
        return given or ("cpu:gloo,cuda:nccl" if on_gpus else super()._get_process_group_backend())

    def setup_environment(self) -> None:
        self._setup_distributed()
        draw_as_rank_0()
        module = _of(self.lightning_module)
        if self._device_mesh is None:
            self._device_mesh = mesh_of_all(self._mesh, self.root_device.type)
        module._device_mesh = self._device_mesh
        module.trainer._accelerator_connector.use_distributed_sampler = False

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.model = self.precision_plugin.convert_module(_of(self.lightning_module))
        if any(parameter.is_meta for parameter in module.parameters()):
            raise refused("a model on meta", "AutoshardStrategy", "Trainer.init_module(empty_init=False)")
        self.model_to_device()
        self._parts = _parts(_of(self.lightning_module), self._names)
        for part in self._parts:
            if Session.of(part) is None:
                autoshard(part, self.device_mesh, **self._options)
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.distributed_available_fn = _never  # every rank counts all rows
        _of(self.lightning_module).untoggle_optimizer = partial(_untoggle, _of(self.lightning_module))
        self.barrier()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            trainer.num_sanity_val_steps = 0
        self.setup_precision_plugin()

    def process_dataloader(self, dataloader: object) -> object:
        self.add_worker_init(dataloader, 0)  # the random numbers of rank 0's workers
        return dataloader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if not any(_is_planned(part) for part in self._parts):
            module = _of(self.lightning_module)
            children = [name for name, child in module.named_children() if _is_trained(child)]
            raise ShardingError(
                f"{type(module).__name__}.training_step called nothing that is parallel: "
                f"{', '.join(type(part).__name__ for part in self._parts)}\n"
                f"  try: AutoshardStrategy(..., modules={children}), or what of it training_step calls"
            )
        return output

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """What it gets: it is of all rows, the same on every rank."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        count = super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return bool(count == self.world_size) if all else bool(count)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return whole_state(_of(self.lightning_module))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        own = getattr(optimizer, "_optimizer", optimizer)
        return WholeOptimizer(_of(self.lightning_module), own).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        states = {_RANDOM: random_states(self._parts)}
        super().save_checkpoint({**checkpoint, **states}, filepath, storage_options)

    # Of checkpoints of one process, every rank reads the file, and keeps its part.
    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._of_one_process().load_model_state_dict(*args, **kwargs)

    def load_optimizer_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._of_one_process().load_optimizer_state_dict(*args, **kwargs)

    def _of_one_process(self) -> Any:
        """As of a strategy whose checkpoints are not of parts."""
        return super(_named(type(self), "ModelParallelStrategy"), self)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = self._of_one_process().load_checkpoint(*args, **kwargs)
        load_random_states(self._parts, checkpoint.get(_RANDOM, []))
        return checkpoint


def _parts(module: LightningModule, names: Sequence[str] | None) -> Sequence[nn.Module]:
    """What is made parallel. ShardingError for what nothing calls, and for trained parameters of none of them."""
    if names is None and type(module).forward is not _named(type(module), "LightningModule").forward:
        return [module]
    children = dict(module.named_modules())
    if names is None:
        names = [name for name, child in module.named_children() if _is_trained(child)]
    for name in names:
        if name not in children:
            raise refused(
                f"modules={list(names)}", f"{type(module).__name__}, which has no {name!r}", "its names"
            )
        if type(children[name]).forward is nn.Module.forward:
            what = f"{name} ({type(children[name]).__name__}), which has no forward"
            raise refused("AutoshardStrategy", what, "a module of your own around it, or modules=[...]")
    parts = [children[name] for name in names]
    covered = {id(parameter) for part in parts for parameter in part.parameters()}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in covered:
            what = f"{name}, a trained parameter outside of {', '.join(names) or 'all modules'}"
            raise refused("AutoshardStrategy", what, "a module with a forward that has it, in modules=[...]")
    return parts


def _untoggle(module: LightningModule, optimizer: Any) -> None:
    """As Lightning's, also where a first call has replaced parameters since `toggle_optimizer`."""
    groups = [group for one in module.trainer.optimizers for group in one.param_groups]
    now = dict.fromkeys(parameter for group in groups for parameter in group["params"])
    before = module._param_requires_grad_state.values()
    module._param_requires_grad_state = dict(zip(now, before, strict=False))
    type(module).untoggle_optimizer(module, optimizer)


def _named(kind: type, name: str) -> Any:
    """The class of that name that it is derived from: that of its package."""
    return next(base for base in kind.__mro__ if base.__name__ == name)


def _of(module: LightningModule | None) -> LightningModule:
    assert module is not None
    return module


def _is_planned(module: nn.Module) -> bool:
    session = Session.of(module)
    return session is not None and session.plan is not None


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _never() -> bool:
    return False
