"""What a plan says of space that is split: halos by name, while prices know the collective they are sent by."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import MeshSpec, find_plan
from tests.one_search import ONE_SEARCH
from tests.profiles import slow_compute


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv2d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.filter(self.filter(x)).square().mean()


def test_halos_have_a_name() -> None:
    """Each filter needs one row of 8 floats of its neighbour: 32 bytes, there and back."""
    with ONE_SEARCH:
        plan = find_plan(
            Twice(),
            MeshSpec({"a": 2}),
            (torch.zeros(1, 1, 8, 8),),
            profile=slow_compute(),
            in_placements=([Shard(2)],),
            constraints={"*": [Replicate()]},
        )
    halos = [c for c in plan.collectives if c.name.startswith("halo")]
    assert [(c.name, c.kind, c.nbytes, c.phase) for c in halos] == [
        ("halo_exchange", "point_to_point", 32, "forward"),
        ("halo_exchange", "point_to_point", 32, "forward"),
        ("halo_reduce", "point_to_point", 32, "backward"),
    ]
    assert all(c.name == c.kind for c in plan.collectives if c not in halos)
    text = plan.explain()
    table = text[text.index("\ncollectives") : text.index("\nparameters")].splitlines()
    assert [line[:36].rstrip() for line in table if "halo" in line] == [
        "  forward  halo_exchange  [a] x2",
        "  backward halo_reduce    [a] x1",
    ]
    assert any("halo_exchange" in line and "64B" in line for line in table) and "point_to_point" not in text
