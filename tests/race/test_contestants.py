"""Every contestant trains the same: losses of the first steps against one process, on four ranks."""

from __future__ import annotations

import pytest
import torch

from benchmarks.racing.contestants import HAND_WRITTEN, PINNED, Meshes, Race, alone, planned
from benchmarks.racing.measure import timed_rounds, warm_up
from benchmarks.racing.scenarios import FABRICS, SCENARIOS
from benchmarks.racing.workloads import Workload, convnet, gpt, mlp, words
from tests.ranks import RankPool

STEPS = 3
SMALL = {
    "gpt": lambda: gpt(32, 8, 32, 1, 4, head=8),
    "words": lambda: words(32, 16, 32, 4, 4),
    "convnet": lambda: convnet(4, 8, 16, 8, 8),
}


def meshes() -> Meshes:
    from torch.distributed.device_mesh import init_device_mesh

    return Meshes(
        init_device_mesh("cpu", (4,), mesh_dim_names=("ranks",)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    )


def race_of(name: str) -> Race:
    return Race(SMALL[name](), meshes(), "cpu", "eager", None)


def hand_written_losses(rank: int, name: str) -> dict[str, list[float]]:
    race = race_of(name)
    builds = {
        kind: build
        for kind, build in HAND_WRITTEN.items()
        if kind != "TP + SP" or race.workload.sequence is not None
    }
    runners = {kind: build(race) for kind, build in builds.items()}
    losses = {kind: warm_up(runner, STEPS) for kind, runner in runners.items()}
    for taken in timed_rounds(runners, 2).values():
        assert len(taken.seconds) == len(taken.cpu_seconds) == 2
        assert min(taken.seconds + taken.cpu_seconds) > 0.0
    return losses


def planned_losses(rank: int, name: str) -> dict[str, list[float]]:
    race = race_of(name)
    runners = {
        "own": planned(race),
        **{kind: planned(race, pins(race.workload)) for kind, pins in PINNED.items()},
    }
    return {kind: warm_up(runner, STEPS) for kind, runner in runners.items()}


def expected(name: str) -> list[float]:
    workload: Workload = SMALL[name]()
    race = Race(workload, None, "cpu", "eager", None)  # type: ignore[arg-type]
    runner = alone(race)
    return [runner.step().item() for _ in range(STEPS)]


@pytest.mark.parametrize("name", SMALL)
def test_what_users_write_trains_the_same(ranks: RankPool, name: str) -> None:
    for losses in ranks.run(hand_written_losses, name):
        for kind, mine in losses.items():
            assert mine == pytest.approx(expected(name), rel=1e-5), kind


@pytest.mark.parametrize("name", ["convnet"])
def test_plans_train_the_same(ranks: RankPool, name: str) -> None:
    for losses in ranks.run(planned_losses, name):
        for kind, mine in losses.items():
            assert mine == pytest.approx(expected(name), rel=1e-5), kind


def test_state_is_counted_per_rank() -> None:
    race = Race(mlp(4, 8, 1, 2), None, "cpu", "eager", None)  # type: ignore[arg-type]
    runner = alone(race)
    runner.step()
    weights = 4 * 8 + 8 + 8 * 4 + 4
    # Weights, gradients, two moments; and AdamW's step count of each of the four parameters.
    assert runner.state_bytes() == 4 * (4 * weights + 4)


@pytest.mark.parametrize("name", SCENARIOS)
def test_batches_divide_by_the_ranks(name: str) -> None:
    scenario = SCENARIOS[name]
    fabric = FABRICS[scenario.fabric]
    assert fabric.hosts * fabric.ranks == 4
    assert all(
        isinstance(part, torch.Tensor) and part.shape[0] % 4 == 0 for part in scenario.workload.batch()
    )
