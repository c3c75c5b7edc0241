"""Pin a few weights, ask what the plan does and why not otherwise, and check it in one process.

python examples/pin_and_explain.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import MeshSpec, find_plan, verify


class MLP(nn.Module):
    """Two products and a loss. x, y: [batch, width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MLP(64, 200)
    inputs = (torch.randn(32, 64), torch.randn(32, 64))
    mesh = MeshSpec({"dp": 2, "tp": 2})

    # Column, then row, over tp; the search decides the rest. Patterns match parameter names.
    pins = {"up.*": {"tp": Shard(0)}, "down.*": {"tp": Shard(1)}}
    pinned = find_plan(model, mesh, inputs, constraints=pins)
    free = find_plan(model, mesh, inputs)

    print(pinned.to_text())
    print(pinned.explain())
    print("up.weight:\n" + pinned.explain("up.weight"))
    print("pinned -> free\n" + pinned.diff(free))
    print(
        "free, why not split the rows of up.weight over dp?\n"
        + free.why_not("up.weight", [Shard(0), Replicate()])
    )

    # Of 8 GPUs: why not as DDP does it, and over which links would another plan win?
    rows = torch.empty(32768, 4096, device="meta")
    plan = find_plan(MLP(4096, 16384).to("meta"), MeshSpec({"dp": 8}, device_type="cuda"), (rows, rows))
    print(plan.why_not("DDP"))
    for crossover in plan.crossovers():
        print(crossover)
    print()

    report = verify(model, pinned, inputs)  # every rank simulated here, against the model as it is
    print(report)
    assert report.ok


if __name__ == "__main__":
    main()
