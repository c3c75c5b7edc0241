"""What the tests of refining share: a small task, and times that somebody invents."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autoshard.plan.task import CallLayouts, Task
from autoshard.planning import canonical_capture
from autoshard.refine.timed_cases import Case
from cost_model.compute import ComputePrices
from cost_model.groups import group_shape
from cost_model.mesh import MeshSpec
from cost_model.timed import TimedCollective, TimedKernel, TimedPrices
from passes.predict.step_work import CollectiveCase, KernelCase
from tests.profiles import slow_compute

MESH = MeshSpec({"x": 2})


def task(rows: int = 8, mesh: MeshSpec = MESH) -> Task:
    """Two linear layers, and prices under which splitting pays."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    captured = canonical_capture(model, (torch.randn(rows, 16),), {})
    return Task(captured, slow_compute(), mesh, CallLayouts({}, {0: None}), {}, None, "eager", 60.0)


def timed(
    one: Task,
    cases: tuple[Case, ...],
    kernel_factor: Callable[[KernelCase], float] = lambda _: 1.0,
    collective_factor: Callable[[CollectiveCase], float] = lambda _: 1.0,
) -> TimedPrices:
    """What the model says of each case, times a factor."""
    model = ComputePrices(one.profile)
    kernels = [case for case in cases if isinstance(case, KernelCase)]
    collectives = [case for case in cases if isinstance(case, CollectiveCase)]
    price = one.prices.redistributor.collective_seconds
    return TimedPrices(
        tuple(TimedKernel(c.key, c.work, kernel_factor(c) * model.work_seconds(c.work)) for c in kernels),
        tuple(
            TimedCollective(
                c.kind,
                group_shape(one.mesh, c.axes),
                c.nbytes,
                collective_factor(c) * price(c.kind, c.axes, c.nbytes),
            )
            for c in collectives
        ),
    )
