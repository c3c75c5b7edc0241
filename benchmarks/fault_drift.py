"""Faults of ranks that update or read differently, and of ranks beside what is the script's own. See fault_cases.py."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import autoshard
import cost_model.measure.host_memory
from benchmarks.fault_cases import (
    CASES,
    ODD,
    Net,
    batch,
    case,
    during,
    kill,
    mark,
    parallel,
    raise_,
    step,
    train,
)
from passes.ir.torch_dtensor import local_of

__all__ = ["CASES"]

REPLICAS = {"*": [Replicate()]}
SHARDS = {"*": [Shard(0)]}
MOMENTUM = partial(torch.optim.SGD, lr=0.01, momentum=0.5)
GOES_WRONG = 40
"""The step: after the first comparisons, which come one soon after the other."""

Change = Callable[[nn.Module, torch.optim.Optimizer], object]


def drift(
    change: Change,
    constraints: dict[str, Any] = REPLICAS,
    make: Callable[..., torch.optim.Optimizer] = MOMENTUM,
    when: str = "before the step",
    model: Callable[[], nn.Module] = Net,
) -> Callable[[int], None]:
    """Training in which rank 1 makes a change at one step: before its step, or instead of it; or "always" before."""

    def run(rank: int) -> None:
        net = parallel(model(), constraints=constraints)
        optimizer = make(net.parameters())
        mark()
        number = 0
        while True:
            step(net, batch(number))
            odd = rank == ODD and (number == GOES_WRONG or (when == "always" and number > GOES_WRONG))
            if number == GOES_WRONG:
                mark()
            if odd:
                change(net, optimizer)
            if not odd or when != "instead of the step":
                optimizer.step()
            if not odd or when != "without zero_grad":
                optimizer.zero_grad()
            number += 1

    return run


def group(**numbers: Any) -> Change:
    return lambda net, optimizer: optimizer.param_groups[0].update(numbers)


def gradients(change: Callable[[Tensor], object]) -> Change:
    """Of this rank's parts alone."""

    def run(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in net.parameters():
            assert parameter.grad is not None
            change(local_of(parameter.grad))

    return run


@torch.no_grad()
def noise(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = local_of(net.get_parameter("up.weight"))
    weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=1e-3)


def other_optimizer(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.optim.Adam(net.parameters(), lr=0.01).step()


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def nothing(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def scheduled(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.param_groups[0]["lr"] *= 0.5


small = partial(torch.optim.AdamW, lr=1e-5)
still = partial(torch.optim.SGD, lr=0.0)

case("skips optimizer.step() once")(drift(nothing, when="instead of the step"))
case("skips optimizer.step() once, with sharded parameters")(
    drift(nothing, SHARDS, when="instead of the step")
)
case("skips optimizer.step() while the learning rate is zero")(
    drift(nothing, make=still, when="instead of the step")
)
case("one optimizer.step() too many")(drift(lambda net, optimizer: optimizer.step()))
case("another optimizer steps, too")(drift(other_optimizer))
case("another learning rate")(drift(group(lr=0.02)))
case("another learning rate, with sharded parameters")(drift(group(lr=0.02), SHARDS))
case("another weight decay, with sharded parameters")(drift(group(weight_decay=0.1), SHARDS, small))
case("other betas")(drift(group(betas=(0.5, 0.999)), make=small))
case("a scheduler of one rank's own")(drift(scheduled, SHARDS))
case("zero_grad forgotten once")(drift(nothing, when="without zero_grad"))
case("gradients clipped on one rank")(drift(gradients(lambda g: g.clamp_(-1e-4, 1e-4)), when="always"))
case("gradients scaled on one rank, AdamW at 1e-5")(
    drift(gradients(lambda g: g.mul_(-1)), make=small, when="always")
)
case("noise of another seed in a parameter")(drift(noise))
case("a gradient lost on one rank")(drift(gradients(lambda g: g.zero_())))
case("a buffer changed on one rank")(
    drift(lambda net, optimizer: net.get_buffer("norm.running_mean").add_(0.1), model=Normed)
)


@case("an update by hand that one rank skips")
def _by_hand(rank: int) -> None:
    net = parallel(constraints=REPLICAS)
    number = 0
    while True:
        step(net, batch(number))
        if number == GOES_WRONG:
            mark()
        with torch.no_grad():
            for parameter in net.parameters():
                if rank != ODD or number != GOES_WRONG:
                    parameter -= 0.05 * parameter.grad  # type: ignore[operator]
                parameter.grad = None
        number += 1


@case("a batch skipped on one rank")
def _skipped_batch(rank: int) -> None:
    net = parallel()
    number = 0
    while True:
        step(net, batch(number))
        if number == GOES_WRONG:
            mark()
            number += rank == ODD
        number += 1


def skips(error: type[Exception], fault: Callable[[int, int], object]) -> Callable[[int], None]:
    """A script that takes `error` for a bad batch and goes on with the next. fault: of a rank in a step."""

    def run(rank: int) -> None:
        net = parallel()
        number = 0
        while True:
            with suppress(error):
                if number == GOES_WRONG:
                    mark()
                    fault(rank, number)
                step(net, batch(number + 1000 * (rank == ODD and number > GOES_WRONG and fault is none)))
            number += 1

    return run


def none(rank: int, number: int) -> None:
    """Other inputs from then on."""


case("other inputs, where ValueError skips a batch")(skips(ValueError, none))
case("killed, where ValueError skips a batch")(skips(ValueError, lambda rank, _: rank == ODD and kill()))
case("the loader raises, where PlanError skips a batch")(
    skips(autoshard.PlanError, lambda rank, _: rank == ODD and raise_(OSError("no such file")))
)


def beside(own: Callable[[], Callable[[], object]], run: Callable[[int], None]) -> Callable[[int], None]:
    """`run`, and then whether what is the script's own is as it was. own: sets it up, and returns what looks."""

    def both(rank: int) -> None:
        look = own()
        try:
            run(rank)
        except autoshard.RankError:
            look()
            raise

    return both


def server() -> Callable[[], object]:
    """On this host alone, as a notebook's or a debugger's, with a connection of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    served = listener.accept()[0]

    def look() -> None:
        served.settimeout(10.0)
        client.sendall(b"x")
        if served.recv(1) != b"x" or listener.fileno() < 0:
            raise ConnectionError("the script's own connection was cut")

    return look


def default_timeout(seconds: float) -> Callable[[], Callable[[], object]]:
    def own() -> Callable[[], object]:
        socket.setdefaulttimeout(seconds)
        return lambda: None

    return own


def lock() -> Callable[[], object]:
    file = open(f"/tmp/autoshard-fault-{os.getpid()}", "w")  # noqa: SIM115
    fcntl.lockf(file, fcntl.LOCK_EX)

    def look() -> None:
        tries = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        code = subprocess.run(
            [sys.executable, "-c", tries, file.name], capture_output=True, check=False
        ).returncode
        os.unlink(file.name)
        if code == 0:
            raise BlockingIOError("the script's own lock was given up")

    return look


case("killed, with a default timeout of sockets")(beside(default_timeout(30.0), during(kill)))
case("killed, with sockets that never wait")(beside(default_timeout(0.0), during(kill)))
case("the loader raises, with a default timeout of sockets")(
    beside(default_timeout(30.0), during(lambda: raise_(OSError("no such file"))))
)
case("killed, beside a server of the script's own")(beside(server, during(kill)))
case("Ctrl-C, beside a server of the script's own")(beside(server, during(lambda: kill(signal.SIGINT))))
case("killed, beside a lock on a file")(beside(lock, during(kill)))


def in_setup(fault: Callable[[], object], odd: int) -> Callable[[int], None]:
    """While the memory that ranks of a host share is set up, in the first step."""

    def run(rank: int) -> None:
        joined = cost_model.measure.host_memory._joined

        def faulty(*args: Any) -> Any:
            mark()
            if rank == odd:
                fault()
            return joined(*args)

        cost_model.measure.host_memory._joined = faulty
        train(parallel())

    return run


case("killed while memory is shared")(in_setup(kill, ODD))
case("rank 0 killed while memory is shared")(in_setup(kill, 0))


@case("raises at the end of a short script")
def _short_script(rank: int) -> None:
    net = parallel(constraints=REPLICAS)
    with torch.no_grad():
        net(batch())
    mark()
    if rank == ODD:
        raise OSError("no space left")
    threading.Event().wait(1.0)
    dist.barrier()
