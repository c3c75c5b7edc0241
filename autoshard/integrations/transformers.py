"""`AutoshardTrainer`: the Trainer of transformers for a model on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from autoshard.api import autoshard
from autoshard.integrations import WholeOptimizer, load_random, mesh_of_all, refused, save_random, whole_state

try:
    from transformers import Trainer, TrainingArguments

    from autoshard.integrations.accelerate import AutoshardAccelerator
except ImportError as error:
    raise ImportError(
        f"AutoshardTrainer needs transformers and accelerate: {error}\n  try: pip install 'autoshard[trainer]'"
    ) from error


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
        if self._parallel:
            AutoshardAccelerator.take(self.accelerator, self._per_rank)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        if self._per_rank and not kwargs.get("is_training"):
            raise refused("batch='per_rank'", "evaluation, which needs all rows", "batch='global'")
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

    @property
    def _module(self) -> Any:
        return self.model

    def _gathered(self, output_dir: str | None) -> dict[str, Any] | None:
        """What rank 0 saves; the other ranks take part. `save_pretrained` of a parallel model gathers, on all ranks."""
        model = self._module
        if hasattr(model, "save_pretrained"):
            return model.save_pretrained(output_dir or self.args.output_dir)
        return whole_state(model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        model, optimizer = self._module, self.optimizer
        if self._parallel:
            self.optimizer = WholeOptimizer(model, getattr(optimizer, "optimizer", optimizer))
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._parallel and self.args.should_save:
            save_random([self._module], output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self._parallel and checkpoint:
            load_random([self._module], checkpoint)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise refused("model_init", "a model that is not there yet", "model=model_init()")


def _check_arguments(args: TrainingArguments, options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what would wrap the model again, give ranks what the model does not take, or change values."""
    per_rank = options.get("batch") == "per_rank"
    if args.fsdp or args.deepspeed:
        raise refused("fsdp or deepspeed", "autoshard, which is the parallelism", "neither of the two")
    if "in_placements" in options:
        raise refused("in_placements", "the Trainer's loaders", "options={'batch': 'per_rank'}")
    if args.eval_use_gather_object:
        raise refused("eval_use_gather_object=True", "evaluation of the same rows on every rank", "False")
    if not per_rank and getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise refused("train_sampling_strategy='batch_rebalance'", "batch='global'", "batch='per_rank'")
    if not per_rank:
        return
    if args.eval_strategy != "no":
        raise refused("batch='per_rank'", "evaluation, which needs all rows", "batch='global'")
    if kwargs.get("compute_loss_func") or args.label_smoothing_factor:
        said = "a loss outside the model, where outputs are of all rows and labels are not"
        raise refused("batch='per_rank'", said, "batch='global'")
    if not args.average_tokens_across_devices:
        raise refused(
            "batch='per_rank'",
            "items of one rank alone",
            "TrainingArguments(average_tokens_across_devices=True)",
        )
