"""Packed sequences: a mask of documents is never made; attention is told of which documents queries and keys are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autoshard import MeshSpec, find_plan, verify
from autoshard.planning import canonical_capture
from passes.ir.joint import JointGraph, node_values
from tests.profiles import slow_compute

LENGTH, WIDTH = 24, 16
Mask = Callable[[Tensor, Tensor], Tensor]


class Packed(nn.Module):
    """Attention by a mask of documents `ids` [batch, length] and places."""

    def __init__(self, mask: Mask, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.heads = mask, heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.double()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        heads = lambda y: y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mask = self.mask(ids, torch.arange(x.shape[1]))
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def same(ids: Tensor, at: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def causal(ids: Tensor, at: Tensor) -> Tensor:
    return ((ids[:, :, None] == ids[:, None, :]) & (at[:, None] >= at))[:, None]


def turned(ids: Tensor, at: Tensor) -> Tensor:
    return torch.logical_and(at <= at[:, None], ids[:, None, None, :] == ids[:, None, :, None])


def documents(batch: int) -> Tensor:
    return torch.tensor([[0] * 9 + [1] * 8 + [2] * 7, [5] * 20 + [1] * 4])[:batch]


def joint_of(model: nn.Module, *args: Any, **kwargs: Any) -> JointGraph:
    return canonical_capture(model, args, kwargs).joint


def told(joint: JointGraph) -> list[tuple[bool, bool]]:
    """Of each attention: whether it is causal, and whether it is told of documents."""
    ops = torch.ops.autoshard.attention, torch.ops.autoshard.attention_backward
    found = [n for n in joint.graph.nodes if n.target in [op.default for op in ops]]
    flags = [n.args[4:] if n.target is ops[0].default else n.args[7:] for n in found]
    return [(bool(flag[0]), len(flag) == 5) for flag in flags]


def largest_mask(joint: JointGraph) -> int:
    values = (
        value for node in joint.graph.nodes if node.op == "call_function" for value in node_values(node)
    )
    return max((v.numel() for v in values if isinstance(v, Tensor) and v.dtype == torch.bool), default=0)


@pytest.mark.parametrize(("mask", "is_causal"), [(same, False), (causal, True), (turned, True)])
def test_documents_take_the_place_of_their_mask(mask: Mask, is_causal: bool) -> None:
    joint = joint_of(Packed(mask), torch.randn(2, LENGTH, WIDTH).double(), documents(2))
    assert told(joint) == [(is_causal, True)] * 2
    assert largest_mask(joint) == 0


@pytest.mark.parametrize(
    "mask",
    [
        lambda ids, at: (ids[:, :, None] >= ids[:, None, :])[:, None],
        lambda ids, at: ((ids[:, :, None] == ids[:, None, :]) | (at == at[:, None]))[:, None],
        lambda ids, at: ((ids[:, :, None] == ids[:, None, :]) & (at[:, None] - at < 4))[:, None],
        lambda ids, at: ((ids[:, :, None] == ids[:, None, :]) & (ids[:, None] > 0))[:, None],
        lambda ids, at: ((ids[:, :, None] == ids[:, None, :]) & (ids[:, None] <= ids[:, :, None] - 1))[
            :, None
        ],
        lambda ids, at: ((ids[:, :, None] // 2 == ids[:, None] // 2) & (ids[:, None] <= ids[:, :, None]))[
            :, None
        ],
    ],
    ids=["order", "or", "near", "padding", "places of others", "places that are not"],
)
def test_other_masks_stay(mask: Mask) -> None:
    joint = joint_of(Packed(mask), torch.randn(2, LENGTH, WIDTH).double(), documents(2))
    assert told(joint) == [(False, False)] * 2
    assert largest_mask(joint) >= LENGTH * LENGTH


@pytest.mark.parametrize("mask", [same, causal])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sequence_in_parts_has_the_numbers_of_its_part(mask: Mask, ranks: int) -> None:
    part = LENGTH // ranks
    call = torch.randn(1, part, WIDTH).double(), documents(1)[:, :part]
    given: dict[str, Any] = {"in_placements": ((Shard(1),), (Shard(1),)), "out_placements": (Shard(1),)}
    model = Packed(mask, heads=1)
    plan = find_plan(model, MeshSpec({"cp": ranks}), call, profile=slow_compute(), **given)
    whole = torch.randn(1, LENGTH, WIDTH).double(), documents(1)
    report = verify(model, plan, whole, sizes=[{"sequence": LENGTH - 1}])
    assert report.ok and report.max_error < 1e-12, str(report)
    assert {split.factor for r in plan.records if r.name.startswith("attention") for split in r.splits} == {
        "s"
    }


def packed_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def test_places_that_begin_again_are_documents() -> None:
    """As transformers packs sequences, by `position_ids`; what they are is a value of each call."""
    model, words = packed_llama(), torch.randint(0, 64, (2, LENGTH))
    places = lambda *ends: torch.cat([torch.arange(n) for n in ends]).expand(2, -1)
    joint = joint_of(model, input_ids=words, position_ids=places(10, 14))
    assert told(joint) == [(True, True)] * 4
    assert largest_mask(joint) == 2 * LENGTH  # where a document begins
    call = lambda *ends: ((), {"input_ids": words, "position_ids": places(*ends)})
    plan = find_plan(model, MeshSpec({"dp": 2}), call(10, 14), profile=slow_compute())
    for ends in ((10, 14), (1, 5, 3, 15), (LENGTH,)):
        report = verify(model, plan, call(*ends))
        assert report.ok and report.max_error < 1e-6, str(report)  # its norms are computed in float32


def test_blocks_of_queries_are_put_together() -> None:
    """Of 2,500 queries in blocks of 1,024, with gradients; the mask of a block is as wide as the keys before it."""
    torch.manual_seed(0)
    length = 2500
    q, k, v, grad = (torch.randn(1, n, length, 4, dtype=torch.float64) for n in (2, 1, 1, 2))
    ids = (torch.arange(length) // 700).view(1, 1, length, 1)
    mask = (ids == ids.transpose(2, 3)).tril()
    ops = torch.ops.autoshard
    out, lse = ops.attention(q, k, v, None, True, 0.5, 0, ids, ids)
    torch.testing.assert_close((out, lse), ops.attention(q, k, v, mask, False, 0.5))
    found = ops.attention_backward(grad, q, k, v, None, out, lse, True, 0.5, 0, ids, ids)
    torch.testing.assert_close(found, ops.attention_backward(grad, q, k, v, mask, out, lse, False, 0.5))
    assert math.isfinite(float(lse.sum()))
