"""Context parallelism: of causal attention queries are split and keys gathered, or heads are for the sequence, or keys
pass by all ranks; each is the fastest somewhere. Within a window, keys come as a halo."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autoshard import MeshSpec, Plan, find_plan, verify
from autoshard.planning import canonical_capture
from cost_model.mesh import simulated_groups
from cost_model.profile import Profile
from passes.layout.layout import RING
from passes.lower.partition import partition
from passes.redistribution.steps import HaloExchange, HaloReduce, Step
from tests.plans.patterns import OneHead
from tests.profiles import slow_compute

RANKS, UNEVEN = 4, 58  # parts of 15, 15, 15 and 13
SPLIT = {"in_placements": ((Shard(1),),), "out_placements": (Shard(1),)}


class Heads(nn.Module):
    """Causal attention of heads of 16, of which `groups` have keys of their own; of `window` keys, if not 0."""

    def __init__(self, heads: int, groups: int, window: int = 0) -> None:
        super().__init__()
        self.window = window
        self.query = nn.Linear(32, 16 * heads, bias=False)
        self.key, self.value = (nn.Linear(32, 16 * groups, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.query, self.key, self.value
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in layers)
        how: dict[str, Any] = {"is_causal": True}
        if self.window:
            at = torch.arange(x.shape[1])
            before = at[:, None] - at
            how = {"attn_mask": (before >= 0) & (before < self.window)}
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
        return mixed.transpose(1, 2).flatten(2)


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


def test_the_backward_swaps_what_the_forward_did_not() -> None:
    """Of a rank's 16 positions of 32 half is swapped with one other rank: of q, k and v, and of the result with its
    log-sum-exp after; in the backward of both with the result's gradient, and of gradients after. Keys and values and
    gradients of these go round between."""
    model, part = OneHead(), torch.randn(1, 16, 32)
    plan = find_plan(model, MeshSpec({"cp": RANKS}), (part,), profile=prices(), **SPLIT)  # type: ignore[arg-type]
    whole = torch.randn(1, RANKS * 16, 32)
    joint, (stage,) = canonical_capture(model, (whole,), {}).joint, plan.stages
    half, keys = 8 * 32, 2 * 16 * 32
    for rank in range(RANKS):
        module = partition(joint, stage.planned, plan.mesh, rank, simulated_groups(plan.mesh)).module
        exchanges = [n for n in module.graph.nodes if "all_to_all" in str(n.target) and "ring" in n.meta]
        found = [node.args[0].meta["val"].numel() for node in exchanges]
        forward = [3 * half, keys, keys, keys, half + 8]
        assert found[:6] == [*forward, 2 * half + 8] and found[-1] == 3 * half
        swapped = [exchanges[i].args[2] for i in (0, 4, 5, -1)]
        assert all([to for to, n in enumerate(sent) if n] == [RANKS - 1 - rank] for sent in swapped)


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


def steps_of_heads(plan: Plan) -> list[Step]:
    """Of what has a dim of heads: queries, keys, values."""
    (stage,) = plan.stages
    every = itertools.chain.from_iterable(stage.planned.steps.values())
    return [step for step in every if len(step.before.dims) == 4]


@pytest.mark.parametrize(
    ("groups", "window", "halo"),
    [
        (1, 6, ((0, 16), (11, 32), (27, 48), (43, 64))),
        (2, 40, ((0, 16), (0, 32), (0, 48), (9, 64))),
        (1, 1, None),
    ],
    ids=["near", "of three ranks", "itself"],
)
def test_a_window_is_a_halo(groups: int, window: int, halo: tuple[tuple[int, int], ...] | None) -> None:
    """Of keys and values, and of their gradients; nothing else of a sequence moves."""
    torch.manual_seed(0)
    model, part = Heads(2, groups, window).double(), torch.randn(1, 16, 32).double()
    plan = find_plan(model, MeshSpec({"cp": RANKS}), (part,), profile=prices(), **SPLIT)  # type: ignore[arg-type]
    found = steps_of_heads(plan)
    assert [type(step) for step in found] == ([HaloExchange] * 2 + [HaloReduce] * 2 if halo else [])
    of_keys = {
        one for step in found for one in (step.before.halos[2], step.after.halos[2]) if one is not None
    }
    assert {one.spans for one in of_keys} == ({halo} if halo else set())
    report = verify(model, plan, (torch.randn(1, RANKS * 16, 32).double(),), sizes=[{"sequence": UNEVEN}])
    assert report.ok and report.max_error < 1e-12, str(report)


class Mistral(nn.Module):
    """Of transformers: two layers in which a word sees six. x: [batch, words, 32] -> logits"""

    def __init__(self) -> None:
        from transformers import MistralConfig, MistralForCausalLM

        super().__init__()
        config = MistralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=6,
            use_cache=False,
        )
        self.model = MistralForCausalLM(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(inputs_embeds=x).logits


def test_a_models_windows_are_halos() -> None:
    torch.manual_seed(0)
    model, part = Mistral().double(), torch.randn(1, 8, 32).double()
    plan = find_plan(model, MeshSpec({"cp": 2}), (part,), profile=prices(), **SPLIT)  # type: ignore[arg-type]
    attentions = [record for record in plan.records if record.op.startswith("attention")]
    assert len(attentions) == 4 and all(record.text.endswith(", 6)") for record in attentions)
    ways = [[type(step) for step in way] for way in plan.stages[0].planned.steps.values()]
    assert [way for way in ways if HaloExchange in way] == [
        [HaloExchange]
    ] * 4  # keys and values of two layers
    assert sum(way[0] is HaloReduce for way in ways) == 4
    report = verify(model, plan, (torch.randn(1, 16, 32).double(),), sizes=[{"sequence": 13}])
    assert report.ok and report.max_error < 1e-12, str(report)
