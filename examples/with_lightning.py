"""Lightning around a model that autoshard makes parallel.

torchrun --nproc-per-node 2 examples/with_lightning.py
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from autoshard import autoshard
from autoshard.demo import GPT, GPTConfig, batches

BACKEND = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
"""gloo, also beside GPUs: Lightning broadcasts Python objects."""


class Language(lightning.LightningModule):
    """options: of `autoshard`; None: one process."""

    def __init__(self, config: GPTConfig, options: dict[str, Any] | None) -> None:
        super().__init__()
        self.config = config
        self.model = GPT(config)
        self.options = options
        self.losses: list[float] = []

    def configure_model(self) -> None:
        # Lightning may call this again; the mesh is its own. An example: its optimizer is to get DTensors.
        if self.options is not None and not hasattr(self.model, "autoshard_plan"):
            example = batches(self.config, batch=8, steps=1)[0]
            autoshard(self.model, self.device_mesh, example, **self.options)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(steps: int, config: GPTConfig | None = None, options: dict[str, Any] | None = None) -> list[float]:
    """Losses of `steps`."""
    config = config or GPTConfig()
    torch.manual_seed(0)
    module = Language(config, options)
    world = int(os.environ.get("WORLD_SIZE", "1")) if options is not None else 1
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=world,
        strategy="auto" if options is None else ModelParallelStrategy(process_group_backend=BACKEND),
        max_steps=steps,
        use_distributed_sampler=False,  # every rank passes the same batch
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches(config, batch=8, steps=steps), batch_size=None))
    return module.losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend", default="inductor")
    arguments = parser.parse_args()
    losses = train(arguments.steps, options={"backend": arguments.backend})
    if int(os.environ.get("RANK", "0")) == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
