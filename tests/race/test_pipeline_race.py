"""Every contestant of benchmarks/pipeline_race.py trains the same: losses of the first steps against one process."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from autoshard import Profile
from benchmarks.pipeline_race import table
from benchmarks.racing.contestants import Meshes, Race
from benchmarks.racing.stage_worker import AUTO, add_options, measured
from benchmarks.racing.workloads import Workload, gpt, mlp
from tests.ranks import RankPool

SMALL = {"mlp": lambda: mlp(12, 20, 4, 16), "gpt": lambda: gpt(32, 8, 32, 4, 8, head=8)}
DP, TP = "torch pipelining x DP", "torch pipelining x TP"
OTHERS = {"autoshard, no stages", "DDP", "TP"}


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args([*words, "--rounds", "2", "--pieces", "4"])


def raced(rank: int, name: str, hosts: int, *words: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    workload: Workload = SMALL[name]()
    shape, names = ((4,), ("hosts",)) if hosts == 4 else ((2, 2), ("hosts", "ranks"))
    meshes = Meshes(
        init_device_mesh("cpu", (4,), mesh_dim_names=("ranks",)),
        init_device_mesh("cpu", shape, mesh_dim_names=names),
    )
    return measured(Race(workload, meshes, Profile.named("cpu"), "eager", None), options(*words))


@pytest.mark.parametrize(
    ("name", "hosts", "words", "by_hand"),
    [
        ("mlp", 4, ("--schedule", "1f1b"), {"torch pipelining"}),
        ("mlp", 2, ("--schedule", "gpipe"), {DP, TP}),
        ("gpt", 2, ("--schedule", "zero_bubble", "--only", DP), {DP}),
        ("mlp", 2, ("--schedule", "interleaved"), {DP, TP}),
    ],
)
@pytest.mark.slow
def test_all_train_the_same(
    ranks: RankPool, name: str, hosts: int, words: tuple[str, ...], by_hand: set[str]
) -> None:
    result = ranks.run(raced, name, hosts, *words)[0]
    rows = {row["name"]: row for row in result["rows"]}
    expected = by_hand | (set() if "--only" in words else OTHERS)
    assert {one for one in rows if not one.startswith("autoshard, stages")} == expected
    assert AUTO in rows
    for row in rows.values():
        assert row["losses"] == pytest.approx(result["reference"], rel=1e-5), row["name"]
        assert len(row["seconds"]) == 2
    for one in by_hand | {row["name"] for row in rows.values() if row["kind"] == "stages"}:
        # Some time is spent in stages, and no more than there is.
        assert 0.0 < rows[one]["bubble"] < 1.0, one


def test_table() -> None:
    rows = [
        {
            "name": AUTO,
            "seconds": [0.1, 0.2, 0.3],
            "cpu": 0.4,
            "state": 2e6,
            "losses": [2.0],
            "plan": "2 stages",
        }
        | {"predicted": 0.15, "modelled": 0.12, "bubble": 0.25, "predicted_bubble": 0.3},
        {"name": DP, "seconds": [0.25, 0.25, 0.25], "cpu": 0.5, "state": 4e6, "losses": [2.0]},
        {"name": TP, "seconds": [0.4, 0.4, 0.4], "cpu": 0.5, "state": 4e6, "losses": [2.02]},
    ]
    result = {"workload": "MLP", "load": 1.5, "reference": [2.0], "rows": rows}
    text = "\n".join(table(result, "4 hosts"))
    assert (
        f"| {AUTO} | 200 ms | 100, 300 | 0.80 | 400 ms | 120 ms | 150 ms | -25% | 0.25 | 0.30 | 2 MB |\n"
        f"| {DP} | 250 ms | 250, 250 | 1.00 | 500 ms |  |  |  |  |  | 4 MB |\n"
        f"| {TP} | 400 ms | 400, 400 | 1.60 | 500 ms |  |  |  |  |  | 4 MB |\n"
    ) in text
    assert "load before 1.5" in text and "from one process: 1e-02" in text
