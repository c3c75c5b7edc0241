"""Train a small GPT in parallel: the one line in an ordinary training script.

    torchrun --nproc-per-node 2 examples/train_gpt.py
    torchrun --nproc-per-node 8 examples/train_gpt.py --tp 4

Every rank passes the same global batch and sees the same loss, as on one device.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard import autoshard
from autoshard.demo import GPT, GPTConfig, batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tp", type=int, default=1, help="size of a second mesh axis")
    parser.add_argument("--backend", default="inductor")
    arguments = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # The mesh has two axes: NCCL runs their collectives in the order in which they are issued.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // arguments.tp, arguments.tp), mesh_dim_names=("dp", "tp"))

    config = GPTConfig()
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = autoshard(model, mesh, backend=arguments.backend)  # captured and planned at the first call

    for step, (tokens, targets) in enumerate(batches(config, batch=16, steps=arguments.steps)):
        loss = model(tokens.to(device), targets.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        if rank == 0:
            print(f"step {step}: loss {value:.4f}")
    if rank == 0:
        print(model.autoshard_plan.explain())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
