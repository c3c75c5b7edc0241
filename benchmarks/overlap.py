"""Step time of one plan run three ways: waiting at once, overlapped, and overlapped with buckets.

    torchrun --nproc-per-node 4 benchmarks/overlap.py --model mlp --layouts ddp
    python -m benchmarks.cluster --hosts 4 --ranks 1 --rate 1gbit -- \
        python benchmarks/overlap.py --model llama --layouts fsdp

The same layouts and kernels each time; only the merging of collectives, their order and their waits differ.
A step is forward and backward. The three take their steps in turn, so that whatever else the machine does meets
all alike. Prices are measured on the ranks first. Rank 0 prints medians and ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from autoshard.plan.judged import prices_of
from autoshard.planning import canonical_capture, find_plan
from autoshard.profiling.startup import attend
from autoshard.runtime.process_groups import groups_for
from benchmarks.models import family_constraints
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.compile.compile_graph import compile_graph
from passes.lower.rank_program import RankProgram, Schedule, rank_program
from passes.plan.decide import decide
from passes.plan.planned_graph import PlannedGraph, Transfer, Turn
from passes.redistribution.lower_redistribute import collective_nodes
from passes.schedule.issue_order import issue_order
from passes.schedule.overlap import Overlap
from passes.schedule.schedule import scheduled

FAMILIES = {"ddp": "DDP", "fsdp": "FSDP"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("mlp", "llama"), default="mlp")
    parser.add_argument("--layouts", choices=tuple(FAMILIES), default="ddp")
    parser.add_argument("--steps", type=int, default=15, help="of each, after two to warm up")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="of all ranks")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--profile-seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        compare(arguments)
    finally:
        dist.destroy_process_group()


def compare(arguments: argparse.Namespace) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    spec = MeshSpec({"dp": world})
    profile = Profile.measure(
        mesh, time_budget=arguments.profile_seconds, largest_nbytes=2**24, attend=attend
    )
    torch.manual_seed(0)
    model, inputs = example(arguments)
    placements = {"in_placements": ((Shard(0),) * len(inputs))}
    pins = family_constraints(FAMILIES[arguments.layouts], 1)
    slow = slow_compute(profile)
    plan = find_plan(model, spec, inputs, profile=slow, constraints=pins, backend="eager", **placements)
    joint = canonical_capture(model, inputs, {}).joint
    # The layouts are those of slow kernels, the rest is decided for this machine.
    merged = decide(joint, plan.planned.layouts, prices_of(profile, spec, "eager"))
    plain = _in_turns(merged, issue_order(joint, plan.planned.layouts).turns)
    groups = groups_for(mesh, [spec.names])

    def way(planned: PlannedGraph, schedule: Schedule) -> Way:
        return Way(rank_program(joint, planned, spec, rank, groups, schedule=schedule))

    ways = {
        "wait at once": way(plain, wait_at_once),
        "overlap": way(plain, Overlap()),
        "overlap and buckets": way(merged, scheduled),
    }
    times = times_in_turns(ways, arguments.steps)
    if rank == 0:
        report(arguments, model, times, ways)


def times_in_turns(ways: Mapping[str, Step], steps: int) -> dict[str, list[float]]:
    """Seconds of each step, of all ranks together, after two to warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(steps + 2):
        for name, way in ways.items():
            dist.barrier()
            started = time.perf_counter()
            way.step()
            dist.barrier()
            if step > 1:
                times[name].append(time.perf_counter() - started)
    return times


def _in_turns(planned: PlannedGraph, turns: Mapping[Transfer, Turn]) -> PlannedGraph:
    """With its transfers in these turns, and none in flight ahead of them."""
    return PlannedGraph(
        tuple(
            structs.replace(
                node,
                operands=tuple(
                    structs.replace(read, turn=turns.get((node.name, i)), ahead=None)
                    for i, read in enumerate(node.operands)
                ),
            )
            for node in planned.nodes
        )
    )


def slow_compute(profile: Profile, factor: float = 100.0) -> Profile:
    """So that the plan is the textbook's: on models this small it may be faster to compute everything on
    every rank."""
    device = profile.device
    rates = tuple(
        replace(rate, flops_per_second=tuple(r / factor for r in rate.flops_per_second))
        for rate in device.matmul
    )
    memory = device.memory_bytes_per_second / factor
    return replace(profile, device=replace(device, matmul=rates, memory_bytes_per_second=memory))


def report(
    arguments: argparse.Namespace,
    model: nn.Module,
    times: Mapping[str, list[float]],
    ways: Mapping[str, Way],
) -> None:
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{arguments.model}, {arguments.layouts}: {count / 1e6:.2f} M parameters, {dist.get_world_size()} ranks"
    )
    base = statistics.median(times["wait at once"])
    for name, way in ways.items():
        median = statistics.median(times[name])
        ratio = f"{base / median:.2f}x"
        print(f"  {name:20} {median * 1e3:8.1f} ms  {ratio}  {way.collectives:3d} collectives", flush=True)


class Step(Protocol):
    """Something that takes steps, with ranks alike."""

    def step(self) -> Any: ...


class Way:
    """The two programs of a rank, and something to run them on."""

    def __init__(self, program: RankProgram) -> None:
        self.backward = program.backward()
        modules = [program.phases.forward, self.backward.module]
        self.collectives = sum(len(collective_nodes(module.graph)) for module in modules)
        self.run = [compile_graph(module, "eager") for module in modules]
        forward, backward = ([n for n in m.graph.nodes if n.op == "placeholder"] for m in modules)
        self.inputs = [some(node.meta["val"]) for node in forward]
        self.tangents = [some(n.meta["val"]) for n in backward[len(backward) - len(self.backward.tangents) :]]

    def step(self) -> Any:
        with torch.no_grad():
            results = self.run[0](list(self.inputs))
            given = [self.inputs[i] for i in self.backward.passed]
            given += [results[i] for i in self.backward.saved]  # type: ignore[misc]
            del results
            return self.run[1]([*given, *self.tangents])


def wait_at_once(module: fx.GraphModule) -> fx.GraphModule:
    """Collectives in the order of `Overlap`, each waited for where it starts."""
    graph = Overlap()(module).graph
    for node in collective_nodes(graph):
        (wait,) = node.users
        node.append(wait)
    graph.lint()
    module.recompile()
    return module


def some(like: Tensor) -> Tensor:
    """Small numbers that are legal indices too."""
    if like.dtype.is_floating_point:
        return torch.randn(like.shape, dtype=like.dtype) * 0.02
    return torch.randint(0, 2, like.shape).to(like.dtype)


def example(arguments: argparse.Namespace) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if arguments.model == "mlp":
        blocks = [Block(arguments.width) for _ in range(arguments.layers)]
        return nn.Sequential(*blocks), (torch.randn(arguments.batch, arguments.length, arguments.width),)
    from transformers import LlamaConfig, LlamaForCausalLM

    width = arguments.width
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=arguments.length,
        use_cache=False,
    )
    tokens = torch.randint(0, 1024, (arguments.batch, arguments.length))
    return Logits(LlamaForCausalLM(config)), (tokens,)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits.square().mean()


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))): 6 parameters, four of them small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


if __name__ == "__main__":
    main()
