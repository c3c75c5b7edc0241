"""What a plan says of other sizes: what a plan found there says, and where arithmetic has another win."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import CaptureError, InfeasibleError, MeshSpec, Plan, PlanError, ShardingError, find_plan
from tests.plans.test_crossovers import COMPUTE, SIDE, START, Product, profile
from tests.profiles import slow_compute

MESH = MeshSpec({"x": 2, "y": 2})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.down(self.up(x).relu())
        return (x if mask is None else mask @ x).pow(2).mean()


def call(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, tokens, 64), torch.zeros(tokens, tokens)


MODEL = Net()


def found(inputs: Any, **options: Any) -> Plan:
    return find_plan(MODEL, MESH, inputs, profile=slow_compute(), **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"memory_limit": "300kB"}, {"micro_batches": 2}, {"stages": "y", "micro_batches": 2}],
    ids=str,
)
def test_at_its_own_sizes_it_is_what_it_was(options: dict[str, Any]) -> None:
    plan = found((torch.zeros(8, 16, 64),), **options)
    for there in (plan.at(), plan.at(sequence=16, batch=8)):
        assert (there.step_time, there.peak_memory) == (plan.step_time, plan.peak_memory)
        assert there.parameter_layouts == plan.parameter_layouts


@pytest.mark.parametrize("sizes", [(8, 32), (16, 16), (2, 4), (3, 5)], ids=str)
def test_elsewhere_it_is_what_a_plan_found_there_says(sizes: tuple[int, int]) -> None:
    """One whose layouts are the same: parameters as they are, and rows of the input split alike."""
    rows = {"in_placements": [[Shard(0)] * 2, [Replicate()] * 2]}
    x, mask = call(*sizes)
    plan = found((torch.zeros(2, 16, 64), torch.zeros(16, 16)), **rows)  # a rank's part of 8
    there = plan.at(batch=sizes[0], sequence=sizes[1])
    pinned = {name: list(placed) for name, placed in plan.parameters.items()}
    if sizes[0] % 4:  # global, since parts that differ are not given by one rank
        assert there.step_time > 0.0
        return
    same = found((x[: sizes[0] // 4], mask), constraints=pinned, **rows)
    assert same.parameter_layouts == plan.parameter_layouts
    assert there.step_time == plan.step_time_at(batch=sizes[0], sequence=sizes[1])
    assert there.step_time == pytest.approx(same.step_time, rel=1e-9)
    assert plan.memory_at(batch=sizes[0], sequence=sizes[1]) == same.peak_memory


def test_where_another_plan_wins() -> None:
    """Of n times `SIDE` rows a product takes n; split a half, with a gather 3/4 n + 1/4, in units of `COMPUTE`: more
    than `SIDE` rows are split, fewer are not."""
    prices = profile(4 * SIDE * SIDE / 2 / (COMPUTE / 4))
    (link,) = prices.links
    prices = replace(prices, links=(replace(link, latency_seconds=COMPUTE / 4 - START / 2),))
    for rows, smaller in ((SIDE // 4, False), (4 * SIDE, True)):
        asked = {"sizes": {"batch": (2, 1024)}} if smaller else {}
        plan = find_plan(Product(), MeshSpec({"x": 2}), (torch.zeros(rows, SIDE),), profile=prices, **asked)
        assert bool(plan.collectives) == smaller
        (won,) = plan.size_crossovers(batch=(2, 1024))
        assert won.confirmed and won.now == rows and abs(won.size - SIDE) <= 2
        assert won.step_time == pytest.approx(won.size / SIDE * COMPUTE, rel=1e-2)
        assert f"batch (now {rows}) of {won.size} or {'less' if smaller else 'more'}, " in str(won)
        assert plan.size_crossovers(batch=(rows, rows)) == ()
        if asked:
            assert f"batch 2 to 1024, one at a time, searched again\n  {won}\n" in plan.explain(
                crossovers=True
            )


def test_what_cannot_be_asked_is_said(tmp_path: Path) -> None:
    plan = found((torch.zeros(8, 16, 64),), stages="y", micro_batches=2)
    with pytest.raises(ShardingError, match=r"name 'height'.*\n  try: 'batch' or 'sequence'"):
        plan.step_time_at(height=3)
    with pytest.raises(PlanError, match=r"at\(\.\.\.\) captures the call.*of a stage"):
        plan.stages[0].step_time_at(batch=4)
    with pytest.raises(PlanError, match="not there for plans with stages"):
        plan.size_crossovers(batch=(1, 8))
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="loaded or unpickled"):
        Plan.load(tmp_path / "plan.json").step_time_at(batch=4)


def test_a_model_that_has_changed_is_said() -> None:
    model = Net()
    plan = find_plan(model, MESH, call(8, 16), profile=slow_compute())
    with pytest.raises(ShardingError, match=r"the range of 'batch' is \(0, 8\)"):
        plan.size_crossovers(batch=(0, 8))
    model.up.weight.requires_grad_(False)
    with pytest.raises(PlanError, match="not as when the plan was found"):
        plan.step_time_at(batch=4)
    model.up.weight.requires_grad_(True)
    with torch.no_grad():  # gradients are as when it was found
        assert plan.step_time_at(batch=8) == plan.step_time


def test_a_plan_fits_at_the_largest_size_asked() -> None:
    """Of a row every rank computes all; of many that is four times what a rank of rows split holds."""
    given = (torch.zeros(1, 1, 64),)
    free = found(given)
    most = free.memory_at(sequence=512)
    asked = {"sequence": (1, 512)}
    assert found(given, memory_limit=most + free.reserve, sizes=asked).parameters == free.parameters
    tight = found(given, memory_limit=most // 2, sizes=asked)
    assert tight.memory_limit == most // 2 and tight.memory_at(sequence=512) <= most // 2
    with pytest.raises(InfeasibleError, match="at sequence 512: no plan"):
        found(given, memory_limit=most // 8, sizes=asked)
    with pytest.raises(ShardingError, match="sizes is 512"):
        found(given, sizes=512)


def test_a_size_that_weights_fix_is_named() -> None:
    features = (torch.zeros(8, 64),)
    plan = found(features)
    for ask in (
        lambda: plan.step_time_at(sequence=32),
        lambda: found(features, sizes={"sequence": (1, 32)}, memory_limit="1GB"),
    ):
        with pytest.raises(CaptureError) as caught:
            ask()
        text = str(caught.value)
        assert text.startswith(
            "at other sizes the call's tensors would be (8, 32), which the model does not take\n"
        )
        assert text.count("\n  try: ") == 1 and "sizes without the name of a dim that weights fix" in text
    assert found(features, sizes={"batch": (1, 32)}, memory_limit="1GB").parameters
