"""The two-linear toy on 3 ranks: sharded batch in and out, weights pinned column-wise, then row-wise."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from autoshard import autoshard
from tests.models import TwoLinear
from tests.ranks import RankPool
from tests.training.steps import Run, full, train

STEPS = 20
ROWS = 6
PINS = {"up.weight": [Shard(0)], "up.bias": [Shard(0)], "down.weight": [Shard(1)]}


def example() -> tuple[TwoLinear, list[Tensor], list[Tensor]]:
    """The model, and inputs [ROWS, 10] and targets [ROWS, 5] of every step."""
    torch.manual_seed(0)
    model = TwoLinear()
    inputs = [torch.randn(ROWS, 10) for _ in range(STEPS)]
    return model, inputs, [torch.randn(ROWS, 5) for _ in range(STEPS)]


def alone() -> Run:
    model, inputs, targets = example()
    losses = train(model, lambda step: (model(inputs[step]) - targets[step]).square().sum(), STEPS)
    return Run(losses, full(model))


def on_rank(rank: int, backend: str) -> Run:
    """This rank's losses: the sum over its own rows, so that the global loss is the sum over ranks."""
    model, inputs, targets = example()
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    mine = slice(2 * rank, 2 * rank + 2)
    autoshard(
        model,
        mesh,
        (inputs[0][mine],),
        profile="cpu",
        in_placements=[Shard(0)],
        out_placements=[Shard(0)],
        constraints=PINS,
        backend=backend,
    )

    def loss(step: int) -> Tensor:
        out = model(inputs[step][mine])
        assert type(out) is Tensor and out.shape == (2, 5)
        return (out - targets[step][mine]).square().sum()

    losses = train(model, loss, STEPS)
    return Run(losses, full(model), _facts(model))


def _facts(model: TwoLinear) -> dict[str, Any]:
    plan = model.autoshard_plan
    return {
        "shapes": {
            n: tuple(p.to_local().shape) for n, p in model.named_parameters() if isinstance(p, DTensor)
        },
        "forward": Counter(c.kind for c in plan.collectives if c.phase == "forward"),
    }


def _check(runs: list[Run]) -> None:
    wanted = alone()
    losses = [sum(parts) for parts in zip(*(run.losses for run in runs), strict=True)]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted.losses), rtol=1e-5, atol=0.0)
    for run in runs:
        torch.testing.assert_close(dict(run.parameters), dict(wanted.parameters), rtol=0.0, atol=1e-4)
    worst = max(abs(a - b) / b for a, b in zip(losses, wanted.losses, strict=True))
    print(f"two-linear on 3: loss {worst:.1e}")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_training_matches_one_process(ranks: RankPool, backend: str) -> None:
    """32 hidden units over 3 ranks are 11, 11, 10; forward moves x once and y once."""
    runs = ranks.run(on_rank, backend, world=3)
    _check(runs)
    shapes = [run.info["shapes"] for run in runs]
    assert [s["up.weight"] for s in shapes] == [(11, 10), (11, 10), (10, 10)]
    assert [s["up.bias"] for s in shapes] == [(11,), (11,), (10,)]
    assert [s["down.weight"] for s in shapes] == [(5, 11), (5, 11), (5, 10)]
    for run in runs:
        assert run.info["forward"] == {"all_gather": 1, "reduce_scatter": 1}
