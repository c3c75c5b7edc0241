"""Causal attention of a sequence that ranks have parts of: keys gathered, heads for sequence (Ulysses), and a ring.

    python -m benchmarks.context                                   # 2 and 4 local ranks
    python -m benchmarks.context --tokens 8192 --heads 1 --ranks 2
    python -m benchmarks.context --rate 1gbit                      # each rank a host of an emulated cluster

A step is forward and backward of projections and attention, gloo, eager, float32; all take their steps in turn, and so
does torch's own ring (`benchmarks.context_by_torch`). Prints Markdown: multiply-adds of attention on the rank that has
most, as a share of one rank's for all of it, the bytes that a rank sends at most, what prices measured on the ranks
first say of the step, and its median on the slowest rank, with quartiles.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autoshard.plan.judged import Judged, judged, prices_of
from autoshard.planning import canonical_capture
from autoshard.profiling.startup import attend
from autoshard.runtime.process_groups import groups_for
from benchmarks.cluster import Launch, add_options, answer, launcher
from benchmarks.cluster.rank import answered
from benchmarks.context_by_torch import ROTATIONS, TorchRing, cpu_kernel
from benchmarks.overlap import Step, Way, times_in_turns
from benchmarks.step_cells import milliseconds, taken_on
from cost_model.mesh import MeshSpec, simulated_groups
from cost_model.profile import Profile
from passes.ir.joint import JointGraph
from passes.ir.op_work import global_flops
from passes.layout.layout import RING, Layout, NodeLayouts
from passes.lower.rank_program import RankProgram, rank_program
from passes.predict.step_events import collective_nbytes
from passes.redistribution.lower_redistribute import collective_nodes
from passes.search.find import Sought, find_assignment
from passes.search.search_terms import Choose, Narrowing, boundary_of
from passes.strategies.prices import Prices

FACTORS = {"gathered": "s", "Ulysses": "h", "ring": RING}
"""Way -> the factor of attention that it splits."""
AXIS = "cp"


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    if given.out:
        answered(given.out, lambda: _rows(given, dist.get_world_size(), dist.get_rank()))
        return 0
    links = f"links of {given.rate}, " if given.rate else ""
    heads = f"{given.heads} heads of {given.width // given.heads}"
    print(f"{given.tokens} tokens, {heads}, {links}{taken_on()}\n")
    print(
        "| ranks | keys | work of the busiest | sent, MB | predicted, ms | step, ms | quartiles | of one rank |"
    )
    print("| ---: | --- | ---: | ---: | ---: | ---: | --- | ---: |", flush=True)
    with launcher(1, None) as launch:
        alone = measured(launch, given)["gathered"]
    for ranks in given.ranks:
        with launcher(ranks, given.rate) as launch:
            for name, row in measured(launch, given).items():
                print("| {} | {} | {} |".format(ranks, name, " | ".join(_cells(row, alone))), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=7, help="of each, after two to warm up")
    add_options(parser)
    return parser


def _cells(row: Mapping[str, Any], alone: Mapping[str, Any]) -> list[str]:
    planned = [""] * 3  # not known of what is not ours
    if "work" in row:
        shares = row["work"] / alone["work"], row["sent"] / 1e6, 1e3 * row["predicted"]
        planned = ["{:.4f}", "{:.2f}", "{:.1f}"]
        planned = [form.format(share) for form, share in zip(planned, shares, strict=True)]
    ratio = statistics.median(row["seconds"]) / statistics.median(alone["seconds"])
    return [*planned, *milliseconds(row["seconds"]), f"{ratio:.2f}"]


def measured(launch: Launch, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Way -> figures, of as many ranks as `launch` starts."""
    names = ("tokens", "width", "heads", "steps", "budget")
    return answer(launch, ("-m", "benchmarks.context"), {name: getattr(given, name) for name in names})


def _rows(given: argparse.Namespace, ranks: int, rank: int) -> dict[str, dict[str, Any]]:
    mesh, spec = init_device_mesh("cpu", (ranks,), mesh_dim_names=(AXIS,)), MeshSpec({AXIS: ranks})
    profile = Profile.named("cpu")
    if given.budget and ranks > 1:
        profile = Profile.measure(mesh, time_budget=given.budget, attend=attend)
    prices = prices_of(profile, spec, "eager")
    torch.manual_seed(0)
    model, x = Attention(given.width, given.heads), torch.randn(1, given.tokens, given.width)
    joint = canonical_capture(model, (x,), {}).joint
    groups = groups_for(mesh, [spec.names])
    rows: dict[str, dict[str, Any]] = {}
    ways: dict[str, Step] = {}
    for name, factor in FACTORS.items() if ranks > 1 else [("gathered", "")]:
        best = split(joint, prices, factor)
        program = partial(rank_program, joint, best.planned, spec)
        every = [program(one, simulated_groups(spec)) for one in range(ranks)]
        rows[name] = {"work": max(map(work, every)), "sent": max(map(sent, every)), "predicted": best.seconds}
        ways[name] = Way(program(rank, groups))
    for rotation in ROTATIONS if ranks > 1 else ():
        name = f"ring of torch, {rotation}"
        rows[name], ways[name] = {}, TorchRing(model, x, mesh, rotation)
    with cpu_kernel():
        for name, seconds in times_in_turns(ways, given.steps).items():
            rows[name]["seconds"] = seconds
    return rows


_causal = partial(F.scaled_dot_product_attention, is_causal=True)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = _causal) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))


def split(joint: JointGraph, prices: Prices, factor: str) -> Judged:
    """The best plan that splits attention along the factor, of a sequence split at both ends."""
    whole = Layout.replicated(3)
    ends = (
        Layout(((), (AXIS,), ()), whole.partial, whole.sizes, whole.halos)
        if prices.mesh.device_count > 1
        else whole
    )
    names = [node.name for node in joint.graph.nodes if "attention" in str(node.target)]
    chosen = Narrowing(allowed=dict.fromkeys(names, _splitting(factor)) if factor else {})
    found = find_assignment(
        Sought(joint, prices, boundary_of(joint, {}, {0: ends}, {0: ends}), narrowing=chosen)
    )
    return judged(joint, found.assignment, prices)


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
