"""A rank's forward and backward, on the rank's device, as a session makes them: the one place that knows how."""

from __future__ import annotations

from passes.lower_rank import lower_rank
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autoshard.outputs import output_layouts
from autoshard.planning import CallLayouts, Task, prices_of, search_plan
from autoshard.runtime.process_groups import groups_for
from autoshard.session import _axes_in
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.bucket_plan import bucketed_turns
from passes.phases import split_phases
from passes.schedule import scheduled
from tests.mock_cuda.checks.capture_for import captured_for_cuda
from tests.mock_cuda.checks.families import Example

__all__ = ["rank_phases"]


def rank_phases(case: Example, mesh: DeviceMesh, ranks: tuple[int, ...]) -> dict[str, fx.GraphModule]:
    """ "rank 0 forward" and so on -> the graph that is compiled for it. mesh: of the ranks; all run on cuda:0."""
    spec = MeshSpec.of(mesh)
    captured = captured_for_cuda(case.model, case.args, case.kwargs)
    call = CallLayouts({}, output_layouts(captured, spec, None))
    plan = search_plan(Task(captured, Profile.named("h100"), spec, call, {}, None, "inductor", 20.0))
    assert not plan.fallbacks, plan.fallbacks
    prices = prices_of(Profile.named("h100"), spec, "inductor")
    groups = groups_for(mesh, _axes_in(plan, spec))
    turns = bucketed_turns(captured.joint, plan.assignment, prices)
    found: dict[str, fx.GraphModule] = {}
    for rank in ranks:
        ours = lower_rank(captured.joint, plan.assignment, prices, rank, groups, turns)
        phases = split_phases(ours.module, captured.joint.inputs, captured.joint.outputs)
        found[f"rank {rank} forward"] = scheduled(phases.forward)
        if phases.backward is not None:
            found[f"rank {rank} backward"] = scheduled(phases.backward.module)
    return found
