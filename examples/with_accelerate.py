"""Hugging Face accelerate around a model that autoshard makes parallel.

torchrun --nproc-per-node 2 examples/with_accelerate.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import autoshard
from autoshard.demo import GPT, GPTConfig, batches


def train(
    mesh: DeviceMesh | None, steps: int, config: GPTConfig | None = None, **options: Any
) -> list[float]:
    """Losses of `steps`; mesh None: one process. options: of `autoshard`."""
    config = config or GPTConfig()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = GPT(config).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if mesh is not None:
        model = autoshard(model, mesh, **options)
    # evaluation_mode: accelerate's autocast, but no DDP, since the gradients are reduced already.
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer = accelerator.prepare(optimizer)
    losses: list[float] = []
    for tokens, targets in batches(config, batch=8, steps=steps):  # the same on every rank
        with accelerator.accumulate(model):
            loss = model(tokens.to(accelerator.device), targets.to(accelerator.device))
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
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # makes the process group
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,), mesh_dim_names=("ranks",))
    losses = train(mesh, arguments.steps, backend=arguments.backend)
    accelerator.print("losses", *(f"{loss:.4f}" for loss in losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
