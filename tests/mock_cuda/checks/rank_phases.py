"""A rank's forward and backward, on the rank's device, as a session makes them: the one place that knows how."""

from __future__ import annotations

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autoshard.call_ends import output_layouts
from autoshard.plan.plan_fits import axes_in
from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.runtime.process_groups import groups_for
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.lower.rank_program import rank_program
from tests.mock_cuda.checks.capture_for import captured_for_cuda
from tests.mock_cuda.checks.families import Example

__all__ = ["rank_phases"]

TIME_LIMIT = 600.0
"""Seconds for a search that takes ten: a busy machine is no failure."""


def rank_phases(case: Example, mesh: DeviceMesh, ranks: tuple[int, ...]) -> dict[str, fx.GraphModule]:
    """ "rank 0 forward" and so on -> the graph that is compiled for it. mesh: of the ranks;
    all run on cuda:0, also where a mesh of CPUs stands for them."""
    spec = MeshSpec(dict(zip(MeshSpec.of(mesh).names, mesh.shape, strict=True)), "cuda")
    captured = captured_for_cuda(case.model, case.args, case.kwargs)
    call = CallLayouts({}, output_layouts(captured, spec, None))
    plan = search_plan(Task(captured, Profile.named("h100"), spec, call, {}, None, "inductor", TIME_LIMIT))
    assert not plan.fallbacks, plan.fallbacks
    groups = groups_for(mesh, axes_in(plan))
    found: dict[str, fx.GraphModule] = {}
    for rank in ranks:
        ours = rank_program(captured.joint, plan.planned, spec, rank, groups)
        found[f"rank {rank} forward"] = ours.phases.forward
        if ours.phases.backward is not None:
            found[f"rank {rank} backward"] = ours.backward().module
    return found
