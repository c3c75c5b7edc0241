"""benchmarks/published.py: what it takes from the rows, and what it adds to a plan. Not how good that is."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, Profile
from benchmarks.published import (
    ROWS,
    Row,
    as_fsdp_sends,
    beside,
    captured_joint,
    cast_first,
    hand_seconds,
    missing,
    read_rows,
    runs_micro_batches,
)
from cost_model.compute import ComputePrices
from passes.ir.joint import node_value
from passes.layout.assignment import NodeLayouts
from passes.layout.placements import placements_to_layout
from passes.predict.predict_step import PredictedCollective, Prediction

SMALL = Row("125m", 64, 2, "h100_80gb", 4, 1, "FULL_SHARD", False, 1000.0)


def test_rows() -> None:
    rows = read_rows(ROWS)
    assert len(rows) == 55
    predicted = [(row.model, row.gpus, row.tokens_per_second) for row in rows if row.missing() is None]
    assert predicted == [
        ("3b", 512, 21664.0),
        ("3b", 256, 22772.0),
        ("3b", 128, 23422.0),
        ("760m", 32, 67971.0),
        ("760m", 16, 68551.0),
    ]
    assert rows[6].tokens == 8 * 2048


def test_the_others_say_why_not() -> None:
    several, blocks = replace(SMALL, accumulation=2), replace(SMALL, checkpointing=True)
    assert runs_micro_batches(several) and not runs_micro_batches(blocks) and not runs_micro_batches(SMALL)
    unknown = replace(SMALL, model="gpt")
    reasons = missing([SMALL, several, several, blocks, unknown])
    assert list(reasons.values()) == [2, 1, 1]
    assert [reason.split(":")[0] for reason in reasons] == [
        "several micro-batches",
        "activation checkpointing",
        "no model, profile or pins for gpt, h100_80gb, FULL_SHARD",
    ]


def test_seconds_beside_the_plan_by_hand() -> None:
    """256 tokens of width 768, 12 layers; 75 parameters; two float32 copies and two log-softmaxes of 50,432 logits."""
    compute = ComputePrices(Profile.named("h100"))
    bandwidth = Profile.named("h100").device.memory_bytes_per_second
    found = beside(SMALL, 12, compute)
    assert found["copies"] == pytest.approx(12 * 256 * 768 * (8 / 150e9 + 8 / bandwidth))
    assert found["metrics"] == pytest.approx(2 * 256 * 50_432 * 14 / bandwidth)
    assert found["padding"] == pytest.approx(12 * 36 * 6e-6)
    assert found["optimizer"] == pytest.approx(75 * 12 * 6e-6)
    assert beside(replace(SMALL, accumulation=3), 12, compute)["optimizer"] == pytest.approx(75 * 4 * 6e-6)


def test_matrices_are_cast_before_they_are_gathered() -> None:
    mesh = MeshSpec({"dp": 2})
    joint = captured_joint(SMALL, 1)
    layouts: dict[str, NodeLayouts] = {}
    for node in joint.placeholders:
        shape = tuple(node_value(node).shape)
        shard = (placements_to_layout([Shard(0)], shape, mesh, what=node.name),) if shape else ()
        layouts[node.name] = NodeLayouts((), shard)
    changed = cast_first(joint, layouts)
    casts = [
        n for n in joint.graph.nodes if n.target is torch.ops.aten._to_copy.default and n.name in changed
    ]
    assert {n.all_input_nodes[0].name for n in casts} == {
        node.name
        for node, spec in zip(joint.placeholders, joint.inputs, strict=True)
        if spec.kind == "param" and node_value(node).ndim == 2
    }
    assert all(changed[n.name].results == layouts[n.all_input_nodes[0].name].results for n in casts)


@pytest.mark.parametrize(("sharding", "gathers"), [("FULL_SHARD", 2), ("SHARD_GRAD_OP", 1)])
def test_fsdp_sends_block_by_block(sharding: str, gathers: int) -> None:
    """Against a plan that takes 2 s to gather and 1 s to reduce, on a wire of 1 GB/s, half a second a start."""
    sent = lambda kind, seconds: PredictedCollective(
        "forward", "x", "x", kind, ("dp",), 1, seconds, 0.0, 0.0, seconds
    )
    plan = Prediction(
        9.0, (), (sent("all_gather", 2.0), sent("reduce_scatter", 1.0), sent("all_reduce", 5.0))
    )
    prices = Mock(overlap_efficiency=0.75)
    prices.redistributor.collective_seconds = lambda kind, axes, nbytes: 0.5 + nbytes / 1e9
    found = as_fsdp_sends(replace(SMALL, sharding=sharding), 3, plan, prices)
    block, rest = 12 * 768**2, (50_432 + 64) * 768
    wire = (gathers * 2 + 4) * (3 * block + rest) / 1e9 + 4 * (gathers + 1) * 0.5
    assert found == pytest.approx(0.25 * (wire - 3.0))


def test_from_two_depths() -> None:
    """A step is affine in the layers: of 2 and 3 of them as of 2 and 4, to the last bucket."""
    profile = Profile.named("h100")
    ends = [hand_seconds(SMALL, profile, depths) for depths in ((1, 2), (1, 3))]
    assert ends[0] == pytest.approx(ends[1], rel=0.05)
