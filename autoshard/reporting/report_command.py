"""`autoshard report`: train a model for a few steps on the ranks that torchrun started, and print the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autoshard.api import autoshard
from autoshard.calls.global_call import as_call
from autoshard.plan.plan import Plan
from autoshard.reporting.report_steps import StepReport, report
from autoshard.started_mesh import started_mesh
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.ir.torch_dtensor import local_of


@dataclass(frozen=True)
class ReportOptions:
    """mesh: of the plan that is searched where `plan` is None. write_profile: where the corrected
    profile goes. Others as for `autoshard` and `report`."""

    plan: Plan | None
    mesh: Mapping[str, int] | None
    device: str
    profile: str | None
    backend: str
    steps: int
    warmup: int
    write_profile: Path | None


def run_report(model: nn.Module, example_inputs: Any, options: ReportOptions) -> int:
    """Every rank calls this; rank 0 prints. Parameters and inputs on `meta` get random values.

    The loss is the output's `loss`, else its first scalar, else the mean square of its first tensor; the
    optimizer is AdamW. Raises ShardingError unless as many ranks were started as the mesh has.
    """
    spec = _mesh_spec(options)
    with started_mesh(dict(zip(spec.names, spec.sizes, strict=True)), spec.device_type) as mesh:
        train_and_report(model, example_inputs, options, mesh)
    return 0


def _mesh_spec(options: ReportOptions) -> MeshSpec:
    if options.plan is not None:
        return options.plan.mesh
    if options.mesh is None:
        raise ShardingError("report: neither a plan nor a mesh\n  try: --plan plan.json, or --mesh dp=2,tp=4")
    return MeshSpec(options.mesh, device_type=options.device)


def train_and_report(model: nn.Module, example_inputs: Any, options: ReportOptions, mesh: DeviceMesh) -> None:
    """`run_report` on ranks that have a process group already."""
    device = torch.device(mesh.device_type)
    args, kwargs = pytree.tree_map(lambda leaf: _real(leaf, device), as_call(example_inputs))
    if not any(p.is_meta for p in model.parameters()):
        model.to(device)
    autoshard(
        model, mesh, (args, kwargs), plan=options.plan, profile=options.profile, backend=options.backend
    )
    _fill(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with report(model, warmup=options.warmup) as measured:
        for _ in range(options.steps):
            loss_of(model(*args, **kwargs)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(measured.text(), end="")
        if options.write_profile is not None:
            assert isinstance(measured, StepReport), "plans with stages are not among the options"
            measured.corrected().save(options.write_profile)
            print(f"\nsaved {options.write_profile}")
    dist.barrier()


def _real(leaf: Any, device: torch.device) -> Any:
    """An argument on `device`; on `meta` it has no values, so zeros, which any integer input allows."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if leaf.is_meta else leaf.to(device)


def _fill(model: nn.Module, device: torch.device) -> None:
    """Small random values for what is on `meta`."""
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return
    model.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local = local_of(tensor)
            if local.is_floating_point():
                local.normal_(0.0, 0.02)
            else:
                local.zero_()


def loss_of(outputs: Any) -> Tensor:
    """What to differentiate of a model's outputs; ShardingError if nothing can be."""
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if isinstance(loss, Tensor):
        return loss
    tensors = [
        leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not tensors:
        raise ShardingError("report: the model's outputs need no gradient\n  try: a model with a loss")
    scalars = [t for t in tensors if t.ndim == 0]
    return scalars[0] if scalars else tensors[0].float().square().mean()
