"""When the collectives of a real step run, beside when they were predicted to.

    python -m benchmarks.cluster --hosts 2 --ranks 2 --rate 1gbit -- \
        python benchmarks/order.py --family FSDP --draw benchmarks/results/collectives.svg
    torchrun --nproc-per-node 4 benchmarks/order.py

A small GPT is planned with prices that are measured on the ranks first, freely or as one family of plans, and trained
for a few steps under `autoshard.report`. Rank 0 prints the report and draws it.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Profile, autoshard, report
from autoshard.profiling.startup import attend
from benchmarks.models import family_constraints
from benchmarks.racing.workloads import Workload, gpt, mlp

WORKLOADS: dict[str, Workload] = {
    "gpt": gpt(2048, 128, 256, 2, 8),
    "mlp": mlp(512, 2048, 3, 512),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=tuple(WORKLOADS), default="gpt")
    parser.add_argument(
        "--family", choices=("DDP", "FSDP", "TP"), help="pinned as it; the search's plan without"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profile", help="a file or a shipped name, instead of measuring")
    parser.add_argument("--profile-seconds", type=float, default=20.0)
    parser.add_argument("--draw", type=Path, help="an SVG file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        follow(given)
    finally:
        dist.destroy_process_group()


def follow(given: argparse.Namespace) -> None:
    """Train, report, print and draw."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    profile = given.profile or Profile.measure(mesh, time_budget=given.profile_seconds, attend=attend)
    workload = WORKLOADS[given.model]
    torch.manual_seed(0)
    model, batch = workload.build(), workload.batch()
    pins = None
    if given.family:
        pins = family_constraints(given.family, 1, columns=workload.columns, rows=workload.rows)
    autoshard(model, mesh, batch, profile=profile, backend="eager", constraints=pins, tune="first")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with report(model, repeats=9) as measured:
        for _ in range(given.steps):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(measured.text())
        if given.draw:
            print(measured.draw(given.draw))


if __name__ == "__main__":
    main()
