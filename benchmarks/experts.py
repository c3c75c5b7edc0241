"""A mixture of experts whose experts are split: autoshard's plan against `all_to_all_single` by hand, in one run.

    python -m benchmarks.experts                                   # 2 and 4 local ranks
    python -m benchmarks.experts --rate 300mbit                    # each rank a host of an emulated cluster

One layer, as in Mixtral: a router, the two best of eight experts for each token, tokens sorted by expert, two grouped
products with a gate between, and the weighted sum. A step is forward and backward of a rank's tokens, gloo, eager,
float32; all take their steps in turn. Prints Markdown: the median step of the slowest rank, with quartiles, CPU time of
all ranks, the ratio to the one by hand, how far results and gradients are from it, and what autoshard moves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from autoshard import Plan, Profile, autoshard
from autoshard.profiling.startup import attend
from benchmarks.cluster import Launch, add_options, answer, launcher
from benchmarks.cluster.rank import answered
from benchmarks.overlap import times_in_turns
from benchmarks.step_cells import milliseconds, taken_on

BY_HAND = "all_to_all_single"
AXIS = "ep"


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    if given.out:
        answered(given.out, lambda: _rows(given, dist.get_world_size(), dist.get_rank()))
        return 0
    command = "python -m benchmarks.experts " + " ".join(sys.argv[1:])
    print(f"{taken_on()}, `{command.strip()}`\n")
    print("| ranks | | predicted, ms | step, ms | quartiles | CPU, ms | to the last | differs by | moves |")
    print("| ---: | --- | ---: | ---: | --- | ---: | ---: | ---: | --- |", flush=True)
    for ranks in given.ranks:
        with launcher(ranks, given.rate) as launch:
            print("\n".join(_lines(ranks, _measured(launch, given))), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512, help="of an expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--chosen", type=int, default=2, help="experts of a token")
    parser.add_argument("--steps", type=int, default=9, help="of each, after two to warm up")
    add_options(parser)
    return parser


def _measured(launch: Launch, given: argparse.Namespace) -> list[dict[str, Any]]:
    names = ("tokens", "width", "hidden", "experts", "chosen", "steps", "budget")
    return answer(launch, ("-m", "benchmarks.experts"), {name: getattr(given, name) for name in names})


def _lines(ranks: int, rows: Sequence[dict[str, Any]]) -> list[str]:
    medians = {row["name"]: statistics.median(row["seconds"]) for row in rows}
    lines = []
    for row in rows:
        predicted = f"{1e3 * row['predicted']:.0f}" if row["predicted"] else ""
        cells = [predicted, *milliseconds(row["seconds"]), f"{1e3 * row['cpu']:.0f}"]
        cells += [f"{medians[row['name']] / medians[BY_HAND]:.2f}", f"{row['difference']:.0e}", row["moves"]]
        lines.append("| {} | {} | {} |".format(ranks, row["name"], " | ".join(cells)))
    return lines


class Experts(nn.Module):
    """x: [batch, tokens, width] -> the same."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen, self.experts = chosen, experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, which = self.routed(rows)
        found, order = which.flatten().sort()
        ends = F.one_hot(found, self.experts).sum(0).cumsum(0).to(torch.int32)
        y = self.computed(rows[order // self.chosen], ends) * weights.flatten()[order, None]
        return y[order.argsort()].unflatten(0, which.shape).sum(1).view(x.shape)

    def routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of every token, the weights of its experts and which they are."""
        weights, which = self.router(rows).softmax(-1).topk(self.chosen)
        return weights / weights.sum(-1, keepdim=True), which

    def computed(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = F.grouped_mm(rows, self.up, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)


class SentExperts(Experts):
    """The same on ranks that have an equal part of the experts, as Megatron's all-to-all dispatcher: rows go to the
    ranks of their experts, are sorted there, multiplied, and come back."""

    def __init__(self, whole: Experts, rank: int, ranks: int) -> None:
        super().__init__(whole.up.shape[1], whole.down.shape[1], whole.experts, whole.chosen)
        self.ranks = ranks
        self.router = whole.router
        self.up, self.down = (
            nn.Parameter(w.detach().chunk(ranks)[rank].clone()) for w in (whole.up, whole.down)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, which = self.routed(rows)
        order = which.flatten().argsort(stable=True)
        leaving = which.flatten().bincount(minlength=self.experts)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving)
        by_rank = torch.stack([leaving, coming]).view(2, self.ranks, -1)
        sent, received = by_rank.sum(-1).tolist()
        arrived = _Exchange.apply(rows[order // self.chosen], received, sent)
        own = torch.arange(by_rank.shape[-1]).repeat(self.ranks).repeat_interleave(coming)
        by_expert = own.argsort(stable=True)
        ends = by_rank[1].sum(0).cumsum(0).to(torch.int32)
        y = self.computed(arrived[by_expert], ends)[_inverse(by_expert)]
        y = _Exchange.apply(y, sent, received)[_inverse(order)].unflatten(0, which.shape)
        return (y * weights[..., None]).sum(1).view(x.shape)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).index_put((order,), torch.arange(len(order)))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.sizes = sent, received
        result = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(result, x.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.forward(ctx, grads[0], *ctx.sizes), None, None


@dataclass
class Contestant:
    """after: what is done to gradients at the end of a step. cpu: seconds of this rank, by step."""

    call: Callable[[Tensor], Tensor]
    model: nn.Module
    x: Tensor
    tangent: Tensor
    after: Callable[[nn.Module], None] = lambda model: None
    moves: str = ""
    predicted: float = 0.0
    cpu: list[float] = field(default_factory=list)

    def step(self) -> list[Tensor]:
        """The result and all gradients, experts' of this rank."""
        started = time.process_time()
        self.model.zero_grad()
        self.x.grad = None
        y = self.call(self.x)
        y.backward(self.tangent)
        self.after(self.model)
        self.cpu.append(time.process_time() - started)
        found = [y.detach(), self.x.grad, *(p.grad for p in self.model.parameters())]
        return [x for x in found if x is not None]


def _planned(
    model: Experts, mesh: DeviceMesh, profile: Profile, x: Tensor, **options: Any
) -> tuple[nn.Module, Plan]:
    tokens = [Shard(1)]
    ends = {
        "in_placements": tokens,
        "out_placements": tokens,
        "backend": "eager",
        "tune": "first",
        "time_limit": 20.0,
    }
    autoshard(model, mesh, (x,), profile=profile, **ends, **options)
    plan: Plan = model.autoshard_plan  # type: ignore[assignment]
    return model, plan


def _moves(plan: Plan) -> str:
    moved = [step.name for step in plan.collectives]
    return ", ".join(f"{moved.count(name)} {name}" for name in dict.fromkeys(moved))


def _rows(given: argparse.Namespace, ranks: int, rank: int) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(AXIS,))
    profile = Profile.named("cpu")
    if given.budget:
        profile = Profile.measure(mesh, time_budget=given.budget, attend=attend)

    def model() -> Experts:
        torch.manual_seed(0)
        return Experts(given.width, given.hidden, given.experts, given.chosen)

    torch.manual_seed(1 + rank)
    x, tangent = torch.randn(2, 1, given.tokens, given.width)
    ready = lambda model, **more: Contestant(model, model, x.clone().requires_grad_(), tangent, **more)
    split = {"constraints": {"up": [Shard(0)], "down": [Shard(0)]}}
    ways: dict[str, Contestant] = {}
    for name, options in {"autoshard": {}, "autoshard, experts split": split}.items():
        made, plan = _planned(model(), mesh, profile, x.clone().requires_grad_(), **options)
        ways[name] = ready(made, moves=_moves(plan), predicted=plan.step_time)
    by_hand = SentExperts(model(), rank, ranks)
    ways[BY_HAND] = ready(by_hand, after=lambda m: dist.all_reduce(m.router.weight.grad))
    wanted = ways[BY_HAND].step()
    differences = {name: _difference(way.step(), wanted, rank, ranks) for name, way in ways.items()}
    for way in ways.values():
        way.cpu.clear()
    taken = times_in_turns(ways, given.steps)
    cpu = {name: _total(statistics.median(way.cpu[2:])) for name, way in ways.items()}
    return [
        {"name": name, "moves": way.moves, "predicted": way.predicted, "seconds": taken[name]}
        | {"cpu": cpu[name], "difference": differences[name]}
        for name, way in ways.items()
    ]


def _difference(found: Sequence[Tensor], wanted: Sequence[Tensor], rank: int, ranks: int) -> float:
    """The largest on any rank, of the largest that there is."""
    most = 0.0
    for got, like in zip(found, wanted, strict=True):
        if isinstance(got, DTensor):
            got = got.full_tensor()
            got = got if got.shape == like.shape else got.chunk(ranks)[rank]
        most = max(most, float((got - like).abs().max() / like.abs().max()))
    return _total(most, dist.ReduceOp.MAX)


def _total(number: float, op: Any = dist.ReduceOp.SUM) -> float:
    every = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(every, op)
    return float(every)


if __name__ == "__main__":
    raise SystemExit(main())
