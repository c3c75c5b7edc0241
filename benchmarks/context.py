"""Causal attention of a sequence that ranks have parts of: keys gathered, heads for sequence (Ulysses), and a ring.

    python -m benchmarks.context                                   # 2 and 4 local ranks
    python -m benchmarks.context --tokens 8192 --heads 8 --ranks 2

A step is forward and backward of projections and attention, gloo, eager, float32; the three take their steps in turn.
Prints Markdown: multiply-adds of attention on the rank that has most, as a share of one rank's for all of it, the bytes
that a rank sends at most, and the median step of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autoshard.plan.judged import prices_of
from autoshard.planning import canonical_capture
from autoshard.runtime.process_groups import groups_for
from benchmarks.overlap import Way, times_in_turns
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.ir.joint import JointGraph
from passes.ir.op_work import global_flops
from passes.layout.layout import RING, Layout, NodeLayouts
from passes.lower.rank_program import RankProgram, rank_program
from passes.plan.decide import decide
from passes.plan.planned_graph import PlannedGraph
from passes.predict.step_events import collective_nbytes
from passes.redistribution.lower_redistribute import collective_nodes
from passes.search.find import find_assignment
from passes.search.search_terms import Choose, Narrowing, boundary_of
from passes.simulate.lockstep import simulated_groups

FACTORS = {"gathered": "s", "Ulysses": "h", "ring": RING}
"""Way -> the factor of attention that it splits."""
AXIS = "cp"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=7, help="of each, after two to warm up")
    given = parser.parse_args(words)
    machine = f"{os.cpu_count()} CPUs ({platform.machine()}), torch {torch.__version__}"
    print(
        f"{given.tokens} tokens, {given.heads} heads of {given.width // given.heads}, {date.today()}, {machine}\n"
    )
    print("| ranks | keys | work of the busiest | sent, MB | step, ms | of one rank |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |", flush=True)
    alone = measured(given, 1)["gathered"]
    for ranks in given.ranks:
        for name, row in measured(given, ranks).items():
            shares = row["work"] / alone["work"], row["sent"] / 1e6, row["ms"], row["ms"] / alone["ms"]
            print("| {} | {} | {:.4f} | {:.2f} | {:.1f} | {:.2f} |".format(ranks, name, *shares), flush=True)
    return 0


def measured(given: argparse.Namespace, ranks: int) -> dict[str, dict[str, float]]:
    """Way -> figures, of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        mp.start_processes(_rank, (given, ranks, folder, file), nprocs=ranks, start_method="spawn")  # type: ignore[no-untyped-call]
        return json.loads(file.read_text())


def _rank(rank: int, given: argparse.Namespace, ranks: int, folder: str, file: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        mesh, spec = init_device_mesh("cpu", (ranks,), mesh_dim_names=(AXIS,)), MeshSpec({AXIS: ranks})
        torch.manual_seed(0)
        model, x = Attention(given.width, given.heads), torch.randn(1, given.tokens, given.width)
        joint = canonical_capture(model, (x,), {}).joint
        groups = groups_for(mesh, [spec.names])
        rows, ways = {}, {}
        for name, factor in FACTORS.items() if ranks > 1 else [("gathered", "")]:
            planned = split(joint, spec, factor)
            programs = [rank_program(joint, planned, spec, r, simulated_groups(spec)) for r in range(ranks)]
            rows[name] = {"work": max(map(work, programs)), "sent": max(map(sent, programs))}
            ways[name] = Way(rank_program(joint, planned, spec, rank, groups))
        for name, seconds in times_in_turns(ways, given.steps).items():
            rows[name]["ms"] = 1e3 * statistics.median(seconds)
        if rank == 0:
            file.write_text(json.dumps(rows))
    finally:
        dist.destroy_process_group()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def split(joint: JointGraph, spec: MeshSpec, factor: str) -> PlannedGraph:
    """The best plan that splits attention along the factor, of a sequence split at both ends."""
    prices = prices_of(Profile.named("cpu"), spec, "eager")
    whole = Layout.replicated(3)
    ends = (
        Layout(((), (AXIS,), ()), whole.partial, whole.sizes, whole.halos) if spec.device_count > 1 else whole
    )
    names = [node.name for node in joint.graph.nodes if "attention" in str(node.target)]
    chosen = Narrowing(allowed=dict.fromkeys(names, _splitting(factor)) if factor else {})
    found = find_assignment(joint, prices, boundary_of(joint, {}, {0: ends}, {0: ends}), narrowing=chosen)
    return decide(joint, found.assignment, prices)


def _splitting(factor: str) -> Choose:
    def choose(strategies: Sequence[NodeLayouts]) -> list[int]:
        return [i for i, one in enumerate(strategies) if [split.factor for split in one.splits] == [factor]]

    return choose


def work(program: RankProgram) -> float:
    nodes = program.local.module.graph.nodes
    return sum(global_flops(node) for node in nodes if "attention" in str(node.target))


def sent(program: RankProgram) -> int:
    """Of the larger end of every collective."""
    return sum(map(collective_nbytes, collective_nodes(program.local.module.graph)))


if __name__ == "__main__":
    raise SystemExit(main())
