"""benchmarks/published.py: what it takes from the rows, and what it adds to a plan. Not how good that is."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, Profile
from benchmarks.llama3 import LLAMAS, selective
from benchmarks.mpt import SIZES
from benchmarks.published import as_it_ran, by_hand, captured_joint, hand_step, lines
from benchmarks.published_fsdp import (
    as_fsdp_holds,
    as_fsdp_moves,
    as_fsdp_sends,
    beside,
    block_numbers,
    other_numbers,
)
from benchmarks.published_parallel import parallel_rows
from benchmarks.published_rows import ROWS, Row, gpu_profile, missing, profile_of, read_rows
from cost_model.compute import ComputePrices
from passes.ir.joint import node_value
from passes.ir.op_traits import is_collect, is_product, is_use
from passes.layout.layout import Layout, NodeLayouts
from passes.layout.placements import placements_to_layout
from passes.predict.prediction import LiveValue, MemoryWalk, PredictedCollective, Prediction
from passes.states.compute_again import copies_in
from passes.states.offers import users_choice

SMALL = Row("125m", 64, 2, "h100_80gb", 4, 1, "FULL_SHARD", "none", 1000.0)
BLOCKS = replace(SMALL, checkpointing="full")
LLAMA = Row("Llama 3.1 8B", 64, 2, "h100_96gb", 1, 1, "FULL_SHARD", "selective", 1000.0)


def test_rows() -> None:
    """55 and 6, and none that no plan is."""
    rows = [row for path in ROWS for row in read_rows(path)]
    assert len(rows) == 61 and not missing(rows)
    assert rows[6].tokens == 8 * 2048
    said = [(row.checkpointing, row.accumulation > 1) for row in rows]
    assert [
        said.count(kind) for kind in (("full", False), ("full", True), ("none", False), ("none", True))
    ] == [
        6,
        22,
        5,
        22,
    ]
    assert rows[-3] == Row(
        "Llama 3.1 8B", 8192, 128, "h100_96gb", 2, 1, "FULL_SHARD", "selective", 6514.0, True, 62.0
    )
    assert rows[-1] == replace(rows[-3], tokens_per_second=8380.0, memory_gib=61.8, float8=True)


def test_the_others_say_why_not() -> None:
    unknown, offloaded = replace(SMALL, model="gpt"), replace(SMALL, checkpointing="offloaded")
    policy, mesh = replace(SMALL, checkpointing="selective"), replace(LLAMA, sharding="fsdp=8,tp=2")
    assert list(missing([SMALL, unknown, unknown, offloaded, policy, mesh]).items()) == [
        ("no model, profile or pins for gpt, h100_80gb, FULL_SHARD", 2),
        ("no policy offloaded of what 125m computes again", 1),
        ("no policy selective of what 125m computes again", 1),
        ("no model, profile or pins for Llama 3.1 8B, h100_96gb, fsdp=8,tp=2", 1),
    ]
    assert list(lines([unknown, policy], None, ())) == []


def test_another_gpu() -> None:
    """torchtitan's H100 has 2.4 TB/s, the profile's 3.35; at 500 W products reach 585 Tflop/s, at 700 755."""
    plain, other = Profile.named("h100").device, profile_of(LLAMA).device
    assert profile_of(SMALL).device == plain
    assert other.memory_bytes_per_second == plain.memory_bytes_per_second * 2.4e12 / 3.35e12
    for name in ("matmul", "attention"):
        for rates, fewer in zip(getattr(plain, name), getattr(other, name), strict=True):
            assert fewer.flops_per_second == pytest.approx(
                [rate * 585 / 755 for rate in rates.flops_per_second]
            )
            assert (fewer.dtype, fewer.flops) == (rates.dtype, rates.flops)
    assert replace(other, memory_bytes_per_second=0.0, matmul=(), attention=()) == replace(
        plain, memory_bytes_per_second=0.0, matmul=(), attention=()
    )


def test_transformer_engine_attends_by_cudnn() -> None:
    """At least 1.7 times as fast as FlashAttention-2. Of 16 rows two ran without it."""
    plain = Profile.named("h100").device
    other = [
        row
        for row in parallel_rows()
        if row.profile.device.attention == gpu_profile(row.gpu).device.attention
    ]
    assert [row.source.split()[0] for row in other] == ["pytorch/torchtitan", "meta-pytorch/autoparallel#481"]
    (nemotron,) = (row for row in parallel_rows() if row.model == "Nemotron-4-15B")
    for rates, faster in zip(plain.attention, nemotron.profile.device.attention, strict=True):
        assert faster.flops_per_second == pytest.approx([1.7 * rate for rate in rates.flops_per_second])
    assert replace(nemotron.profile.device, attention=plain.attention) == plain


def test_attention_in_triton() -> None:
    """Twice as long backward, of five products, and 1.4 times forward, of two, or four where blocks run again; in all
    rows but those of 128 GPUs and more."""
    rows = [row for path in ROWS for row in read_rows(path)]
    assert {row.triton for row in rows if row.gpus < 128 and row.model in SIZES} == {True}
    assert {row.triton for row in rows if row.gpus >= 128 or row.model in LLAMAS} == {False}
    plain = Profile.named("h100").device
    for row, slower in ((SMALL, (2 * 1.4 + 5 * 2) / 7), (BLOCKS, (4 * 1.4 + 5 * 2) / 9)):
        found = profile_of(replace(row, triton=True)).device
        assert replace(found, attention=plain.attention) == plain
        for ours, theirs in zip(found.attention, plain.attention, strict=True):
            assert ours.flops_per_second == pytest.approx([rate / slower for rate in theirs.flops_per_second])


def test_blocks_run_again_in_every_micro_batch() -> None:
    """Of two blocks: four products and attention each, but for the last product, whose sum leaves the block."""
    row = replace(BLOCKS, accumulation=2)
    joint = as_it_ran(row, captured_joint(row, 2))
    assert joint.pieces == 2 and not copies_in(as_it_ran(SMALL, captured_joint(SMALL, 2)))
    again = [n for n in joint.graph.nodes if n.name in copies_in(joint)]
    assert {n.meta["runs"] for n in again} == {"piece"}
    assert sum(is_product(n) for n in again) == 2 * 4
    assert tuple(node_value(n).shape[0] for n in again if is_product(n)) == (8,) * 8


def test_selective_keeps_attention_and_every_second_product() -> None:
    """Of q, k, v, out, gate, up, down: the second, fourth and sixth are computed again."""
    joint = captured_joint(LLAMA, 2)
    again = selective(joint, users_choice(joint))
    nodes = {n.name: n for n in joint.graph.nodes}
    products = [nodes[name].meta["module"] for name in again if is_product(nodes[name])]
    assert products == [f"blocks.{i}.{name}" for i in (0, 1) for name in ("k", "out", "up")]
    assert not any("attention" in str(nodes[name].target) for name in again)


def test_layers_in_float8() -> None:
    """Of seven products of a block; the head stays in bfloat16. Weights are gathered in one byte a number."""
    row = replace(LLAMA, float8=True)
    joint = captured_joint(row, 1)
    scaled = [n for n in joint.graph.nodes if "_scaled_mm" in str(n.target)]
    assert len(scaled) == 3 * 7 and "float8" in row.ran
    assert {n.meta["module"].split(".")[0] for n in scaled} == {"blocks"}
    prices = Mock(overlap_efficiency=0.75)
    prices.redistributor.collective_seconds = lambda kind, axes, nbytes: nbytes / 1e9
    wide, narrow = (as_fsdp_sends(one, 1, Prediction(0.0, (), ()), prices) for one in (LLAMA, row))
    assert wide - narrow == pytest.approx(0.25 * 2 * block_numbers(row) / 1e9)


@pytest.mark.slow
def test_memory_and_time_of_what_runs_again() -> None:
    """A block more is half of its parameters with two states, in float32, and its input, [4, 2048, 768] in bfloat16;
    without checkpointing its own values besides."""
    profile = Profile.named("h100")
    long = [replace(row, sequence=2048) for row in (SMALL, BLOCKS)]
    kept, again = ([by_hand(row, profile, layers) for layers in (3, 4)] for row in long)
    block = 12 * 768**2 * 12 / 2 + 4 * 2048 * 768 * 2
    assert again[1].nbytes - again[0].nbytes == pytest.approx(block, rel=0.01)
    assert kept[1].nbytes - kept[0].nbytes > block + 10 * 4 * 2048 * 768 * 2
    assert all(one.seconds > other.seconds for one, other in zip(again, kept, strict=True))


def test_a_micro_batch_gathers_and_reduces() -> None:
    """Whatever was found: parts are held before the micro-batches, and gradients of matrices are added up in parts."""
    row = replace(SMALL, accumulation=3)
    joint, mesh = as_it_ran(row, captured_joint(row, 1)), MeshSpec({"dp": 2})
    split = lambda node: placements_to_layout([Shard(0)], tuple(node_value(node).shape), mesh, what=node.name)
    given = [node for node in joint.placeholders if node_value(node).ndim]
    layouts = {node.name: NodeLayouts((), (split(node),)) for node in given}
    sums = [n for n in joint.graph.nodes if is_collect(n)]
    assert len(sums) == 1 + 2 + 6 + 1  # loss, tables, a block's, the last norm's
    for node in sums:
        whole = Layout.replicated(node_value(node).ndim)
        layouts[node.name] = NodeLayouts((whole,), (whole,))
    changed = as_fsdp_moves(joint, layouts)
    matrices = [n for n in sums if node_value(n).ndim == 2]
    held = [n for n in joint.graph.nodes if n.name in changed and is_use(n)]
    assert len(matrices) == len(held) == 6
    for node in (*matrices, *held):
        assert changed[node.name].results == changed[node.name].operands == (split(node),)
    assert all(changed[n.name] == layouts[n.name] for n in sums if n not in matrices)


def test_time_of_micro_batches() -> None:
    """Three take three times as long as one, but for the update."""
    profile = Profile.named("h100")
    one, three = (by_hand(replace(SMALL, accumulation=k, sequence=2048), profile, 1) for k in (1, 3))
    assert 2.5 * one.seconds < three.seconds < 3 * one.seconds


def test_in_micro_batches_less_is_held_than_by_a_plan() -> None:
    """Of 4 steps two hold a reduction, and all a cast that is there to the end; without them the last is highest."""
    value = lambda kind, op, nbytes, first, last: LiveValue(kind, "", op, "x", "f32", (), nbytes, first, last)
    values = (
        value("parameters", "", 10, 0, 3),
        value("moved", "_to_copy", 5, 0, 3),
        value("moved", "reduce_scatter", 8, 1, 2),
        value("kept", "mul", 4, 1, 1),
        value("gradients", "collect", 5, 3, 3),
    )
    walk = MemoryWalk((("forward", "x"),) * 4, values)
    assert as_fsdp_holds(walk, 1) == 10 + 5 + 8 + 4
    assert as_fsdp_holds(walk, 2) == 10 + 5


@pytest.mark.parametrize(("row", "block"), [(SMALL, 12 * 768**2), (LLAMA, None)])
def test_numbers_of_a_block(row: Row, block: int | None) -> None:
    if block is None:
        width, _, heads, shared, hidden = LLAMAS[row.model]
        block = 2 * width**2 + 2 * width * width * shared // heads + 3 * width * hidden
        assert other_numbers(row) == 2 * 128_256 * width
    assert block_numbers(row) == block


def test_seconds_beside_the_plan_by_hand() -> None:
    """256 tokens of width 768, 12 layers; 75 parameters; two float32 copies and two log-softmaxes of 50,432 logits."""
    compute = ComputePrices(Profile.named("h100"))
    bandwidth = Profile.named("h100").device.memory_bytes_per_second
    found = beside(SMALL, 12, compute)
    assert found["copies"] == pytest.approx(12 * 256 * 768 * (8 / 150e9 + 8 / bandwidth))
    assert found["metrics"] == pytest.approx(2 * 256 * 50_432 * 14 / bandwidth)
    assert found["padding"] == pytest.approx(12 * 36 * 6e-6)
    assert found["optimizer"] == pytest.approx(75 * 12 * 6e-6)
    again = beside(BLOCKS, 12, compute)
    assert again["copies"] == pytest.approx(12 * 256 * 768 * (12 / 150e9 + 10 / bandwidth))
    assert again["padding"] == pytest.approx(2 * found["padding"])
    assert beside(LLAMA, 12, compute) == {}
    assert beside(replace(SMALL, accumulation=3), 12, compute)["optimizer"] == pytest.approx(75 * 4 * 6e-6)


def test_matrices_are_cast_before_they_are_gathered() -> None:
    mesh = MeshSpec({"dp": 2})
    joint = captured_joint(SMALL, 1)
    layouts: dict[str, NodeLayouts] = {}
    for node in joint.placeholders:
        shape = tuple(node_value(node).shape)
        shard = (placements_to_layout([Shard(0)], shape, mesh, what=node.name),) if shape else ()
        layouts[node.name] = NodeLayouts((), shard)
    changed = as_fsdp_moves(joint, layouts)
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


@pytest.mark.slow
def test_from_two_depths() -> None:
    """A step is affine in the layers: of 2 and 3 of them as of 2 and 4, to the last bucket."""
    profile = Profile.named("h100")
    ends = [hand_step(SMALL, profile, depths).total for depths in ((1, 2), (1, 3))]
    assert ends[0] == pytest.approx(ends[1], rel=0.05)
    whole, two = by_hand(BLOCKS, profile), hand_step(BLOCKS, profile, (2, 4))
    assert two.nbytes == pytest.approx(whole.nbytes, rel=0.05) and two.total == pytest.approx(
        whole.total, rel=0.05
    )
