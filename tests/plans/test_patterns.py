"""The named parallelisms come out of the one search: golden text plans, and their collectives counted."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import MeshSpec, Plan, find_plan
from cost_model.memory import reserve_bytes
from passes.layout.layout import RING
from tests.golden import Golden
from tests.models import SwiGLU, TwoLinear
from tests.plans.patterns import Block, LanguageModel, OneHead, Regression
from tests.profiles import waited_for

TP4 = MeshSpec({"tp": 4}, device_type="cuda")
DP4 = MeshSpec({"dp": 4}, device_type="cuda")
DP4_TP4 = MeshSpec({"dp": 4, "tp": 4}, device_type="cuda")
H100 = waited_for("h100")


def counts(plan: Plan, phase: str) -> Counter[str]:
    return Counter(f"{c.kind}[{','.join(c.axes)}]" for c in plan.collectives if c.phase == phase)


def named(plan: Plan) -> dict[str, str]:
    """Mesh axis -> what `print(plan)` says of it."""
    lines = [line.split(maxsplit=1) for line in str(plan).replace("\n" + " " * 12, " ").splitlines()]
    return {subject: words for subject, words in lines if subject in plan.mesh.names}


def moved(plan: Plan, phase: str) -> set[tuple[str, str]]:
    """(the parameter moved, "" for an activation; "all_gather[dp]") of all collectives of more than one number."""
    names = {r.name: r.text.removeprefix("param ") for r in plan.records if r.op == "param"}
    large = [c for c in plan.collectives if c.phase == phase and c.nbytes > 4]
    return {(names.get(c.value, ""), f"{c.kind}[{','.join(c.axes)}]") for c in large}


def regression(width: int, hidden: int) -> nn.Module:
    with torch.device("meta"):
        return Regression(SwiGLU(width, hidden))


def rows(batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(batch, width), torch.empty(batch, width)


def test_data_parallel(golden: Golden) -> None:
    """Large batch, small weights: the batch is split, weights replicated, gradients all-reduced."""
    plan = find_plan(regression(256, 512), DP4, rows(65536, 256), profile=H100)
    assert all(p == (Replicate(),) for p in plan.parameters.values())
    assert counts(plan, "backward") == {"all_reduce[dp]": 3}
    golden.check(plan.to_text(seconds=False), "data_parallel.txt")
    assert named(plan) == {"dp": "DDP; batch split"}


def test_fully_sharded(golden: Golden) -> None:
    """Large weights: ZeRO-3 comes out unasked, since a rank then updates only its part of them. Gathered to
    use, again in the backward (w1 and w3 are not needed there: the input has no gradient), gradients
    reduce-scattered."""
    plan = find_plan(regression(4096, 4096), DP4, rows(65536, 4096), profile=H100)
    assert all(p == (Shard(0),) for p in plan.parameters.values())
    assert counts(plan, "forward") == {"all_gather[dp]": 3, "all_reduce[dp]": 1}
    assert counts(plan, "backward") == {"all_gather[dp]": 1, "reduce_scatter[dp]": 3}
    golden.check(plan.to_text(seconds=False), "fully_sharded.txt")
    assert named(plan) == {"dp": "FSDP; batch split"}


def test_what_hides_is_split() -> None:
    """The data parallel model again, where gathers and reductions hide behind the products: weights are split, so
    that a rank updates only its part of them. But not the first: its gather has no product to hide behind, and its
    reduction none either. The plan is faster than with all of them split, or none."""
    model, data = regression(256, 512), rows(65536, 256)
    prices = replace(H100, overlap_efficiency=1.0)
    plan = find_plan(model, DP4, data, profile=prices)
    assert list(plan.parameters.values()) == [(Replicate(),), (Shard(0),), (Shard(0),)]
    assert counts(plan, "backward")["reduce_scatter[dp]"] == 2
    waits = find_plan(model, DP4, data, profile=H100)
    assert plan.cost < waits.cost
    for placement in (Shard(0), Replicate()):
        pinned = find_plan(model, DP4, data, profile=prices, constraints={"*": [placement]})
        assert plan.step_time < pinned.step_time


def test_memory_limit_shards_what_was_replicated() -> None:
    """All weights are replicated where memory allows it, and split where it does not. Without CUDA's reserve, which is
    larger than this model."""
    model, data = regression(512, 512), rows(16384, 512)
    mesh, prices = MeshSpec({"dp": 4}), replace(H100, device_type="cpu")
    free = find_plan(model, mesh, data, profile=prices)
    assert set(free.parameters.values()) == {(Replicate(),)}
    limit = int(free.peak_memory * 0.96)
    plan = find_plan(model, mesh, data, profile=prices, memory_limit=limit)
    assert (Replicate(),) not in plan.parameters.values()
    assert plan.peak_memory <= limit
    assert plan.step_time <= 1.04 * free.step_time


def test_fully_sharded_pinned() -> None:
    """Small weights, which the search would replicate, stored split by a pin."""
    plan = find_plan(
        regression(256, 512), DP4, rows(65536, 256), profile=H100, constraints={"body.*": [Shard(0)]}
    )
    assert counts(plan, "forward")["all_gather[dp]"] == 3
    assert counts(plan, "backward") == {"all_gather[dp]": 1, "reduce_scatter[dp]": 3}


def test_column_then_row(golden: Golden) -> None:
    """Few rows, large weights: w1 and w3 by columns, w2 by rows, one all-reduce."""
    plan = find_plan(regression(4096, 16384), TP4, rows(128, 4096), profile=H100)
    assert plan.parameters["body.w1.weight"] == (Shard(0),)
    assert plan.parameters["body.w3.weight"] == (Shard(0),)
    assert plan.parameters["body.w2.weight"] == (Shard(1),)
    assert moved(plan, "forward") == {("", "all_reduce[tp]")}
    golden.check(plan.to_text(seconds=False), "column_then_row.txt")
    assert named(plan) == {"tp": "tensor parallel"}


def test_megatron_sequence_parallel(golden: Golden) -> None:
    """A transformer block with dropout, nothing pinned: products are split over tp; norm, dropout and residual
    on the sequence; each all-reduce of the branches is a reduce-scatter, and an all-gather before the next."""
    with torch.device("meta"):
        model = Regression(nn.Sequential(Block(4096, 32, 0.1)))
    x = torch.empty(1, 4096, 4096, device="meta")
    plan = find_plan(model, TP4, (x, x), profile=H100)
    column, row = (Shard(0),), (Shard(1),)
    for name, split in {
        "attention.w[qkv]": column,
        "attention.wo": row,
        "mlp.w[13]": column,
        "mlp.w2": row,
    }.items():
        found = [p for n, p in plan.parameters.items() if re.fullmatch(rf"body.0.{name}.weight", n)]
        assert found and set(found) == {split}
    whole = [c for c in plan.collectives if c.phase == "forward" and c.nbytes >= 4096 * 4096 * 4]
    assert [c.kind for c in whole] == ["reduce_scatter", "all_gather", "reduce_scatter"]
    golden.check(plan.to_text(seconds=False), "megatron_sequence_parallel.txt")
    assert named(plan) == {"tp": "tensor parallel with sequence parallelism"}


def test_context_parallel(golden: Golden) -> None:
    """One long sequence of one head, of whose tokens each rank has a part: keys and values pass by all ranks."""
    with torch.device("meta"):
        model = Regression(OneHead(width=128))
    parts = tuple(torch.empty(1, 2**14, 128, device="meta") for _ in range(2))
    here = ((Shard(1),), (Shard(1),))
    plan = find_plan(model, MeshSpec({"cp": 4}, device_type="cuda"), parts, profile=H100, in_placements=here)
    attentions = [record for record in plan.records if record.name.startswith("attention")]
    assert [[split.factor for split in record.splits] for record in attentions] == [[RING], [RING]]
    assert not moved(plan, "forward")
    golden.check(plan.to_text(seconds=False), "context_parallel.txt")
    assert named(plan) == {"cp": "context parallel; sequence split; ring attention"}


def test_vocabulary_parallel(golden: Golden) -> None:
    """Head and loss split over the vocabulary: of the loss only maxima, sums and picked logits are reduced.
    The embedding is split over its features: two rows of tokens are cheap to gather."""
    with torch.device("meta"):
        model = LanguageModel(131072, 1024, nn.Identity())
    tokens = torch.zeros(2, 512, dtype=torch.int64)
    plan = find_plan(model, TP4, (tokens, tokens), profile=H100)
    assert plan.parameters["embedding.weight"] == (Shard(1),)
    assert plan.parameters["head.weight"] == (Shard(0),)
    golden.check(plan.to_text(seconds=False), "vocabulary_parallel.txt")
    assert named(plan) == {"tp": "tensor parallel"}


def test_fsdp_of_tp_on_two_axes(golden: Golden) -> None:
    """dp of 4 nodes, tp of 4 GPUs, many rows: the batch is split over dp, features over tp, and weights over both.
    Each is gathered over dp to use, and its gradient reduce-scattered over dp; over tp only activations travel.
    There is room for one weight that is whole over dp: w2, which the peak of the program lies behind."""
    plan = find_plan(
        regression(8192, 28672),
        DP4_TP4,
        rows(131072, 8192),
        profile=H100,
        memory_limit=14_500_000_000 + reserve_bytes(DP4_TP4),
        recompute="user",  # else silu runs again, and there is room
    )
    assert {name: str(layout) for name, layout in plan.parameter_layouts.items()} == {
        "body.w1.weight": "[@tp@dp, -]",
        "body.w2.weight": "[-, @tp]",
        "body.w3.weight": "[@tp@dp, -]",
    }
    assert {str(plan.planned.layouts[name].results[0]) for name in ("contract", "contract_1", "mul")} == {
        "[@dp, @tp]"
    }
    assert str(plan.planned.layouts["contract_2"].results[0]) == "[@dp, -]+tp:sum"
    assert moved(plan, "forward") == {
        ("body.w1.weight", "all_gather[dp]"),
        ("body.w3.weight", "all_gather[dp]"),
        ("", "reduce_scatter[tp]"),
    }
    assert counts(plan, "backward") == {"all_gather[tp]": 1, "all_reduce[dp]": 1, "reduce_scatter[dp]": 2}
    golden.check(plan.to_text(seconds=False), "fsdp_of_tp.txt")
    assert named(plan) == {"dp": "FSDP of 67% of the weights; batch split", "tp": "tensor parallel"}


def test_tensor_parallel_over_two_axes(golden: Golden) -> None:
    """Fewer rows: the same weights are cheapest never to move. Features are split over all ranks, no batch is."""
    plan = find_plan(
        regression(8192, 28672),
        DP4_TP4,
        rows(16384, 8192),
        profile=H100,
        memory_limit=int(3 * 8192 * 28672 * 16 / 12) + 2_000_000_000 + reserve_bytes(DP4_TP4),
    )
    assert {str(plan.planned.layouts[name].results[0]) for name in ("contract", "contract_1", "mul")} == {
        "[-, @dp@tp]"
    }
    assert moved(plan, "forward") == {("", "reduce_scatter[dp,tp]")}
    assert counts(plan, "backward") == {"all_gather[dp,tp]": 1}
    golden.check(plan.to_text(seconds=False), "tensor_parallel_two_axes.txt")
    assert named(plan) == {"dp": "tensor parallel", "tp": "tensor parallel"}


def test_two_linear_on_three_ranks(golden: Golden) -> None:
    """Pinned column, then row, with a sharded batch in and out: one all-gather, one reduce-scatter."""
    mesh = MeshSpec({"tp": 3})
    plan = find_plan(
        TwoLinear(),
        mesh,
        (torch.randn(2, 10),),
        profile="cpu",
        in_placements=[Shard(0)],
        out_placements=[Shard(0)],
        constraints={"up.weight": [Shard(0)], "up.bias": [Shard(0)], "down.weight": [Shard(1)]},
    )
    assert counts(plan, "forward") == {"all_gather[tp]": 1, "reduce_scatter[tp]": 1}
    assert plan.parameter_layouts["up.weight"].split_sizes((32, 10), mesh, 0) == (11, 11, 10)
    golden.check(plan.to_text(seconds=False), "two_linear.txt")


def test_an_axis_of_one_device_changes_nothing() -> None:
    plan = find_plan(regression(64, 64), MeshSpec({"dp": 1}), rows(8, 64), profile="cpu")
    assert plan.collectives == ()
