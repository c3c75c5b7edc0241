"""One rank of a race of pipelines: started on the cluster by benchmarks/pipeline_race.py.

torchrun ... -m benchmarks.racing.stage_worker --model mlp --sizes 512 512 16 512 --out result.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import PipelinePlan, Profile, autoshard
from autoshard.profiling.startup import attend
from benchmarks.racing.by_hand import HAND_WRITTEN
from benchmarks.racing.contestants import Meshes, Race, Runner, alone, planned, process_group
from benchmarks.racing.in_stages import BusyClock, StagesByHand, Watched, bubbles, staged_by_hand
from benchmarks.racing.measure import TURN, timed_rounds, warm_up
from benchmarks.racing.plan_text import plan_steps, plan_text
from benchmarks.racing.workloads import gpt, mlp

__all__ = ["AUTO", "MODELS", "add_options", "contestants", "main", "measured"]

AUTO, BY_HAND = "autoshard, stages=auto", "torch pipelining"
MODELS = {"mlp": mlp, "gpt": gpt}
CHECKED_STEPS = 2
Builds = Iterator[tuple[str, Callable[[], Runner]]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is raced, and how long."""
    parser.add_argument("--model", choices=tuple(MODELS), default="mlp")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[512, 512, 16, 512],
        help="mlp: width, hidden, blocks, batch; gpt: vocabulary, context, width, layers, batch",
    )
    parser.add_argument("--pieces", type=int, default=8, help="of a batch, for all pipelines")
    parser.add_argument("--schedule", help="the only one; the fastest without it")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each contestant")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds for measuring the profile")
    parser.add_argument("--profile", help="a file or a shipped name; measured without it")
    parser.add_argument(
        "--only", help="contestants beside autoshard's pipeline, by name, with commas between"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hosts", type=int, required=True, help="that ranks are on: 2 x 2 or 4 x 1")
    add_options(parser)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with process_group():
        load = os.getloadavg()[0]
        mesh = _mesh(given.hosts)
        profile = given.profile or Profile.measure(
            mesh, time_budget=given.budget, largest_nbytes=2**24, name="race", attend=attend
        )
        _say(f"profile measured; load before {load:.1f}")
        race = Race(MODELS[given.model](*given.sizes), Meshes(_flat(), mesh), profile, "eager", None)
        result = {**measured(race, given), "load": load}
        if dist.get_rank() == 0:
            given.out.write_text(json.dumps(result, indent=1))


def _flat() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))


def _mesh(hosts: int) -> DeviceMesh:
    """Hosts alone, where each has one rank."""
    world = dist.get_world_size()
    if hosts == world:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("hosts",))
    return init_device_mesh("cpu", (hosts, world // hosts), mesh_dim_names=("hosts", "ranks"))


def contestants(race: Race, given: argparse.Namespace) -> Builds:
    """(name, what builds it): autoshard's choice first, whose schedule those by hand run, too."""
    mesh = race.meshes.grid
    auto = _staged(race, given, "auto")
    yield AUTO, lambda: auto
    plan: Any = auto.plan
    if not isinstance(plan, PipelinePlan):
        forced = _staged(race, given, "hosts")
        plan = forced.plan
        yield "autoshard, stages=hosts", lambda: forced
    local = len(plan.stages) // plan.ranks
    for inside in ("",) if len(mesh.shape) == 1 else ("DP", "TP"):
        how = StagesByHand(mesh, plan.axis, plan.schedule, plan.micro_batches, local, inside)
        name = f"{BY_HAND} x {inside}" if inside else BY_HAND
        yield name, lambda how=how: staged_by_hand(race, how)
    yield "autoshard, no stages", lambda: planned(race, mesh=mesh)
    for name, setting in (("DDP", {"bucket_cap_mb": 25}), ("TP", {})):
        yield name, lambda name=name, setting=setting: HAND_WRITTEN[name].build(race, setting)


def _staged(race: Race, given: argparse.Namespace, stages: str) -> Runner:
    """autoshard with stages along an axis, or "auto"."""
    model, batch = race.model(), race.batch()
    autoshard(
        model,
        race.meshes.grid,
        batch,
        profile=race.profile,
        backend=race.backend,
        time_limit=60.0,
        stages=stages,
        micro_batches=given.pieces,
        schedule=given.schedule,
    )
    return Runner(model, model, batch, plan=model.autoshard_plan)  # type: ignore[arg-type]


def measured(race: Race, given: argparse.Namespace) -> dict[str, Any]:
    """Losses of the first steps and of one process; of each contestant seconds, bubbles and what was predicted."""
    rows: dict[str, dict[str, Any]] = {}
    watched: dict[str, Watched] = {}
    only = given.only.split(",") if given.only else None
    with BusyClock().running() as clock:
        for name, build in contestants(race, given):
            if only is not None and name not in only and not name.startswith("autoshard, stages"):
                continue
            start = time.perf_counter()
            runner = build()
            losses = warm_up(runner, CHECKED_STEPS)
            rows[name] = {"name": name, "losses": losses, "state": runner.state_bytes(), **_predicted(runner)}
            watched[name] = Watched(runner, clock)
            _say(f"{name}: ready in {time.perf_counter() - start:.0f} s, loss {losses[-1]:.6f}")
        taken = timed_rounds(watched, given.rounds)  # type: ignore[arg-type]  # what it asks for is `step`
    for name, times in taken.items():
        shares = bubbles(watched[name].busy[TURN - 1 :: TURN], times.seconds)
        rows[name].update(seconds=times.seconds, cpu=statistics.median(times.cpu_seconds))
        if "stages" in rows[name]["kind"] or name.startswith(BY_HAND):
            rows[name]["bubble"] = statistics.median(shares)
    reference = alone(race)
    return {
        "workload": race.workload.text,
        "reference": [reference.step().item() for _ in range(CHECKED_STEPS)],
        "rows": list(rows.values()),
    }


def _predicted(runner: Runner) -> dict[str, Any]:
    plan: Any = runner.plan
    if plan is None:
        return {"kind": ""}
    if not isinstance(plan, PipelinePlan):
        return {"kind": "plan", **plan_steps(plan), "plan": plan_text(plan)}
    local = len(plan.stages) // plan.ranks
    layouts = "; ".join(dict.fromkeys(plan_text(stage) for stage in plan.stages))
    text = f"{len(plan.stages)} stages along {plan.axis} ({local} a rank), {plan.schedule}, {plan.micro_batches} pieces"
    return {
        "kind": "stages",
        **plan_steps(plan),
        "predicted_bubble": plan.bubble,
        "plan": f"{text}; each stage: {layouts}",
        "cut": list(plan.cut),
    }


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
