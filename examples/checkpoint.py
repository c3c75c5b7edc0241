"""Save on one mesh, load on another, with torch.distributed.checkpoint as it is.

torchrun --nproc-per-node 2 examples/checkpoint.py save /tmp/gpt-checkpoint
torchrun --nproc-per-node 3 examples/checkpoint.py load /tmp/gpt-checkpoint
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from autoshard import autoshard
from autoshard.demo import GPT, GPTConfig, batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("save", "load"))
    parser.add_argument("folder")
    arguments = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)  # gloo: what a checkpoint agrees on
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("ranks",))

    config = GPTConfig()
    data = [(x.to(device), y.to(device)) for x, y in batches(config, batch=16, steps=4)]
    torch.manual_seed(0 if arguments.action == "save" else 1)  # what is loaded must not matter
    model = autoshard(GPT(config).to(device), mesh, data[0], backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    if arguments.action == "save":
        for tokens, targets in data[:3]:
            model(tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    state_of_model, state_of_optimizer = get_state_dict(model, optimizer)
    state = {"model": state_of_model, "optimizer": state_of_optimizer}
    if arguments.action == "save":
        dcp.save(state, checkpoint_id=arguments.folder)
    else:
        dcp.load(state, checkpoint_id=arguments.folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    with torch.no_grad():
        loss = model(*data[3]).item()
    if rank == 0:
        print(f"{arguments.action} on {world} ranks: loss of the next batch {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
