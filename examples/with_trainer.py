"""The Trainer of transformers, with its model made parallel by autoshard.

torchrun --nproc-per-node 2 examples/with_trainer.py --folder /tmp/trainer
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from autoshard.demo import GPTConfig, batches
from autoshard.integrations.transformers import AutoshardTrainer


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


def make_trainer(steps: int, folder: str, options: dict[str, Any], **more: Any) -> AutoshardTrainer:
    """options: of `autoshard`; more: of TrainingArguments. Without torchrun: of one process."""
    samples = batches(GPTConfig(context=16), batch=8, steps=steps)
    data = [{"input_ids": row, "labels": row} for tokens, _ in samples for row in tokens]
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        **more,
    )
    return AutoshardTrainer(small_llama(), arguments, train_dataset=data, options=options)


def losses(trainer: AutoshardTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", default="trainer-output")
    parser.add_argument("--backend", default="inductor")
    arguments = parser.parse_args()
    trainer = make_trainer(arguments.steps, arguments.folder, {"backend": arguments.backend})
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print("losses", *losses(trainer))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
