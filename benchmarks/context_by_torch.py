"""The ring of `torch.distributed.tensor.experimental.context_parallel`, on CPUs.

It has rings for torch's CUDA kernels alone. On CPUs `F.scaled_dot_product_attention` becomes
`_scaled_dot_product_flash_attention_for_cpu`, for which DTensor has no rule, and the call ends with NotImplementedError
(torch 2.13; the math kernel with a RuntimeError, "got mixed torch.Tensor and DTensor"). So the CPU's kernel is made the
CPU's form of `_scaled_dot_product_flash_attention`, whose ring is torch's own, and called by that name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel

__all__ = ["ROTATIONS", "TorchRing", "cpu_kernel"]

ROTATIONS = ("allgather", "alltoall")
"""How keys and values come to a rank, the default first; gradients of keys always go by all-to-alls."""

LENGTH = 2
"""The dim of queries and of keys."""
aten = torch.ops.aten


@contextlib.contextmanager
def cpu_kernel() -> Generator[None]:
    """While it lasts, CPUs have an `aten._scaled_dot_product_flash_attention`, and its backward."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", _backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: bool,
    scale: Any = None,
) -> tuple[Any, ...]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, scale=scale)
    none = q.new_empty(())
    return out, lse, none, none, q.shape[LENGTH], k.shape[LENGTH], none, none, none


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *given: Any,
    scale: Any = None,
) -> tuple[Tensor, ...]:
    _, _, _, _, dropout_p, is_causal, _, _ = given
    how = dropout_p, is_causal
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, *how, scale=scale
    )


class TorchRing:
    """Steps of `model` on a rank's tokens: pieces r and 2n - 1 - r of 2n, where torch puts them before the step.

    model: (x, attend) -> y. x: of all tokens, [1, tokens, width]. Gradients of weights are added up over the ranks in
    one all-reduce. Within `cpu_kernel` only.
    """

    def __init__(self, model: torch.nn.Module, x: Tensor, mesh: DeviceMesh, rotation: str) -> None:
        self.model, self.mesh, self.rotation = model, mesh, rotation
        rank, n = mesh.get_local_rank(), mesh.size()
        pieces = x.chunk(2 * n, 1)
        self.x = torch.cat([pieces[rank], pieces[2 * n - 1 - rank]], 1).requires_grad_()
        self.tangent = torch.randn_like(self.x)
        self.gradients: list[Tensor] = []

    def step(self) -> Tensor:
        # `set_rotate_method` is public in a module whose name is not.
        inspect.unwrap(context_parallel).__globals__["set_rotate_method"](self.rotation)
        none = torch.empty(1, 2 * self.mesh.size(), 1)
        with context_parallel(self.mesh, buffers=[none], buffer_seq_dims=[1]):
            y = self.model(self.x, self._attend)
            grads = torch.autograd.grad(y, [self.x, *self.model.parameters()], self.tangent)
        flat = torch.cat([grad.reshape(-1) for grad in grads[1:]])
        dist.all_reduce(flat, group=self.mesh.get_group())
        self.gradients = [grads[0], *flat.split([grad.numel() for grad in grads[1:]])]
        return y.detach()

    def _attend(self, *given: Tensor) -> Tensor:
        q, k, v = (DTensor.from_local(x, self.mesh, [Shard(LENGTH)], run_check=False) for x in given)
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0].to_local()
