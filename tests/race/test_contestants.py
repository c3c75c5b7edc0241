"""Every contestant trains the same: losses of the first steps against one process, on four ranks."""

from __future__ import annotations

import pytest

from benchmarks.racing.by_hand import HAND_WRITTEN, setting_text
from benchmarks.racing.contestants import PINNED, Meshes, Race, alone, planned
from benchmarks.racing.measure import Taken, timed_rounds, warm_up
from benchmarks.racing.more_workloads import llama, mixture, unet, vit
from benchmarks.racing.scenarios import FABRICS, SCENARIOS
from benchmarks.racing.tuning import best_setting, tuned
from benchmarks.racing.workloads import Workload, convnet, gpt, mlp, words
from tests.ranks import RankPool

STEPS = 3
SMALL = {
    "gpt": lambda: gpt(32, 8, 32, 1, 4, head=8),
    "words": lambda: words(32, 16, 32, 4, 4),
    "convnet": lambda: convnet(4, 8, 16, 8, 8),
    "vit": lambda: vit(8, 2, 32, 2, 4, head=8, classes=8),
    "llama": lambda: llama(32, 8, 64, 1, 4, head=8, shared=2),
    "mixture": lambda: mixture(32, 8, 32, 2, 4, experts=4, hidden=16, head=8),
    "unet": lambda: unet(8, 2, 32),
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
    """By the way and its setting."""
    race = race_of(name)
    runners = {
        f"{kind} {setting_text(setting)}": by_hand.build(race, setting)
        for kind, by_hand in HAND_WRITTEN.items()
        if by_hand.runs(race.workload)
        for setting in by_hand.settings(race)
    }
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
        "raced": planned(race, raced=2),
    }
    return {kind: warm_up(runner, STEPS) for kind, runner in runners.items()}


def expected(name: str) -> list[float]:
    workload: Workload = SMALL[name]()
    race = Race(workload, None, "cpu", "eager", None)  # type: ignore[arg-type]
    runner = alone(race)
    return [runner.step().item() for _ in range(STEPS)]


IN_CI = {"convnet", "unet"}
"""Every way, and models in space."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.slow]) for name in SMALL]
)
def test_what_users_write_trains_the_same(ranks: RankPool, name: str) -> None:
    for losses in ranks.run(hand_written_losses, name):
        for kind, mine in losses.items():
            assert mine == pytest.approx(expected(name), rel=1e-5), kind


WAYS = {
    "gpt": {"DDP", "FSDP2", "HSDP", "TP", "TP + SP", "FSDP2 x TP"},
    "convnet": {"DDP", "FSDP2", "HSDP", "TP", "FSDP2 x TP"},
    "unet": {"space"},
}


@pytest.mark.parametrize("name", WAYS)
def test_who_takes_part(name: str) -> None:
    workload = SMALL[name]()
    assert {kind for kind, by_hand in HAND_WRITTEN.items() if by_hand.runs(workload)} == WAYS[name]


def found_settings(rank: int) -> tuple[str, list[str], list[float], int]:
    race = race_of("convnet")
    found = tuned(HAND_WRITTEN["DDP"], race, STEPS)
    assert found.tried[found.setting] == min(found.tried.values())
    return found.setting, list(found.tried), list(found.losses), len(warm_up(found.runner, 1))


def test_the_fastest_setting_races(ranks: RankPool) -> None:
    replies = ranks.run(found_settings)
    assert len({reply[0] for reply in replies}) == 1
    assert replies[0][1] == [f"bucket_cap_mb={mb}" for mb in (1, 5, 25, 100)]
    assert replies[0][2] == pytest.approx(expected("convnet"), rel=1e-5)


def test_the_best_setting_is_of_the_least_median() -> None:
    slow, fast = Taken((1.0, 9.0, 3.0), ()), Taken((5.0, 2.0, 2.0), ())
    assert best_setting({"slow": slow, "fast": fast}) == "fast"


@pytest.mark.slow
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
    rows = {part.shape[0] for part in scenario.workload.batch()}
    assert scenario.workload.slices == all(count % 4 == 0 for count in rows)


def test_there_are_fifteen() -> None:
    assert len(SCENARIOS) == 15
