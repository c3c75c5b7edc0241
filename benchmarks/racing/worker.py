"""One rank of one scenario: started on the cluster by benchmarks/race.py, which says in a file what to do.

torchrun ... -m benchmarks.racing.worker race --scenario wide-fast --profile fast.json --out result.json
torchrun ... -m benchmarks.racing.worker profile --out fast.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard import Profile
from autoshard.profiling.startup import attend
from benchmarks.racing.by_hand import HAND_WRITTEN, ByHand
from benchmarks.racing.contestants import PINNED, Build, Meshes, Race, Runner, alone, planned, process_group
from benchmarks.racing.measure import timed_rounds, warm_up
from benchmarks.racing.plan_text import plan_steps, plan_text
from benchmarks.racing.results import Entry, Result
from benchmarks.racing.scenarios import FABRICS, SCENARIOS, Scenario
from benchmarks.racing.tuning import Tuned, tuned

__all__ = ["main"]

CHECKED_STEPS = 3
AUTOSHARD = "autoshard"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("race", "profile"))
    parser.add_argument("--scenario")
    parser.add_argument("--profile", help="a file, or a shipped one's name")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for measuring a profile")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--only", help="contestants, by name, with commas between")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with process_group():
        if given.task == "profile":
            text = Profile.measure(
                _meshes().grid, time_budget=given.budget, name="race", attend=attend
            ).to_json()
        else:
            text = json.dumps(_race(SCENARIOS[given.scenario], given).to_json(), indent=1)
        if dist.get_rank() == 0:
            given.out.write_text(text)


def _meshes() -> Meshes:
    world = dist.get_world_size()
    assert world % 2 == 0, "the race needs an even number of ranks"
    return Meshes(
        flat=init_device_mesh("cpu", (world,), mesh_dim_names=("ranks",)),
        grid=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp")),
    )


def _race(scenario: Scenario, given: argparse.Namespace) -> Result:
    race = Race(scenario.workload, _meshes(), given.profile, given.backend, scenario.memory_limit)
    wanted = given.only.split(",") if given.only else None
    runners: dict[str, Runner] = {}
    entries: dict[str, Entry] = {}
    for name, kind, build in _field(scenario):
        if wanted is None or name in wanted:
            _say(f"  {name}")
            runner, entries[name] = _prepared(name, kind, build, race)
            if runner is not None:
                runners[name] = runner
    reference = _reference(race)
    taken = timed_rounds(runners, given.rounds)
    finished = [
        replace(entry, **vars(taken[name])) if name in taken else entry for name, entry in entries.items()
    ]
    return Result(
        scenario.name,
        FABRICS[scenario.fabric].text,
        scenario.workload.text,
        scenario.why,
        scenario.memory_limit,
        tuple(reference),
        tuple(finished),
    )


def _field(scenario: Scenario) -> Iterator[tuple[str, str, Build | ByHand]]:
    """(name, kind, how to build it) of every contestant."""
    yield AUTOSHARD, "autoshard", planned
    yield f"{AUTOSHARD}, race=3", "raced", lambda race: planned(race, raced=3)
    yield "flat mesh", "pinned", lambda race: planned(race, mesh=race.meshes.flat)
    for name, pins in PINNED.items():
        if name == "pinned as TP" and not scenario.workload.columns:
            continue
        yield name, "pinned", lambda race, pins=pins: planned(race, pins(race.workload))
    fabric = FABRICS[scenario.fabric]
    # HSDP is for links of two speeds.
    absent = {"HSDP"} if fabric.hosts == 1 or fabric.ranks == 1 else set[str]()
    for name, by_hand in HAND_WRITTEN.items():
        if name not in absent and by_hand.runs(scenario.workload):
            yield name, "hand-written", by_hand


def _prepared(name: str, kind: str, build: Build | ByHand, race: Race) -> tuple[Runner | None, Entry]:
    """The contestant after its first steps, by hand in its best setting; an entry with the reason if it cannot run."""
    start = time.perf_counter()
    try:
        ready = _ready(build, race)
    except Exception as error:
        # All ranks fail alike (autoshard agrees on it); where they do not, the run ends by gloo's timeout.
        print(
            f"  {name} failed on rank {dist.get_rank()}: {error}\n{traceback.format_exc()}",
            file=sys.stderr,
            flush=True,
        )
        return None, Entry(name, kind, error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    runner = ready.runner
    plan = runner.plan
    text = "" if plan is None else plan_text(plan)
    _say(f"  {name}: ready in {time.perf_counter() - start:.1f} s")
    return runner, Entry(
        name,
        kind,
        losses=ready.losses,
        state_bytes=runner.state_bytes(),
        **({} if plan is None else plan_steps(plan)),
        plan=text,
        setting=ready.setting,
        tried=dict(ready.tried),
    )


def _ready(build: Build | ByHand, race: Race) -> Tuned:
    if isinstance(build, ByHand):
        return tuned(build, race, CHECKED_STEPS)
    runner = build(race)
    return Tuned(runner, "", tuple(warm_up(runner, CHECKED_STEPS)), {})


def _reference(race: Race) -> list[float]:
    """The losses of one process, computed by rank 0 while the others wait."""
    losses = torch.zeros(CHECKED_STEPS, dtype=torch.float64)
    if dist.get_rank() == 0:
        runner = alone(race)
        losses = torch.tensor([runner.step().item() for _ in range(CHECKED_STEPS)], dtype=torch.float64)
    dist.broadcast(losses, 0)
    return losses.tolist()


def _say(*lines: str) -> None:
    if dist.get_rank() == 0:
        print(*lines, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
