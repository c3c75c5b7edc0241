"""Lightning, with its strategy replaced by the one that makes a LightningModule parallel.

torchrun --nproc-per-node 2 examples/with_lightning.py
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from autoshard.demo import GPT, GPTConfig, batches
from autoshard.integrations.lightning import AutoshardStrategy


class Language(lightning.LightningModule):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = GPT(config)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(steps: int, config: GPTConfig | None = None, strategy: Any = "auto") -> list[float]:
    """Losses of `steps`."""
    config = config or GPTConfig()
    torch.manual_seed(0)
    module = Language(config)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy,
        max_steps=steps,
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
    losses = train(arguments.steps, strategy=AutoshardStrategy(options={"backend": arguments.backend}))
    if int(os.environ.get("RANK", "0")) == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
