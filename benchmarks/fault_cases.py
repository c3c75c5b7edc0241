"""Faults of one rank among several, each a function that every rank runs: `case(rank)`. See benchmarks/faults.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import autoshard
import autoshard.runtime.session

__all__ = ["CASES", "mark"]

CASES: dict[str, Callable[[int], None]] = {}
"""What is wrong -> what a rank runs. Rank 1 is the odd one, or the rank that the text names."""

ODD = 1
STEPS = 8
FAULT_AT = 5


def mark() -> None:
    """Now is the fault: seconds count from the last of these of any rank."""
    print(f"at: {time.monotonic()}", flush=True)


def case(text: str) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    def add(fn: Callable[[int], None]) -> Callable[[int], None]:
        CASES[text] = fn
        return fn

    return add


class Net(nn.Module):
    def __init__(self, hidden: int = 24, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, hidden), nn.Linear(hidden, 12)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


PINS: dict[str, Any] = {"up.weight": [Shard(0)], "down.weight": [Shard(1)]}
"""Of tensor parallelism: forward and backward wait for other ranks."""


def mesh_of(name: str = "tp") -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def batch(seed: int = 0, rows: int = 12) -> Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(seed))


def parallel(model: nn.Module | None = None, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    given: dict[str, Any] = {"profile": "cpu", "backend": "eager", "constraints": PINS}
    return autoshard.autoshard(model or Net(), mesh or mesh_of(), **(given | options))


def step(model: nn.Module, x: Tensor) -> None:
    model(x.requires_grad_()).square().mean().backward()


def train(
    model: nn.Module, at_fault: Callable[[], object] | None = None, rank: int = 0, odd: int = ODD
) -> None:
    for number in range(STEPS):
        if number == FAULT_AT and rank == odd and at_fault is not None:
            mark()
            at_fault()
        step(model, batch(number))


def kill(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def raise_(error: BaseException) -> None:
    raise error


def differing(name: str, odd: Any, others: Any = None) -> Callable[[int], None]:
    """A first step with another argument of autoshard on one rank; None: left out."""

    def run(rank: int) -> None:
        value = odd if rank == ODD else others
        train(parallel(**({} if value is None else {name: value})))

    return run


def before(fault: Callable[[], object], odd: int = ODD) -> Callable[[int], None]:
    """Between autoshard and the first call."""

    def run(rank: int) -> None:
        model = parallel()
        if rank == odd:
            mark()
            fault()
        train(model)

    return run


def during(fault: Callable[[], object], odd: int = ODD) -> Callable[[int], None]:
    """In the step `FAULT_AT`."""
    return lambda rank: train(parallel(), fault, rank, odd)


def while_planning(fault: Callable[[], object], odd: int) -> Callable[[int], None]:
    """While rank 0 searches for a plan, which takes a minute here, and the others wait for it."""

    def run(rank: int) -> None:
        import threading

        def slow(*args: Any, **options: Any) -> Any:
            for _ in range(600):
                time.sleep(0.1)

        autoshard.session.search_plan = slow
        if rank == odd:
            threading.Timer(4.0, lambda: (mark(), fault())).start()
        train(parallel())

    return run


CASES |= {
    "another axis name": lambda rank: train(parallel(mesh=mesh_of("dp" if rank == ODD else "tp"))),
    "a pin of no parameter": differing("constraints", {"nope": [Shard(0)]}),
    "another pin": differing("constraints", {"up.weight": [Shard(1)]}),
    "a plan's path that does not exist": differing("plan", "/nowhere/plan.json"),
    "a profile's path that does not exist": differing("profile", "/nowhere/profile.json"),
    "another profile": differing("profile", "h100"),
    "another backend": differing("backend", "aot_eager"),
    "a backend that does not exist": differing("backend", "nope"),
    "another memory_limit": differing("memory_limit", "1GB"),
    "a memory_limit that is no size": differing("memory_limit", "a lot"),
    "another time_limit": differing("time_limit", 30.0),
    "other in_placements": differing("in_placements", [Shard(0)], [Replicate()]),
    "other out_placements": differing("out_placements", [Shard(0)], [Replicate()]),
    "an example on one rank only": differing("example_inputs", (batch(),)),
    "killed before autoshard": lambda rank: kill() if rank == ODD else train(parallel()),
    "killed before the first call": before(kill),
    "rank 0 killed before the first call": before(kill, 0),
    "an exception before the first call": before(lambda: raise_(OSError("no such file"))),
    "leaves before the first call": before(lambda: sys.exit(0)),
    "Ctrl-C before the first call": before(lambda: kill(signal.SIGINT)),
    "killed while rank 0 plans": while_planning(kill, ODD),
    "rank 0 killed while it plans": while_planning(kill, 0),
    "Ctrl-C on rank 0 while it plans": while_planning(lambda: kill(signal.SIGINT), 0),
    "Ctrl-C while rank 0 plans": while_planning(lambda: kill(signal.SIGINT), ODD),
    "killed in training": during(kill),
    "rank 0 killed in training": during(kill, 0),
    "aborts in training": during(os.abort),
    "SIGTERM in training": during(lambda: kill(signal.SIGTERM)),
    "Ctrl-C in training": during(lambda: kill(signal.SIGINT)),
    "the loader raises": during(lambda: raise_(OSError("no such file"))),
    "the loader raises on rank 0": during(lambda: raise_(OSError("no such file")), 0),
    "fewer batches: leaves early": during(lambda: sys.exit(0)),
    "fewer batches: rank 0 leaves early": during(lambda: sys.exit(0), 0),
}


@case("another width of the model")
def _width(rank: int) -> None:
    train(parallel(Net(36 if rank == ODD else 24)))


@case("other code of the model")
def _code(rank: int) -> None:
    train(parallel(Net(act=torch.tanh if rank == ODD else torch.relu)))


@case("forward raises")
def _forward(rank: int) -> None:
    train(parallel(Net(act=(lambda x: raise_(KeyError("x"))) if rank == ODD else torch.relu)))  # type: ignore


@case("another shape at first")
def _first_shape(rank: int) -> None:
    step(parallel(), batch(rows=6 if rank == ODD else 12))


@case("another shape later")
def _shape(rank: int) -> None:
    model = parallel()
    train(model)
    mark()
    step(model, batch(rows=6 if rank == ODD else 12))
    train(model)


@case("eval on one rank")
def _eval(rank: int) -> None:
    model = parallel()
    train(model, model.eval, rank)


@case("a frozen parameter on one rank")
def _frozen(rank: int) -> None:
    model = parallel()
    train(model, lambda: model.get_parameter("up.bias").requires_grad_(False), rank)


@case("rank 0 evaluates alone, the others train on")
def _alone(rank: int) -> None:
    model = parallel()
    train(model, lambda: model.eval()(batch()), rank, 0)


@case("rank 0 evaluates alone, the others wait in a barrier")
def _barrier(rank: int) -> None:
    model = parallel()
    train(model)
    mark()
    if rank == 0:
        model.eval()(batch())
    dist.barrier()


@case("skips a step")
def _skip(rank: int) -> None:
    model = parallel()
    for number in range(STEPS):
        if number != FAULT_AT or rank != ODD:
            mark()
            step(model, batch())


@case("skips a backward")
def _skip_backward(rank: int) -> None:
    model = parallel()
    for number in range(STEPS):
        mark()
        loss = model(batch(number).requires_grad_()).sum()
        if number != FAULT_AT or rank != ODD:
            loss.backward()


@case("other inputs at first")
def _first_inputs(rank: int) -> None:
    step(parallel(), batch(rank))


@case("other inputs later")
def _later_inputs(rank: int) -> None:
    model = parallel()
    train(model)
    mark()
    while True:
        step(model, batch(100 + rank))


@case("a batch of each rank's own, as with DistributedSampler")
def _distributed_sampler(rank: int) -> None:
    data = list(batch(rows=120).split(1))
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), rank)  # type: ignore
    model = parallel()
    for x in torch.utils.data.DataLoader(data, 5, sampler=sampler):  # type: ignore
        step(model, x.flatten(0, 1))


@case("replicas of a part that differ")
def _replicas(rank: int) -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    model = parallel(mesh=mesh, constraints=None, in_placements=[Shard(0), Replicate()])
    step(model, batch(rank))


@case("report on one rank only")
def _report(rank: int) -> None:
    model = parallel()
    train(model)
    mark()
    if rank == ODD:
        with autoshard.report(model):
            train(model)
    train(model)


@case("another batch_size of data_loader")
def _loader(rank: int) -> None:
    data = torch.utils.data.TensorDataset(batch(rows=120))
    autoshard.data_loader(data, mesh_of(), [Shard(0)], batch_size=12 if rank == ODD else 24)


@case("data_loader on one rank only")
def _one_loader(rank: int) -> None:
    model, data = parallel(), torch.utils.data.TensorDataset(batch(rows=120))
    if rank == ODD:
        autoshard.data_loader(data, mesh_of(), [Shard(0)], batch_size=12)
    train(model)


@case("two models in another order")
def _order(rank: int) -> None:
    models = parallel(), parallel(Net(36))
    for model in reversed(models) if rank == ODD else models:
        step(model, batch())
