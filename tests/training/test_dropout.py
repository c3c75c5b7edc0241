"""Dropout on sharded ranks: replicas agree, a seed repeats the run, and losses are distributed as alone."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import ShardingError, autoshard, random_state
from autoshard.runtime.executable import SeedStream
from tests.models import seeded
from tests.profiles import slow_compute
from tests.ranks import RankPool
from tests.training.steps import Axes, alone, batches, full, train

DROPOUT = 0.2
SAMPLES = 100
STEPS = 20
FEW = 8
TWO_BY_TWO: Axes = (("dp", 2), ("tp", 2))
THREE: Axes = (("a", 3),)


def losses_on_rank(
    rank: int, name: str, axes: Axes, seed: int, again: int, steps: int
) -> list[dict[str, Any]]:
    """Training losses after `torch.manual_seed(seed)`, and the final parameters; and of training anew from the same
    start, with random numbers that start at `again`."""
    model, inputs = seeded(name, dropout=DROPOUT, layers=1)
    data = batches(inputs, steps)
    mesh = init_device_mesh("cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(a for a, _ in axes))
    torch.manual_seed(seed)
    autoshard(model, mesh, ((), data[0]), profile=slow_compute(), backend="eager")
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def trained() -> dict[str, Any]:
        losses = train(model, lambda step: model(**data[step])["loss"], steps)
        return {"losses": losses, "parameters": full(model)}

    first, stream = trained(), SeedStream()
    stream.start(again)
    model.load_state_dict(start)
    random_state(model).load_state_dict(stream.state_dict())
    assert model.autoshard_plan.collectives
    return [first, trained()]


def samples_on_rank(rank: int, name: str, axes: Axes) -> list[float]:
    """Losses of the same weights and batch under SAMPLES dropout masks."""
    model, inputs = seeded(name, dropout=DROPOUT, layers=1)
    mesh = init_device_mesh("cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(a for a, _ in axes))
    autoshard(model, mesh, ((), inputs), profile=slow_compute(), backend="eager")
    return [model(**inputs)["loss"].item() for _ in range(SAMPLES)]


def samples_alone(name: str, count: int) -> list[float]:
    model, inputs = seeded(name, dropout=DROPOUT, layers=1)
    torch.manual_seed(1)
    return [model(**inputs)["loss"].item() for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "world"),
    [
        ("llama", THREE, 3),
        pytest.param("gpt2", TWO_BY_TWO, 4, marks=pytest.mark.slow),
        pytest.param("bert", THREE, 3, marks=pytest.mark.slow),
        pytest.param("vit", TWO_BY_TWO, 4, marks=pytest.mark.slow),
    ],
)
def test_losses_are_distributed_as_alone(ranks: RankPool, name: str, axes: Axes, world: int) -> None:
    """Equal means within 4 standard errors and spreads within a third, of fresh masks on fixed weights."""
    runs = ranks.run(samples_on_rank, name, axes, world=world)
    assert all(run == runs[0] for run in runs), "the ranks' losses differ"
    got, wanted = runs[0], samples_alone(name, 4 * SAMPLES)
    error = (stdev(got) ** 2 / len(got) + stdev(wanted) ** 2 / len(wanted)) ** 0.5
    print(
        f"{name}: {mean(got):.5f} vs {mean(wanted):.5f} +- {error:.5f}; {stdev(got):.5f} vs {stdev(wanted):.5f}"
    )
    assert len(set(got)) > SAMPLES // 2, "every call should draw another mask"
    assert abs(mean(got) - mean(wanted)) < 4 * error
    assert 0.67 < stdev(got) / stdev(wanted) < 1.5


@pytest.fixture(scope="module")
def first(ranks: RankPool) -> list[list[dict[str, Any]]]:
    """GPT-2 trained on 2x2 under seed 5, twice, by rank."""
    return ranks.run(losses_on_rank, "gpt2", TWO_BY_TWO, 5, 5, STEPS, world=4)


def test_training_repeats_under_its_seed(first: list[list[dict[str, Any]]]) -> None:
    """The same seed gives the same losses and parameters to the bit, on every rank."""
    wanted = first[0][0]
    for run in (run for runs in first for run in runs):
        assert run["losses"] == wanted["losses"]
        for name, value in wanted["parameters"].items():
            assert torch.equal(value, run["parameters"][name]), name


def test_a_seed_gives_one_run_on_any_mesh(ranks: RankPool, first: list[list[dict[str, Any]]]) -> None:
    """Masks depend on the seed and the global position alone, so 3 ranks train as 2x2 do; seed 6 differs."""
    three, other = ranks.run(losses_on_rank, "gpt2", THREE, 5, 6, FEW, world=3)[0]
    wanted = torch.tensor(first[0][0]["losses"][:FEW])
    torch.testing.assert_close(torch.tensor(three["losses"]), wanted, rtol=1e-5, atol=0.0)
    assert (torch.tensor(other["losses"]) / wanted - 1).abs().max() > 1e-4


def test_training_goes_as_alone(first: list[list[dict[str, Any]]]) -> None:
    """20 steps with dropout end near where one process with dropout ends, over the last 5 losses."""
    wanted = alone("gpt2", STEPS, dropout=DROPOUT, layers=1).losses
    got = first[0][0]["losses"]
    print(f"gpt2, last 5 of 20 steps: {mean(got[-5:]):.4f} vs {mean(wanted[-5:]):.4f}")
    assert mean(got[-5:]) == pytest.approx(mean(wanted[-5:]), rel=0.02)
    assert got[-1] < got[0]


@pytest.mark.parametrize("model", [None, 3, nn.Linear, nn.Linear(2, 2)])
def test_what_is_no_parallel_model_has_no_stream(model: Any) -> None:
    with pytest.raises(ShardingError, match=r"^model is not parallel"):
        random_state(model)
