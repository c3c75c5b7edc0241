"""One rank of one measurement, started by benchmarks/halo.py, which says in a file what came out.

torchrun ... -m benchmarks.space.worker times --size 256 ... --out result.json
torchrun ... -m benchmarks.space.worker memory --size 256 ... --out result.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

from autoshard import Plan, Profile
from autoshard.profiling.startup import attend
from benchmarks.cluster.rank import answered
from benchmarks.racing.measure import timed_rounds
from benchmarks.space.contestants import CONTESTANTS, INPUT_SEED, Contest, Contestant, planned_in_space
from benchmarks.space.networks import Work

__all__ = ["add_work_options", "main", "work_of"]

WARM_UP = 2
COUNTED_STEPS = 2


def add_work_options(parser: argparse.ArgumentParser, many: str | None) -> None:
    """Options of the network; `many`: nargs of those that a sweep varies."""
    parser.add_argument("--space", type=int, default=2, choices=(2, 3), help="dims of an image or a volume")
    parser.add_argument("--size", type=int, nargs=many, default=[128] if many else 128, help="of every dim")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each contestant")
    parser.add_argument("--backend", default="eager", help="eager or inductor, for all contestants")
    parser.add_argument("--profile", help="a file or a shipped name; measured without it")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for measuring the profile")
    parser.add_argument("--only", help="contestants, by name, with commas between")


def work_of(given: argparse.Namespace, size: int) -> Work:
    return Work(given.space, size, given.channels, given.layers, given.batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("times", "memory"))
    parser.add_argument("--out", type=Path, required=True)
    add_work_options(parser, None)
    given = parser.parse_args()
    answered(given.out, lambda: _result(given))


def _result(given: argparse.Namespace) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("space",))
    contest = Contest(work_of(given, given.size), mesh, _profile(given, mesh), given.backend)
    return _times(contest, given) if given.task == "times" else _memory(contest)


def _profile(given: argparse.Namespace, mesh: DeviceMesh) -> Profile:
    if given.profile:
        return Profile.load(given.profile)
    if given.only and "autoshard" not in given.only:
        return Profile.named("cpu")  # nobody reads it
    return Profile.measure(mesh, time_budget=given.budget, name="halo", attend=attend)


def _times(contest: Contest, given: argparse.Namespace) -> list[dict[str, Any]]:
    """By contestant: seconds of the steps, bytes sent, and how far its gradients are from the first one's."""
    names = given.only.split(",") if given.only else list(CONTESTANTS)
    ready: dict[str, Contestant] = {}
    for name in names:
        _say(f"  {name}")
        ready[name] = CONTESTANTS[name](contest)
        for _ in range(WARM_UP):
            ready[name].step()
    taken = timed_rounds(ready, given.rounds)
    return [
        {
            "name": name,
            "seconds": taken[name].seconds,
            "sent": _largest(_sent_bytes(contestant)),
            "difference": _largest(_difference(contestant, ready[names[-1]])),
            "plan": "" if contestant.plan is None else _plan_text(contestant.plan),
        }
        for name, contestant in ready.items()
    ]


def _plan_text(plan: Plan) -> str:
    """What the plan communicates: `halo_exchange` counts as the all-to-all that it is."""
    kinds = [collective.kind for collective in plan.collectives]
    halos = sum(layout.has_halo for layouts in plan.planned.layouts.values() for layout in layouts.operands)
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return f"{halos} operands with halos; {counts}; predicted {1e3 * plan.step_time:.1f} ms"


def _sent_bytes(contestant: Contestant) -> float:
    """Bytes this process wrote in a step, to sockets that is: gloo sends by writev, which /proc counts."""
    dist.barrier()
    before = _written()
    for _ in range(COUNTED_STEPS):
        contestant.step()
    sent = _written() - before
    dist.barrier()
    return sent / COUNTED_STEPS


def _written() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def _difference(one: Contestant, other: Contestant) -> float:
    """The largest relative difference of a weight's gradient."""
    pairs = zip(one.gradients(), other.gradients(), strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def _largest(value: float) -> float:
    """Over all ranks."""
    there = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(there, op=dist.ReduceOp.MAX)
    return there.item()


def _memory(contest: Contest) -> dict[str, Any]:
    """Bytes of all tensors at the peak of a step of autoshard's, on the fullest rank, input and gradient included."""
    contestant = planned_in_space(contest)
    for _ in range(WARM_UP):
        contestant.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        contestant.step()
    plan = contestant.plan
    assert plan is not None
    held = 2 * contest.part(INPUT_SEED).nbytes
    return {"peak": _largest(held + _peak_bytes(record)), "plan": _plan_text(plan)}


def _peak_bytes(record: profile) -> int:
    """The most that was allocated at a time beyond what there was at first."""
    with tempfile.TemporaryDirectory() as folder:
        record.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
