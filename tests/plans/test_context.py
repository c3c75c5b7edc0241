"""Context parallelism: of causal attention queries are split and keys gathered, or heads are for the sequence, or keys
pass by all ranks; each is the fastest somewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autoshard import MeshSpec, find_plan, verify
from cost_model.profile import Profile
from passes.layout.layout import RING
from tests.plans.patterns import OneHead
from tests.profiles import slow_compute

RANKS, UNEVEN = 4, 58  # parts of 15, 15, 15 and 13
SPLIT = {"in_placements": ((Shard(1),),), "out_placements": (Shard(1),)}


class Heads(nn.Module):
    """Causal attention of heads of 16, of which `groups` have keys of their own."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.query = nn.Linear(32, 16 * heads, bias=False)
        self.key, self.value = (nn.Linear(32, 16 * groups, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.query, self.key, self.value
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in layers)
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )


def prices(slower: float = 1.0) -> Profile:
    """By which products take time, and messages on links so much slower."""
    profile = slow_compute()
    device = replace(profile.device, memory_bytes_per_second=1e15)
    links = tuple(replace(link, bytes_per_second=link.bytes_per_second / slower) for link in profile.links)
    return replace(profile, device=device, links=links, overlap_efficiency=0.5)


@pytest.mark.parametrize(
    ("model", "slower", "factor"),
    [
        (OneHead(), 1.0, RING),
        (OneHead(masked=True), 1.0, RING),
        (OneHead(), 1e4, "s"),
        pytest.param(OneHead(masked=True), 1e4, "s", marks=pytest.mark.slow),
        (Heads(8, 8), 1.0, "h"),
        (Heads(4, 1), 1.0, "h"),
        pytest.param(Heads(2, 1), 1.0, RING, marks=pytest.mark.slow),
        pytest.param(Heads(2, 1), 1e4, "s", marks=pytest.mark.slow),
    ],
    ids=[
        "ring",
        "ring by a mask",
        "gathered",
        "by a mask",
        "many heads",
        "grouped",
        "few heads",
        "and slow links",
    ],
)
def test_each_way_is_the_fastest_somewhere(model: nn.Module, slower: float, factor: str) -> None:
    torch.manual_seed(0)
    model.double()
    part = torch.randn(1, 16, 32).double()
    plan = find_plan(model, MeshSpec({"cp": RANKS}), (part,), profile=prices(slower), **SPLIT)  # type: ignore[arg-type]
    attentions = [record for record in plan.records if record.name.startswith("attention")]
    assert [[split.factor for split in record.splits] for record in attentions] == [[factor], [factor]]
    sizes = [{"sequence": UNEVEN}] if factor == RING and isinstance(model, Heads) else []
    report = verify(model, plan, (torch.randn(1, RANKS * 16, 32).double(),), sizes=sizes)
    assert report.ok and report.max_error < 1e-12, str(report)


def test_within_a_limit_keys_are_not_gathered() -> None:
    """On links on which gathering is faster."""
    model, part = OneHead(width=16).double(), torch.randn(1, 128, 16).double()
    planned = lambda **given: find_plan(
        model, MeshSpec({"cp": RANKS}), (part,), profile=prices(1e4), **SPLIT, **given
    )  # type: ignore[arg-type]
    whole = planned()
    found = planned(memory_limit=int(0.8 * whole.peak_memory))
    ways = [{split.factor for record in plan.records for split in record.splits} for plan in (whole, found)]
    assert [RING in way for way in ways] == [False, True]
