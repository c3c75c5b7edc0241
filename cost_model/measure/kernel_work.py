"""Work of one device: matrix products, memory traffic, launches, a collective behind products, and what the rate of
products does not predict: convolutions, attention, the optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cost_model.measure.clock import Work
from cost_model.measure.peers import Team

LAUNCHES = 50
"""Ops in the graph of `launch_work`. A GPU queues about a thousand before its host waits, and 16 runs are issued at
once."""


def matmul_flops(edge: int) -> int:
    """Operations of each product of `matmul_work(edge)`: 2 m n k."""
    return 2 * edge**3


def matmul_edge(flops: float) -> int:
    """The `edge` whose `matmul_flops` come nearest to `flops`."""
    return round((flops / 2) ** (1 / 3))


def matmul_work(edge: int, dtype: torch.dtype, device: torch.device) -> Work:
    """Two products of 2 edge^3 operations: a square one, and a flat one against a transposed weight.

    [edge, edge] @ [edge, edge] and [edge / 4, 2 edge] @ [2 edge, 2 edge]^T: the rate of a size is the mean
    over both. A step has both forms: few rows against a large weight, and large square ones.
    """
    square, rows, weight = (
        _random(shape, device).to(dtype)
        for shape in ((edge, edge), (edge // 4, 2 * edge), (2 * edge, 2 * edge))
    )

    def products() -> None:
        torch.mm(square, square)
        torch.mm(rows, weight.t())

    return products


def _random(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Random values, as GPUs clock higher on constants. They do not come from the user's generator."""
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))


def memory_work(nbytes: int, device: torch.device) -> Work:
    """One pointwise op that moves `nbytes` in all: it reads half of them and writes a new array."""
    x = torch.ones(nbytes // 8, dtype=torch.float32, device=device)
    return lambda: torch.mul(x, 2.0)


def launch_work(device: torch.device) -> Work:
    """A graph of `LAUNCHES` ops on 16 numbers, run op by op as an eager plan is."""
    graph = fx.Graph()
    x = node = graph.placeholder("x")
    for _ in range(LAUNCHES):
        node = graph.call_function(torch.ops.aten.add.Tensor, (node, x))
    graph.output(node)
    module = fx.GraphModule({}, graph)
    value = torch.ones(16, device=device)
    return lambda: module(value)


def overlap_works(
    team: Team, nbytes: int, edge: int, products: int, device: torch.device
) -> tuple[Work, Work, Work]:
    """An all-reduce of `nbytes`; `products` matrix products; the all-reduce with the products inside it."""
    whole = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    square = _random((edge, edge), device)
    reduce, wait = (
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.wait_tensor.default,
    )

    def communicate() -> None:
        wait(reduce(whole, "sum", team.name))

    def compute() -> None:
        for _ in range(products):
            torch.mm(square, square)

    def both() -> None:
        started = reduce(whole, "sum", team.name)
        compute()
        wait(started)

    return communicate, compute, both


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q [b, h, s, d], k, v) -> out: attention without a mask. The caller gives the kernel that plans run: torch's
`F.scaled_dot_product_attention` picks other kernels (cuDNN's on compute capability 9.0), at another speed."""


def convolution_flops(shape: tuple[int, int, int]) -> int:
    """Operations of the forward alone: 2 n c c 3 3 s s for (n, c, s)."""
    batch, channels, side = shape
    return 2 * batch * channels * channels * 9 * side * side


def convolution_work(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Work:
    """A 3 x 3 convolution of [n, c, s, s] to as many channels, and both its gradients: three times the forward's
    operations."""
    batch, channels, side = shape
    x = torch.randn(batch, channels, side, side, device=device).to(dtype)
    weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype)
    window = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def forward_and_backward() -> None:
        y = torch.ops.aten.convolution.default(x, weight, None, *window)
        torch.ops.aten.convolution_backward.default(y, x, weight, None, *window, [True, True, False])

    return forward_and_backward


def attention_flops(shape: tuple[int, int, int, int]) -> int:
    """Operations of the forward alone: 4 b h s s d for (b, h, s, d)."""
    batch, heads, length, width = shape
    return 4 * batch * heads * length * length * width


def attention_work(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, attend: Attend | None = None
) -> Work:
    """Scaled dot product attention of [b, h, s, d], and its gradients, by `attend` (None: torch's). Two products
    forward, and five backward, which computes the scores again: 3.5 times the forward's operations.

    Operands lie in memory as [b, s, h, d], as a projection leaves them.
    """
    batch, heads, length, width = shape
    compute = F.scaled_dot_product_attention if attend is None else attend

    def operand() -> torch.Tensor:
        return torch.randn(batch, length, heads, width, device=device).to(dtype).transpose(1, 2)

    q, k, v = (operand().requires_grad_() for _ in range(3))
    tangent = operand()
    return lambda: torch.autograd.grad(compute(q, k, v), (q, k, v), tangent)


def pooling_flops(shape: tuple[int, int, int]) -> int:
    """Comparisons of `pooling_work`: n c s s (1 + 9 / 4) for (n, c, s)."""
    batch, channels, side = shape
    return batch * channels * side * side * 13 // 4


def pooling_work(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Work:
    """Max-pooling of [n, c, s, s] by windows of 2 x 2 and of 3 x 3, stride 2."""
    x = torch.randn(shape[0], shape[1], shape[2], shape[2], device=device).to(dtype)
    pool = torch.ops.aten.max_pool2d_with_indices.default

    def both() -> None:
        pool(x, [2, 2], [2, 2])
        pool(x, [3, 3], [2, 2], [1, 1])

    return both


def update_work(nbytes: int, device: torch.device, mesh: DeviceMesh | None) -> Work:
    """A step of torch.optim.AdamW(fused=True) on float32 parameters of `nbytes` together, on each rank. Trainers use
    it (torchtitan, Hugging Face); op by op a step takes several times as long on CPUs.

    mesh: the parameters are DTensors on it, as in a sharded model; None: plain tensors.
    """
    count = updated_together(device)
    parameters: list[torch.nn.Parameter] = []
    for _ in range(count):
        local = torch.ones(nbytes // 4 // count, device=device)
        parameters.append(torch.nn.Parameter(_distributed(local, mesh)))
        parameters[-1].grad = _distributed(local.clone(), mesh)
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True).step


def updated_together(device: torch.device) -> int:
    """Parameters of `update_work`. A CPU updates them one by one, a GPU many with one kernel."""
    return 16 if device.type == "cuda" else 1


def _distributed(local: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    if mesh is None:
        return local
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    return DTensor.from_local(local, mesh, placements, run_check=False)
