"""One rank that gives autoshard a model and inputs that are not where the mesh is; torchrun starts it for `devices`.

torchrun --nproc-per-node 4 tests/mock_cuda/checks/devices_rank.py trained --mesh 2,2
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import autoshard as package
from autoshard import ShardingError, autoshard

AXES = ("a", "b", "c")


class Mixed(nn.Module):
    """Parameters, buffers that change, one that does not, a constant that is none, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(64, 128), nn.BatchNorm1d(128)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(128, 32)
        self.register_buffer("scale", torch.ones(32))
        self.shift = torch.tensor(3.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.up(x))))
        return (self.down(hidden) * self.scale + self.shift - y).pow(2).mean()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 64), torch.randn(32, 32)


def trained(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """A model on the CPU, that an optimizer has stepped there, trained with tensors from everywhere."""
    model, batch = Mixed(), inputs()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    *others, last = mesh.mesh_dim_names or ()
    pins = {"up.weight": {last: Shard(0)}, "down.weight": dict.fromkeys(others, Shard(0))}
    autoshard(model, mesh, batch, profile="h100", backend="eager", constraints=pins)
    assert {t.device for t in (*model.parameters(), *model.buffers())} == {device}
    batches = [batch, tuple(t.to(device) for t in batch), tuple(t.pin_memory() for t in batch)]
    for step, (x, y) in enumerate([*batches, batches[1], batches[2]]):
        # The first steps compile, connect and make the optimizer's lists.
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    plan: Any = model.autoshard_plan
    return {"communicators": len(plan.communicators), "reserve": plan.reserve}


def data(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Parts of CPU tensors, and a mean, on one axis."""
    rank = dist.get_rank()
    whole = torch.arange(40.0).view(10, 4) if rank == 0 else None
    part = package.scatter(whole, mesh, [Shard(0)])
    assert part.device == device
    gathered = package.gather(part.cpu(), mesh, [Shard(0)])
    assert gathered.device == device and gathered.shape == (10, 4)
    rows = package.halo_exchange(part, mesh, {0: (1, 1)}, sizes={0: 10})
    assert rows.device == device
    torch.cuda.set_sync_debug_mode("error")
    mean = package.weighted_mean(0.5, 3, mesh)
    torch.cuda.set_sync_debug_mode("default")
    assert mean.device == device
    try:
        package.halo_exchange(part.cpu(), mesh, {0: (1, 1)}, sizes={0: 10})
    except ShardingError as error:
        return {"refused": str(error).splitlines()[0]}
    return {}


def misplaced(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """The whole model on the first GPU, on all ranks: refused on all of them, and unchanged."""
    model = Mixed().to("cuda:0")
    before = dict(model.named_parameters())
    try:
        autoshard(model, mesh, inputs(), profile="h100", backend="eager")
    except ShardingError as error:
        assert all(dict(model.named_parameters())[name] is p for name, p in before.items())
        return {"refused": str(error).splitlines()[0]}
    return {}


CASES = {"trained": trained, "data": data, "misplaced": misplaced}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--mesh", default="4")
    parser.add_argument("--unbound", action="store_true", help="no device_id")
    arguments = parser.parse_args()
    sizes = tuple(int(size) for size in arguments.mesh.split(","))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=None if arguments.unbound else device)
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=AXES[: len(sizes)])
    torch.manual_seed(0)
    torch.backends.cudnn.enabled = False
    found = CASES[arguments.case](mesh, device)
    print("found " + json.dumps({"rank": dist.get_rank(), **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
