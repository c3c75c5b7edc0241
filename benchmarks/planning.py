"""From a model to its plan and to one rank's lowered graph, offline: seconds and memory of each stage.

    python -m benchmarks.planning                                   # Llama-3-8B, 32 layers, dp=32, tp=8
    python -m benchmarks.planning --layers 4 --mesh dp=4,sp=8,tp=8 --memory-limit 70GB
    python -m benchmarks.planning --model llama-3-70b
    python -m benchmarks.planning --check                           # small models against the best figures, as CI does
    python -m benchmarks.planning --sweep                           # growth with layers, axes and devices

The model lives on `meta`, the prices are those of a profile; no GPU, no process group, one thread. The stages
are what `find_plan` does ("predict" lowers a rank to price its program), and after them what a rank of the
mesh does with the plan: partition, phases, order. Importing torch and transformers is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any

import torch

from autoshard import MeshSpec, Profile, find_plan
from autoshard.plan.judged import prices_of
from autoshard.planner.plan_command import parse_mesh
from benchmarks.models import MODELS
from benchmarks.planning_check import check, record
from cost_model.memory import parse_bytes
from cost_model.mesh import simulated_groups
from passes.canonicalize import canonicalize
from passes.capture import capture
from passes.lower.rank_program import rank_program
from passes.plan.decide import decide
from passes.plan.describe import graph_hash
from passes.predict.predict_step import predicted_step
from passes.search.agree import first_overlaps
from passes.search.overlapped import solve_overlapped
from passes.search.search_terms import boundary_of
from passes.search.strategy_space import SpaceBuilder

STAGES = ("capture", "canonicalize", "space", "search", "decide", "hash", "predict", "rank program")
SWEEP: Sequence[Sequence[str]] = (
    ("--layers", "4"),
    ("--layers", "8"),
    ("--layers", "16"),
    ("--layers", "32"),
    ("--layers", "32", "--mesh", "dp=256"),
    ("--layers", "32", "--mesh", "dp=512,tp=8", "--batch", "1024"),
    ("--layers", "1", "--mesh", "dp=4,sp=8,tp=8"),
    ("--layers", "32", "--mesh", "dp=4,sp=8,tp=8"),
    ("--layers", "32", "--mesh", "pods=16,dp=32,tp=8", "--batch", "1024"),
    ("--model", "llama-3-70b", "--memory-limit", "160GB"),
    ("--model", "llama-3-70b", "--memory-limit", "100GB"),
)


@dataclass(frozen=True)
class Stage:
    """seconds: on the clock; cpu: of the processor. peak: the process's resident bytes so far at most."""

    name: str
    seconds: float
    cpu: float
    peak: int


@dataclass
class Run:
    """One measurement: what was planned, its stages, and what came out."""

    title: str
    stages: list[Stage] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start, cpu = time.perf_counter(), time.process_time()
        yield
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        self.stages.append(Stage(name, seconds, cpu, _peak()))

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def cpu(self) -> float:
        return sum(stage.cpu for stage in self.stages)


def main() -> None:
    arguments = _parser().parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.record:
        record()
        return
    if arguments.check:
        sys.exit("\n".join(check()) or 0)
    if arguments.sweep:
        _sweep(arguments)
        return
    run = _whole(arguments) if arguments.whole else _by_stage(arguments)
    print(json.dumps(asdict(run)) if arguments.json else _table(run))


def _by_stage(arguments: argparse.Namespace) -> Run:
    model, mesh, call, limit = _problem(arguments)
    run = Run(_title(arguments))
    with run.stage("capture"):
        captured = capture(model, (), call)
    with run.stage("canonicalize"):
        joint = canonicalize(captured.joint)
    with run.stage("space"):
        prices = prices_of(Profile.load(arguments.profile), mesh)
        # Output 0, the loss, is global; the logits stay as the plan leaves them.
        outputs = {spec.index: None for spec in joint.outputs if spec.kind == "output" and spec.index > 0}
        boundary = boundary_of(joint, parameters={}, inputs={}, outputs=outputs)
        space = SpaceBuilder(joint, prices, boundary).built(limit)
    with run.stage("search"):
        kinds = space.kinds(first_overlaps(prices.overlap_efficiency))
        found = solve_overlapped(space.problem, kinds, time_limit=arguments.time_limit)
        assignment = space.assignment(found.choice)
    with run.stage("decide"):
        planned = decide(joint, assignment, prices)
    with run.stage("hash"):
        graph_hash(joint)
    with run.stage("predict"):
        predicted = predicted_step(joint, planned, prices)
    with run.stage("rank program"):
        phases = rank_program(joint, planned, mesh, 0, simulated_groups(mesh)).usual()
    peak, _ = space.problem.peak(found.choice)
    backward = 0 if phases.backward is None else len(phases.backward.module.graph.nodes)
    run.facts = {
        "captured": len(captured.joint.graph.nodes),
        "canonical": len(joint.graph.nodes),
        "lowered": len(phases.forward.graph.nodes) + backward,
        "search nodes": len(space.problem.node_costs),
        "edges": len(space.problem.edges),
        "strategies": sum(len(costs) for costs in space.problem.node_costs),
        "cost_ms": found.cost * 1e3,
        "gap": found.gap,
        "step_ms": predicted.seconds * 1e3,
        "memory_GB": peak / 1e9,
    }
    return run


def _whole(arguments: argparse.Namespace) -> Run:
    """`find_plan` as a user calls it, in one stage."""
    model, mesh, call, limit = _problem(arguments)
    run = Run(_title(arguments))
    with run.stage("find_plan"):
        plan = find_plan(
            model,
            mesh,
            ((), call),
            profile=arguments.profile,
            memory_limit=limit,
            out_placements="keep",
            time_limit=arguments.time_limit,
        )
    run.facts = {"gap": plan.gap, "cost_ms": plan.cost * 1e3, "step_ms": plan.step_time * 1e3}
    return run


def _problem(arguments: argparse.Namespace) -> tuple[torch.nn.Module, MeshSpec, dict[str, Any], int | None]:
    build, layers = MODELS[arguments.model]
    model = build(arguments.layers or layers, getattr(torch, arguments.dtype))
    tokens = torch.zeros(arguments.batch, arguments.sequence, dtype=torch.int64, device="meta")
    limit = None if arguments.memory_limit in (None, "none") else parse_bytes(arguments.memory_limit)
    mesh = MeshSpec(arguments.mesh, device_type="cuda")
    return model, mesh, {"input_ids": tokens, "labels": tokens}, limit


def _title(arguments: argparse.Namespace) -> str:
    layers = arguments.layers or MODELS[arguments.model][1]
    mesh = " x ".join(f"{axis}={size}" for axis, size in arguments.mesh.items())
    return (
        f"{arguments.model}, {layers} layers, {arguments.dtype}, {arguments.batch} x {arguments.sequence} "
        f"tokens, {mesh}, memory limit {arguments.memory_limit}"
    )


def _table(run: Run) -> str:
    lines = [
        run.title,
        "",
        "| stage | seconds | CPU seconds | peak RSS so far |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {s.name} | {s.seconds:.1f} | {s.cpu:.1f} | {s.peak / 1e9:.2f} GB |" for s in run.stages]
    lines += [f"| total | {run.seconds:.1f} | {run.cpu:.1f} | {run.stages[-1].peak / 1e9:.2f} GB |", ""]
    lines += [", ".join(f"{name} {_number(value)}" for name, value in run.facts.items())]
    return "\n".join(lines)


def _sweep(arguments: argparse.Namespace) -> None:
    """Each configuration in a fresh process, so that its peak memory is its own."""
    print(
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; CPU seconds\n"
    )
    print(f"| | nodes | strategies | {' | '.join(STAGES)} | total | on the clock | peak RSS | gap |")
    print("| --- " * (len(STAGES) + 7) + "|", flush=True)
    common = [
        "--memory-limit",
        str(arguments.memory_limit),
        "--time-limit",
        str(arguments.time_limit),
        "--json",
    ]
    for case in SWEEP:
        command = [sys.executable, "-m", "benchmarks.planning", *common, *case]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"| {' '.join(case)} | failed: {done.stderr.strip().splitlines()[-1]} |", flush=True)
            continue
        print(_row(case, json.loads(done.stdout.splitlines()[-1])), flush=True)


def _row(case: Sequence[str], data: dict[str, Any]) -> str:
    run = Run(data["title"], [Stage(**stage) for stage in data["stages"]], data["facts"])
    cpu = {stage.name: stage.cpu for stage in run.stages}
    cells = [" ".join(case), run.facts["canonical"], run.facts["strategies"]]
    cells += [f"{cpu[name]:.1f}" for name in STAGES]
    cells += [f"{run.cpu:.1f}", f"{run.seconds:.1f}", f"{run.stages[-1].peak / 1e9:.2f} GB"]
    return "| " + " | ".join(map(str, cells)) + f" | {run.facts['gap']:.2%} |"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="of the model's layers; default: all")
    parser.add_argument("--mesh", type=parse_mesh, default={"dp": 32, "tp": 8}, help="such as dp=32,tp=8")
    parser.add_argument("--batch", type=int, default=64, help="sequences")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens per sequence")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--profile", default="h100")
    parser.add_argument("--memory-limit", default="70GB", help='per device, such as "70GB"; "none"')
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for the search")
    parser.add_argument("--whole", action="store_true", help="only find_plan, in one stage")
    parser.add_argument("--sweep", action="store_true", help="a table of growth; takes minutes")
    parser.add_argument("--check", action="store_true", help="small models against the best figures recorded")
    parser.add_argument("--record", action="store_true", help="write those that are better now")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    return parser


if __name__ == "__main__":
    main()
