"""accelerate, with its Accelerator replaced by the one that makes a model parallel.

torchrun --nproc-per-node 2 examples/with_accelerate.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from autoshard.demo import GPT, GPTConfig, batches
from autoshard.integrations.accelerate import AutoshardAccelerator


def train(accelerator: Accelerator, steps: int, config: GPTConfig | None = None) -> list[float]:
    """Losses of `steps`."""
    config = config or GPTConfig()
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = map(torch.cat, zip(*batches(config, batch=8, steps=steps), strict=True))
    loader = DataLoader(TensorDataset(tokens, targets), batch_size=8, shuffle=True)  # the whole batch
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for tokens, targets in loader:
        with accelerator.accumulate(model):
            loss = model(tokens, targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend", default="inductor")
    arguments = parser.parse_args()
    accelerator = AutoshardAccelerator(
        cpu=not torch.cuda.is_available(), options={"backend": arguments.backend}
    )
    accelerator.print("losses", *(f"{loss:.4f}" for loss in train(accelerator, arguments.steps)))
    accelerator.end_training()


if __name__ == "__main__":
    main()
