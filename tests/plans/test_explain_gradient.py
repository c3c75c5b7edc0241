"""What a plan says of how gradients are reduced.

Collectives and bytes are by hand. A sum that is pending over an axis is all-reduced where the parameter is whole over
it, and reduce-scattered where it is split. Both are priced by the numbers that a rank has before.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import MeshSpec, Plan, PlanError, find_plan
from autoshard.planning import canonical_capture
from tests.models import TwoLinear
from tests.plans.patterns import Block, Regression
from tests.plans.pipelines import PP, planned
from tests.plans.test_patterns import DP4, DP4_TP4, H100, TP4, regression, rows

WHOLE, COLUMN = [Replicate()], [Shard(0)]


def data_parallel(pin: Any, **options: Any) -> Plan:
    return find_plan(
        regression(256, 512), DP4, rows(65536, 256), profile=H100, constraints={"*": pin}, **options
    )


def said(plan: Plan, name: str) -> tuple[str, ...]:
    """What `explain` has of a gradient."""
    lines = [line.strip() for line in plan.explain(name).splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith(("gradient", "no gradient")))
    return tuple(lines[start:])


def test_all_reduced_where_the_parameter_is_whole() -> None:
    """512 x 256 numbers of 4 bytes: 524288. A bucket of three waits for nothing."""
    plan = data_parallel(WHOLE)
    gradient, why = said(plan, "body.w1.weight")
    assert "f32[512, 256]+dp:sum, through all_reduce[dp](): 524.3KB, " in gradient
    assert why.endswith(
        "sums over what dp splits, and the parameter is whole over dp: each rank needs all of it"
    )
    # The only collectives of the step are that of the loss and this one.
    (moved,) = (m for part in plan.ran for m in part.moved if m.nbytes > 4)
    assert "more in a bucket of 3 that is exposed for " in gradient
    assert float(gradient.rsplit(" ", 2)[1]) == pytest.approx(1e6 * moved.exposed, rel=0.01)
    assert gradient.endswith(" us")


def test_reduce_scattered_where_it_is_split() -> None:
    gradient, why = said(data_parallel(COLUMN), "body.w1.weight")
    assert "f32[512, 256]+dp:sum, through reduce_scatter[dp](dim=0): 524.3KB, " in gradient
    assert why.endswith("sums over what dp splits, and dp splits the parameter: each rank keeps its part")


def test_once_for_all_pieces() -> None:
    """The same bytes: pieces are added up before."""
    gradient, _ = said(data_parallel(WHOLE, micro_batches=4), "body.w1.weight")
    assert "f32[512, 256]+dp:sum, through all_reduce[dp](): 524.3KB, " in gradient
    assert gradient.endswith(", once, after the pieces")


def test_in_each_piece() -> None:
    """Turns of the backward of a piece begin with 2."""
    plan = data_parallel(WHOLE, micro_batches=4)
    end = plan.records[-1]
    inside = tuple(structs.replace(read, turn=read.turn and (2, 9)) for read in end.operands)
    moved = replace(plan, records=(*plan.records[:-1], structs.replace(end, operands=inside)))
    gradient, _ = said(moved, "body.w1.weight")
    assert gradient.endswith(", in each piece")
    assert "exposed" not in gradient  # of no turn that the timeline has


def test_not_reduced_where_each_rank_has_its_own() -> None:
    plan = find_plan(regression(4096, 16384), TP4, rows(128, 4096), profile=H100)
    for name, value in (("body.w1.weight", "f32[16384@tp, 4096]"), ("body.w2.weight", "f32[4096, 16384@tp]")):
        gradient, why = said(plan, name)
        assert gradient.endswith(f": {value}, as it is")
        assert why == "the gradient is computed in parts over tp, and so is the parameter"


def test_tensor_parallel_with_sequence_parallelism() -> None:
    """A norm's weight is whole and its rows are not: 4096 numbers of 4 bytes."""
    with torch.device("meta"):
        model = Regression(nn.Sequential(Block(4096, 32, 0.1)))
    x = torch.empty(1, 4096, 4096, device="meta")
    plan = find_plan(model, TP4, (x, x), profile=H100)
    gradient, why = said(plan, "body.0.norm2.weight")
    assert "f32[4096]+tp:sum, through all_reduce[tp](): 16.38KB, " in gradient
    assert why.endswith("over what tp splits, and the parameter is whole over tp: each rank needs all of it")
    # What the three projections leave is not reduced before the norm.
    _, why = said(plan, "body.0.norm1.weight")
    assert re.match(r"%contract_\d+, %contract_\d+ and 1 more sum over what tp splits, and", why)
    gradient, _ = said(plan, "body.0.attention.wo.weight")
    assert gradient.endswith(": f32[4096, 4096@tp], as it is")


def test_fsdp_of_tensor_parallel() -> None:
    """Over tp a rank has 4096 of 16384 rows of 4096 numbers: 67108864 bytes, of which it keeps a part over dp."""
    pins = {"body.w[13].weight": [Shard(0), Shard(0)], "body.w2.weight": [Replicate(), Shard(1)]}
    plan = find_plan(regression(4096, 16384), DP4_TP4, rows(65536, 4096), profile=H100, constraints=pins)
    gradient, why = said(plan, "body.w1.weight")
    assert "through reduce_scatter[dp](dim=0): 67.11MB, " in gradient
    first, second = why.split("; ")
    assert first.endswith("sums over what dp splits, and dp splits the parameter: each rank keeps its part")
    assert second == "the gradient is computed in parts over tp, and so is the parameter"
    gradient, _ = said(plan, "body.w2.weight")
    assert "f32[4096, 16384@tp]+dp:sum, through all_reduce[dp](): 67.11MB, " in gradient


def test_ranks_that_do_the_same() -> None:
    """Two rows: nothing is worth a collective."""
    plan = find_plan(
        Regression(TwoLinear()),
        MeshSpec({"dp": 2}),
        (torch.ones(2, 10), torch.ones(2, 5)),
        profile="cpu",
        constraints={"*": WHOLE},
    )
    assert said(plan, "body.up.weight")[-1] == "over dp each rank sums over all"


def test_of_stages() -> None:
    plan = planned("gpt2", PP, 2, "1f1b")
    for name in ("transformer.wte.weight", "lm_head.weight"):
        text = plan.explain(name)
        assert text.count("one rank computes all of it") == 2
        assert text.endswith(
            "held at pp=0, 1: an all_reduce[pp] adds up its gradients at the end, not priced\n"
        )
    assert "held at" not in plan.explain("transformer.wpe.weight")


def test_what_is_not_trained_has_none() -> None:
    model = Regression(TwoLinear())
    model.get_parameter("body.up.weight").requires_grad_(False)
    given = torch.ones(2, 10), torch.ones(2, 5)
    plan = find_plan(model, MeshSpec({"dp": 2}), given, profile="cpu")
    assert said(plan, "body.up.weight") == ("no gradient",)
    with torch.no_grad():
        forward = find_plan(model, MeshSpec({"dp": 2}), given, profile="cpu")
    assert "gradient" not in forward.explain("body.up.weight")


def test_a_cast_is_looked_through() -> None:
    """Products in bf16: 512 x 256 numbers of 2 bytes are reduced, and cast to the parameter's dtype."""
    gradient, why = said(data_parallel(WHOLE, autocast=torch.bfloat16), "body.w1.weight")
    assert "bf16[512, 256]+dp:sum, through all_reduce[dp](): 262.1KB, " in gradient
    assert why.endswith(
        "sums over what dp splits, and the parameter is whole over dp: each rank needs all of it"
    )


def test_two_uses_of_a_parameter() -> None:
    """Both products sum over the rows."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(512, 512, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.relu(self.layer(x)))

    with torch.device("meta"):
        model = Regression(Twice())
    plan = find_plan(model, DP4, rows(65536, 512), profile=H100, constraints={"*": WHOLE})
    *moved, why = said(plan, "body.layer.weight")
    assert all("f32[512, 512]+dp:sum, through all_reduce[dp](): 1.049MB, " in line for line in moved)
    assert re.match(r"%contract_\d, %contract_\d sum over what dp splits, and the parameter is whole", why)


def test_an_older_file_is_read_and_names_none() -> None:
    data = data_parallel(WHOLE).to_json()
    assert data["nodes"][-1].pop("ends")
    older = Plan.from_json(json.loads(json.dumps(data)))
    assert said(older, "body.w1.weight") == (
        "gradient not named: the plan is of an earlier version; find_plan(...) names it",
    )


def test_wrong_names_are_found() -> None:
    model, given = Regression(TwoLinear()), (torch.ones(2, 10), torch.ones(2, 5))
    data = find_plan(model, MeshSpec({"dp": 2}), given, profile="cpu").to_json()
    ends = data["nodes"][-1]["ends"]
    assert ends[:2] == ["output 0", "grad body.up.weight"]
    swapped = [*ends[:1], ends[2], ends[1], *ends[3:]]
    data["nodes"][-1]["ends"] = swapped
    joint = canonical_capture(model, given, {}).joint
    with pytest.raises(PlanError, match="and not what the model returns"):
        Plan.from_json(data).check_graph(joint)
    data["nodes"][-1]["ends"] = ends[1:]
    with pytest.raises(PlanError, match="names 4 ends"):
        Plan.from_json(data)
