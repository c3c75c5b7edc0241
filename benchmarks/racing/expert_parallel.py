"""Experts split over ranks, as a user writes it: a style for `parallelize_module`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["ExpertParallel"]


class ExpertParallel(ParallelStyle):
    """Of a module of stacked experts (x, gates) -> their sum: each rank keeps its share, and the results are added."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, parts, mine = device_mesh.get_group(), device_mesh.size(), device_mesh.get_local_rank()
        for name, parameter in list(module.named_parameters(recurse=False)):
            share = parameter.detach().chunk(parts)[mine].clone()
            setattr(module, name, nn.Parameter(share))

        # Messages between ranks are no ops of a graph: a compiler compiles what lies between them.
        @torch.compiler.disable
        def take(_: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, gates = (_Shared.apply(value, group) for value in args)
            return x, gates.chunk(parts, -1)[mine]

        module.register_forward_pre_hook(take)
        module.register_forward_hook(
            torch.compiler.disable(lambda _, args, output: _Added.apply(output, group))
        )
        return module


class _Shared(torch.autograd.Function):
    """The same on all ranks; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        grad = grad_outputs[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Added(torch.autograd.Function):
    """The sum of the ranks'; its gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None
