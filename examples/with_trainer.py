"""The Trainer of transformers around a model that autoshard makes parallel.

torchrun --nproc-per-node 2 examples/with_trainer.py --folder /tmp/trainer
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from autoshard import autoshard, data_loader
from autoshard.demo import GPTConfig, batches


class ParallelTrainer(Trainer):
    """A Trainer whose ranks all pass the same batch, and whose model nothing else wraps."""

    def __init__(self, *args: Any, mesh: DeviceMesh | None, **kwargs: Any) -> None:
        self.mesh = mesh
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model
        # Accelerate would wrap the model in DDP; in evaluation mode it adds autocast alone.
        self.accelerator.prepare_model = functools.partial(prepare, evaluation_mode=True)

    def get_train_dataloader(self) -> DataLoader[Any]:
        batch_size = self.args.per_device_train_batch_size
        if self.mesh is None:
            return DataLoader(self.train_dataset, batch_size)
        return data_loader(
            self.train_dataset, self.mesh, [Replicate()] * self.mesh.ndim, batch_size=batch_size
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.model.save_pretrained(output_dir or self.args.output_dir)  # on every rank; rank 0 writes


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def train(mesh: DeviceMesh | None, steps: int, folder: str, **options: Any) -> list[float]:
    """Losses of `steps`; mesh None: one process. options: of `autoshard`."""
    model = small_llama()
    if mesh is not None:
        model = autoshard(model, mesh, **options)
    samples = batches(GPTConfig(context=16), batch=8, steps=steps)
    data = [{"input_ids": row, "labels": row} for tokens, _ in samples for row in tokens]
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        # What the Trainer saves beside the model would be rank 0's part of the optimizer's state.
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = ParallelTrainer(model, arguments, mesh=mesh, train_dataset=data)
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", default="trainer-output")
    parser.add_argument("--backend", default="inductor")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    losses = train(mesh, arguments.steps, arguments.folder, backend=arguments.backend)
    if dist.get_rank() == 0:
        print("losses", *losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
