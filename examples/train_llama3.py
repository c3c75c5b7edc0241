"""Train a Llama 3 of transformers on a mesh of two axes: data, clipping, schedule, checkpoints, resuming.

torchrun --nproc-per-node 4 examples/train_llama3.py --tp 2 --folder /tmp/llama3

Small by default; the 8B model is --hidden 4096 --intermediate 14336 --layers 32 --heads 32 --kv-heads 8
--vocabulary 128256 --context 8192. A run that was stopped goes on from its last whole checkpoint.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard import autoshard, data_loader, last_checkpoint, new_checkpoint, random_state
from autoshard.demo import demo_text


class Text(Dataset[torch.Tensor]):
    """English in bytes, cut into samples: int64 [context]."""

    def __init__(self, context: int) -> None:
        self.data = torch.frombuffer(bytearray(demo_text()), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return len(self.data) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index * self.context : (index + 1) * self.context].long()


def llama(arguments: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=arguments.context,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def train(arguments: argparse.Namespace, mesh: DeviceMesh, **options: Any) -> dict[int, float]:
    """Step -> loss, of the steps that this run did. options: of `autoshard`."""
    # The ranks of a row of the mesh, along tp, read the same samples; those of a column share out the batch.
    placements = [Shard(0), Replicate()]
    loader = data_loader(
        Text(arguments.context), mesh, placements, batch_size=arguments.batch, shuffle=True, drop_last=True
    )
    model = llama(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    tokens = next(iter(loader))
    model = autoshard(
        model, mesh, ((), {"input_ids": tokens, "labels": tokens}), in_placements=placements, **options
    )

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        rest = {"random": random_state(model), "schedule": schedule, "loader": loader}
        return {"model": of_model, "optimizer": of_optimizer, **rest}

    step, losses = 0, {}
    folder = last_checkpoint(arguments.folder, mesh)
    if folder is not None:
        loaded = state()
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        step = schedule.last_epoch
    batches = _endless(loader)
    while step < arguments.stop:
        tokens = next(batches).to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses[step] = loss.item()
        step += 1
        if step % arguments.every == 0:
            with new_checkpoint(arguments.folder, step, mesh, keep=2) as folder:
                dcp.save(state(), checkpoint_id=folder)
    return losses


def _endless(loader: Any) -> Any:
    while True:
        yield from loader


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2, help="size of the mesh's second axis")
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of the whole run, which the schedule knows"
    )
    parser.add_argument("--stop", type=int, help="end after this step, to be resumed")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--folder", default="llama3-checkpoints")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--lr", type=float, default=3e-4)
    for name, size in [
        ("vocabulary", 256),
        ("hidden", 64),
        ("intermediate", 128),
        ("layers", 2),
        ("heads", 4),
        ("kv-heads", 2),
        ("context", 64),
        ("batch", 8),
    ]:
        parser.add_argument(f"--{name}", type=int, default=size)
    arguments = parser.parse_args(given)
    arguments.stop = arguments.stop or arguments.steps
    return arguments


def main() -> None:
    arguments = parsed()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # The mesh has two axes: NCCL runs their collectives in the order in which they are issued.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)  # gloo: what a checkpoint agrees on
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
    sizes = (dist.get_world_size() // arguments.tp, arguments.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))
    losses = train(arguments, mesh, backend=arguments.backend)
    if dist.get_rank() == 0:
        for step, loss in losses.items():
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
