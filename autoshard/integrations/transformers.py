"""`AutoshardTrainer`: the Trainer of transformers for a model on a mesh."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.utils.data import DataLoader

from autoshard.api import autoshard, random_state
from autoshard.integrations import mesh_of_all
from cost_model.errors import ShardingError

try:
    from accelerate.data_loader import prepare_data_loader
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise ImportError(
        f"AutoshardTrainer needs transformers and accelerate: {error}\n  try: pip install 'autoshard[trainer]'"
    ) from error

_RANDOM = "autoshard_random.pt"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class AutoshardTrainer(Trainer):
    """The Trainer of transformers, with its model made parallel on a mesh of all processes.

        trainer = AutoshardTrainer(model, arguments, train_dataset=data, mesh={"dp": 4, "tp": 2})

    mesh:    a DeviceMesh, or its sizes by name; None: one axis of all processes.
    options: of `autoshard`, such as {"memory_limit": "70GB"}. With {"batch": "per_rank"} each rank reads its own
             samples alone, which does not evaluate or predict.

    TrainingArguments keep their meaning: a batch has per_device_train_batch_size samples for each process. Checkpoints
    are those of one process, and continue on any number of them. Without torchrun it is the Trainer.

    Raises ShardingError for arguments that a parallel model cannot keep.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *more: Any,
        mesh: DeviceMesh | Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        options = dict(options or {})
        device = args.device  # makes the process group
        self._parallel = dist.is_initialized()
        self._per_rank = self._parallel and options.get("batch") == "per_rank"
        if self._parallel or mesh is not None:
            _check_model(model)
            _check_arguments(args, options, kwargs)
            model = autoshard(model, mesh_of_all(mesh, device.type), **options)
        if self._parallel and not self._per_rank:
            args.average_tokens_across_devices = False  # every rank counts the whole batch
        super().__init__(model, args, *more, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not self._parallel:
            return
        accelerator = self.accelerator
        # It would wrap the model in DDP; in evaluation mode it adds autocast alone.
        accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
        if not self._per_rank:
            accelerator.prepare_data_loader = self._same_on_every_rank
            accelerator.gather = lambda tensor: tensor  # every rank has all rows

    def _same_on_every_rank(self, data_loader: DataLoader[Any], *_: Any, **__: Any) -> DataLoader[Any]:
        seeded = data_loader.worker_init_fn
        if isinstance(seeded, functools.partial) and "rank" in seeded.keywords:
            data_loader.worker_init_fn = functools.partial(seeded, rank=0)
        accelerator = self.accelerator
        return prepare_data_loader(
            data_loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=accelerator.device_placement,
            dispatch_batches=False,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
        )

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        if self._per_rank and not kwargs.get("is_training"):
            raise _refused("batch='per_rank'", "evaluation, which needs all rows", "batch='global'")
        if self._parallel and not self._per_rank:
            kwargs["batch_size"] *= dist.get_world_size()
        return super()._get_dataloader(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if self._per_rank and num_items_in_batch is not None:
            # The model's loss is of all ranks' rows; the Trainer takes it for one rank's, and multiplies it.
            num_items_in_batch = num_items_in_batch * dist.get_world_size()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        if self._parallel and loss is not None:
            loss = loss.repeat(dist.get_world_size())  # it counts once for each row, of all ranks' rows
        return loss, logits, labels

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._parallel and not self.args.should_save:
            self._gathered(output_dir)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._parallel and self.args.should_save and not hasattr(self.model, "save_pretrained"):
            state_dict = self._gathered(output_dir)
        super()._save(output_dir, state_dict)

    def _gathered(self, output_dir: str | None) -> dict[str, Any] | None:
        """What rank 0 saves; the other ranks take part. `save_pretrained` of a parallel model gathers, on all ranks."""
        model: Any = self.model
        if hasattr(model, "save_pretrained"):
            return model.save_pretrained(output_dir or self.args.output_dir)
        return get_model_state_dict(model, options=_WHOLE)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer
        if self._parallel:
            self.optimizer = _Whole(self.model, getattr(optimizer, "optimizer", optimizer))
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        model: Any = self.model
        if self._parallel and self.args.should_save:
            torch.save(random_state(model).state_dict(), os.path.join(output_dir, _RANDOM))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        model: Any = self.model
        if self._parallel and checkpoint and os.path.exists(path := os.path.join(checkpoint, _RANDOM)):
            random_state(model).load_state_dict(torch.load(path, weights_only=True))


class _Whole:
    """An optimizer whose state dict is gathered on rank 0, in the form of one process."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        whole = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
        self._state = whole and FullyShardedDataParallel.rekey_optim_state_dict(
            whole, OptimStateKeyType.PARAM_ID, model, optim=optimizer
        )

    def state_dict(self) -> dict[str, Any]:
        return self._state


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise _refused("model_init", "a model that is not there yet", "model=model_init()")


def _check_arguments(args: TrainingArguments, options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what would wrap the model again, give ranks what the model does not take, or change values."""
    per_rank = options.get("batch") == "per_rank"
    if args.fsdp or args.deepspeed:
        raise _refused("fsdp or deepspeed", "autoshard, which is the parallelism", "neither of the two")
    if "in_placements" in options:
        raise _refused("in_placements", "the Trainer's loaders", "options={'batch': 'per_rank'}")
    if args.eval_use_gather_object:
        raise _refused("eval_use_gather_object=True", "evaluation of the same rows on every rank", "False")
    if not per_rank and getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise _refused("train_sampling_strategy='batch_rebalance'", "batch='global'", "batch='per_rank'")
    if not per_rank:
        return
    if args.eval_strategy != "no":
        raise _refused("batch='per_rank'", "evaluation, which needs all rows", "batch='global'")
    if kwargs.get("compute_loss_func") or args.label_smoothing_factor:
        said = "a loss outside the model, where outputs are of all rows and labels are not"
        raise _refused("batch='per_rank'", said, "batch='global'")
    if not args.average_tokens_across_devices:
        raise _refused(
            "batch='per_rank'",
            "items of one rank alone",
            "TrainingArguments(average_tokens_across_devices=True)",
        )


def _refused(given: str, other: str, remedy: str) -> ShardingError:
    return ShardingError(f"{given} does not go with {other}\n  try: {remedy}")
