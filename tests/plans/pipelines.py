"""Small models planned in stages, shared by tests."""

from __future__ import annotations

import functools

import torch

from autoshard.plan.plan import PipelinePlan
from autoshard.plan.plan_stages import plan_stages
from autoshard.plan.task import CallLayouts, Task
from autoshard.planning import canonical_capture
from cost_model.mesh import MeshSpec
from tests.profiles import slow_compute
from tests.stages.stage_models import MODELS

PP, SQUARE = MeshSpec({"pp": 2}), MeshSpec({"pp": 2, "tp": 2})


def stage_task(
    name: str, mesh: MeshSpec = PP, *, training: bool = True, memory_limit: int | None = None
) -> Task:
    """Of a call of one of the models of `tests.stages`, on a machine on which small models are worth splitting."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    with torch.set_grad_enabled(training):
        captured = canonical_capture(model.train(training), args, kwargs)
    return Task(captured, slow_compute(), mesh, CallLayouts({}, {}), {}, memory_limit, "eager", 600.0)


@functools.cache
def planned(name: str, mesh: MeshSpec = PP, pieces: int = 1, schedule: str | None = None) -> PipelinePlan:
    return plan_stages(stage_task(name, mesh), "pp", pieces, schedule=schedule)
