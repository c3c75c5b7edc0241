"""A Triton kernel of your own, split like any op: with its gradient, its rule, and plain torch where there is no GPU.

torchrun --nproc-per-node 2 examples/triton_kernel.py
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.library import triton_op, wrap_triton

from autoshard import autoshard, register_rule

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:  # torch for the CPU comes without it
    triton: Any = None
    tl: Any = None


def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a row. A rank's part may have any number of rows: the grid is taken from its shape."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    here = at < width
    values = tl.load(x + row * width + at, mask=here, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    weights = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, values * scale * weights, mask=here)


if triton is not None:
    rms_norm_kernel = triton.jit(rms_norm_kernel)


def by_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim. x: [..., width]; weight: [width]."""
    x, weight = x.contiguous(), weight.contiguous()  # a rank's part may lie in memory in another order
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    wrap_triton(rms_norm_kernel)[(x.numel() // width,)](x, weight, out, width, eps, BLOCK=block)
    return out


rms_norm = triton_op("example::rms_norm", by_triton, mutates_args=())


@rms_norm.register_kernel("cpu")
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.contiguous() * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What capture sees: shape, dtype and strides. Without it `by_triton` is run, which needs Triton."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    """In torch's ops, which have rules. A kernel here would be an op of its own, with a rule of its own."""
    x, weight = ctx.saved_tensors
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
    normed, scaled = x * scale, gradient * weight
    of_x = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return of_x, (gradient * normed).flatten(0, -2).sum(0), None


rms_norm.register_autograd(backward, setup_context=setup_context)

# Rows are independent, and a row is not split: its mean is of all of it. Linear in the weight, so that a weight with a
# pending sum may pass. The rule is tried on small random tensors when a plan first asks for it.
register_rule(rms_norm, "*rows d, d -> *rows d; d: whole", linear=[{1}])


class Block(nn.Module):
    """x: [batch, length, width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(rms_norm(x, self.weight, 1e-6))))


class Model(nn.Module):
    """The loss of predicting x from x."""

    def __init__(self, width: int = 64, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for block in self.blocks:
            out = block(out)
        return F.mse_loss(out, x.roll(1, -1))


def train(mesh: DeviceMesh | None, steps: int, device: torch.device, **options: Any) -> list[float]:
    """mesh: None trains in one process."""
    torch.manual_seed(0)
    model: nn.Module = Model().to(device)
    x = torch.randn(8, 16, 64, device=device)
    if mesh is not None:
        model = autoshard(model, mesh, (x,), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend", default="inductor")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    losses = train(mesh, arguments.steps, device, backend=arguments.backend)
    if dist.get_rank() == 0:
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
