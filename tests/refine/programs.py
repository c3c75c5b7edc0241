"""What the ranks of these tests run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import autoshard, find_plan
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import Candidate, candidates
from autoshard.plan.task import Task
from autoshard.refine import rounds
from autoshard.refine.refine import DividedRounds
from autoshard.refine.time_work import time_work
from cost_model.timed import KernelKey, KernelWork, TimedPrices
from passes.compile.single_kernel import compile_group
from passes.predict.step_work import CollectiveCase, KernelCase, OpCall, Operand, TensorLook
from tests.profiles import slow_compute


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("x",))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def given() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def measured() -> Any:
    """Prices that count as this machine's."""
    return replace(slow_compute(), nominal=False)


@contextmanager
def steadily_timed(folder: str) -> Iterator[tuple[pytest.MonkeyPatch, list[int]]]:
    """What is kept on disk is in `folder`, and all that is timed takes as long; how much was, each time."""
    counts: list[int] = []

    def counted(mesh: DeviceMesh, cases: Any, seconds: float, backend: str) -> TimedPrices:
        counts.append(len(cases))
        return time_work(mesh, cases, seconds, Steady(), backend)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr("autoshard.refine.refine.time_work", counted)
        yield patch, counts


def refined(
    rank: int, folder: str, refine: str, searches: bool = True
) -> tuple[Plan, int, torch.Tensor, list[str]]:
    """A small model's plan, how often something was timed, the model's output, and what rank 0 logs."""
    x = given()
    with steadily_timed(folder) as (patch, counts):
        if not searches:
            patch.setattr(rounds, "search_plan", lambda *given, **named: pytest.fail("searched again"))
        whole = autoshard(
            model(), mesh(), (x,), profile=measured(), tune="first", backend="eager", refine=refine
        )
        files = sorted(path.name.partition("-")[0] for path in (Path(folder) / "autoshard").glob("timed-*"))
    return replace(whole.autoshard_plan, again=None), sum(counts), whole(x).detach(), files  # type: ignore[type-var]


def found(rank: int, folder: str) -> tuple[Plan, bool]:
    """`find_plan(refine="auto")` on every rank, and whether this rank's plan can search."""
    with steadily_timed(folder):
        plan = find_plan(
            model(), mesh(), (torch.ones(8, 16),), profile=measured(), backend="eager", refine="auto"
        )
    return replace(plan, again=None), plan.again is not None


def raced(rank: int, folder: str) -> list[bool]:
    """Of the plans that race beside a refined one, whether they were found under what was timed."""
    known: list[bool] = []

    def noted(task: Task, count: int) -> list[Candidate]:
        known.append(bool(task.timed and task.timed.kernels))
        return candidates(task, count)

    with steadily_timed(folder) as (patch, _):
        patch.setattr("autoshard.plan.division.cached_candidates", noted)
        autoshard(model(), mesh(), (given(),), profile=measured(), tune="first", backend="eager", race=2)
    return known


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def trained_alone() -> torch.Tensor:
    return WithLoss()(given()).detach()


def refined_in_parts(rank: int, folder: str, division: Any) -> tuple[Any, str, int, torch.Tensor]:
    """A plan in pieces or stages: what it was found with, its fingerprint, how much was timed, the model's loss."""
    with steadily_timed(folder) as (patch, counts):
        patch.setattr(
            "autoshard.refine.refine.DividedRounds", partial(DividedRounds, budget=lambda *_: 1000.0)
        )
        whole = autoshard(
            WithLoss(), mesh(), (given(),), profile=measured(), tune="first", backend="eager", **division
        )
    plan = whole.autoshard_plan
    return plan.origin, plan.fingerprint, sum(counts), whole(given()).detach()  # type: ignore[union-attr, return-value]


def timed_cases(rank: int) -> TimedPrices:
    """A product, an op that no rank can run, and a collective, timed on two ranks."""
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    looks = TensorLook((8, 16), (16, 1), torch.float32), TensorLook((16, 4), (4, 1), torch.float32)

    def kernel(name: str, *given: TensorLook) -> KernelCase:
        key, work = KernelKey(name, tuple(look.shape for look in given)), KernelWork(1024.0, 896.0, "float32")
        call = OpCall(name, tuple(map(Operand, range(len(given)))), {})
        return KernelCase(key, work, (call,), given, (False,) * len(given), 1e-3)

    cases = (
        kernel("aten.mm.default", looks[0], looks[0]),
        kernel("aten.mm.default", *looks),
        CollectiveCase("all_reduce", ("x",), 4096, 1e-3),
        CollectiveCase("all_gather", ("x",), 4096, 1e-3),
    )
    try:
        return time_work(mesh(), cases, 10.0, Steady())
    finally:
        logging.getLogger("torch._subclasses.fake_tensor").disabled = False


def timed_groups(rank: int) -> tuple[TimedPrices, list[str]]:
    """Three fused groups, of which no compiler can make the second, on two ranks; and what this rank compiled ahead."""
    looks = tuple(TensorLook((8, n), (n, 1), torch.float32) for n in (16, 4))
    compiled: list[str] = []

    def group(op: str, *given: TensorLook) -> KernelCase:
        call = OpCall(op, tuple(map(Operand, range(len(given)))), {})
        key, work = KernelKey(op, tuple(look.shape for look in given)), KernelWork(1024.0, 896.0, "float32")
        return KernelCase(key, work, (call,), given, (False,) * len(given), 1e-3, fused=True, inner=(work,))

    def noted(case: KernelCase, *where: Any) -> None:
        compiled.append(case.op)
        compile_group(case, *where)

    cases = (
        group("aten.neg.default", looks[0]),
        group("aten.add.Tensor", *looks),
        group("aten.exp.default", looks[0]),
    )
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("autoshard.refine.time_work.compile_group", noted)
            return time_work(mesh(), cases, 10.0, Steady()), compiled
    finally:
        logging.getLogger("torch._subclasses.fake_tensor").disabled = False


class Steady:
    """A clock by which all that is run takes a millisecond: what else the machine does is no part of a test."""

    def now(self) -> float:
        return 0.0

    def seconds(self, work: Callable[[], object], calls: int, ahead: bool = False) -> float:
        for _ in range(min(calls, 2)):
            work()
        return 1e-3


class Disturbed:
    """A clock by which half of the repetitions take ten times as long."""

    def __init__(self) -> None:
        self.count = 0

    def now(self) -> float:
        return 0.0

    def seconds(self, work: Callable[[], object], calls: int, ahead: bool = False) -> float:
        self.count += 1
        return 1e-3 if self.count // 2 % 2 else 1e-2


def disturbed(rank: int) -> TimedPrices:
    return time_work(mesh(), (CollectiveCase("all_reduce", ("x",), 4096, 1e-3),), 10.0, Disturbed())


def no_time(rank: int) -> TimedPrices:
    return time_work(mesh(), (CollectiveCase("all_reduce", ("x",), 4096, 1e-3),), 0.0)
