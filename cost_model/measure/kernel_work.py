"""Work of one device: matrix products, memory traffic, launches, a collective behind products, and what the rate of
products does not predict: convolutions, attention, the optimizer.

The series that measure one device, and the rates of a profile from their curves.

All ranks compute at once, because they share cores and memory in a step. A rate is the median rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cost_model.measure.clock import Work
from cost_model.measure.peers import Team
from cost_model.measure.sampling import Series, by_device
from cost_model.measurements import DeviceRates, MatmulRates, SampledCurve, UpdateRates, median, monotone

LAUNCHES = 50
"""Ops in the graph of `_launch_work`. A GPU queues about a thousand before its host waits, and 16 runs are issued at
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


def _launch_work(device: torch.device) -> Work:
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


def _convolution_flops(shape: tuple[int, int, int]) -> int:
    """Operations of the forward alone: 2 n c c 3 3 s s for (n, c, s)."""
    batch, channels, side = shape
    return 2 * batch * channels * channels * 9 * side * side


def _convolution_work(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Work:
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


def _attention_flops(shape: tuple[int, int, int, int]) -> int:
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


def _pooling_flops(shape: tuple[int, int, int]) -> int:
    """Comparisons of `_pooling_work`: n c s s (1 + 9 / 4) for (n, c, s)."""
    batch, channels, side = shape
    return batch * channels * side * side * 13 // 4


def _pooling_work(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Work:
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


DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}

_LEAST_SECONDS = {"cpu": 60e-3, "cuda": 5e-3}
"""In 60 ms all ranks that share a core have had their turns. Four ranks on two cores reach 90 GFLOP/s each alone; they
measured 57 with 10 ms and 45, their share, with 60 ms. A GPU is not shared, and products of 8192 have to fit in the
seconds of a start: with 60 ms those of an H100 ended at 1024, and their rate, half of the best, stood for all above."""

_EDGES = {"cpu": (16, 32, 64, 128, 256, 512, 1024, 2048), "cuda": (64, 128, 256, 512, 1024, 2048, 4096, 8192)}
_MEMORY_NBYTES = {"cpu": (2**22, 2**23, 2**24, 2**25), "cuda": (2**24, 2**26, 2**28, 2**29)}
_UPDATES = {"cpu": (2**6, 2**20, 2**22, 2**24), "cuda": (2**6, 2**22, 2**26, 2**28)}


@dataclass(frozen=True)
class _Kernel:
    """A kind of `DeviceRates` that is measured in the dtype the device is used with most.

    shapes: by type of device. work: of a shape; passes: its operations over `flops`, which are the forward's.
    """

    name: str
    shapes: Mapping[str, Sequence[Any]]
    flops: Callable[[Any], int]
    work: Callable[..., Work]
    passes: float = 1.0


_KERNELS = {
    "convolution": _Kernel(
        "convolutions",
        {
            "cpu": ((2, 16, 16), (4, 32, 16), (8, 64, 16), (8, 64, 32)),
            "cuda": ((8, 64, 16), (16, 64, 32), (32, 128, 32), (64, 256, 32)),
        },
        _convolution_flops,
        _convolution_work,
        3.0,
    ),
    "attention": _Kernel(
        "attention",
        {
            "cpu": ((1, 4, 64, 64), (2, 4, 128, 64), (2, 8, 256, 64), (2, 8, 512, 64)),
            "cuda": ((2, 8, 256, 64), (4, 16, 512, 64), (4, 16, 2048, 64), (4, 16, 4096, 128)),
        },
        _attention_flops,
        attention_work,
        3.5,
    ),
    "pooling": _Kernel(
        "max-pooling",
        {
            "cpu": ((2, 16, 16), (8, 16, 32), (8, 64, 32)),
            "cuda": ((16, 64, 32), (32, 128, 32), (64, 256, 64)),
        },
        _pooling_flops,
        _pooling_work,
    ),
    "narrow_convolution": _Kernel(
        "narrow convolutions",
        {
            "cpu": ((1, 8, 16), (1, 8, 64), (1, 8, 128)),
            "cuda": ((8, 8, 64), (8, 8, 256), (16, 8, 512)),
        },
        _convolution_flops,
        _convolution_work,
        3.0,
    ),
}


def device_series(device: torch.device) -> list[Series]:
    """Launch, memory, then products by dtype, as `device_rates` reads them."""
    sizes, least = tuple(matmul_flops(edge) for edge in by_device(_EDGES, device.type)), least_seconds(device)
    return [
        _series("launch", (LAUNCHES,), lambda _: _launch_work(device), least),
        _series("memory", by_device(_MEMORY_NBYTES, device.type), partial(memory_work, device=device), least),
        # Every second size of products is always measured, up to the fifth.
        *(
            _series(
                f"{name} products", sizes, lambda n, t=dtype: matmul_work(matmul_edge(n), t, device), least, 2
            )
            for name, dtype in DTYPES.items()
        ),
    ]


def kernel_series(
    device: torch.device, mesh: DeviceMesh | None, attend: Attend | None = None
) -> list[Series]:
    """Convolutions, attention, max-pooling, then the AdamW update, as `with_kernel_rates` reads them.

    mesh: the mesh that holds the parameters; None without processes. attend: computes an attention.
    """
    found: list[Series] = []
    dtype, least = DTYPES[_dtype(device)], least_seconds(device)
    for kernel in _KERNELS.values():
        shapes = {kernel.flops(shape): shape for shape in by_device(kernel.shapes, device.type)}
        work = partial(attention_work, attend=attend) if kernel.work is attention_work else kernel.work
        prepare = lambda n, shapes=shapes, work=work: work(shapes[n], dtype, device)
        found.append(_series(kernel.name, tuple(shapes), prepare, least))
    update = lambda nbytes: update_work(nbytes, device, mesh)
    return [*found, _series("AdamW update", by_device(_UPDATES, device.type), update, least)]


def least_seconds(device: torch.device) -> float:
    """The least seconds of a repetition."""
    return by_device(_LEAST_SECONDS, device.type)


def _series(
    name: str, sizes: tuple[int, ...], prepare: Callable[[int], Work], least: float, apart: int = 1
) -> Series:
    """apart: of the sizes that are always measured."""
    return Series(name, sizes, prepare, median, least, sizes[: 2 * apart + 1 : apart], ahead=True)


def device_rates(curves: Sequence[SampledCurve]) -> DeviceRates:
    """The rates from the curves of `device_series`. Memory bandwidth is that of the largest array."""
    launch, memory, *products = curves
    return DeviceRates(
        launch_seconds=launch.seconds[0] / LAUNCHES,
        memory_bytes_per_second=memory.sizes[-1] / memory.seconds[-1],
        # Two products at a time.
        matmul=tuple(_rates(name, curve, 2.0) for name, curve in zip(DTYPES, products, strict=True)),
    )


def with_kernel_rates(
    rates: DeviceRates, curves: Sequence[SampledCurve], device: torch.device
) -> DeviceRates:
    """`rates` with those of the curves of `kernel_series`."""
    *kernels, update = curves
    slope = (update.seconds[-1] - update.seconds[0]) / (update.sizes[-1] - update.sizes[0])
    found = {
        kind: (_rates(_dtype(device), curve, kernel.passes),)
        for (kind, kernel), curve in zip(_KERNELS.items(), kernels, strict=True)
    }
    # Curves are monotone, but a noisy machine may leave no difference to divide by.
    bandwidth = 1.0 / slope if slope > 0 else rates.memory_bytes_per_second
    return replace(
        rates, **found, update=UpdateRates(update.seconds[0] / updated_together(device), bandwidth)
    )


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def _rates(dtype: str, curve: SampledCurve, passes: float) -> MatmulRates:
    """Rates by the forward's operations. A curve's seconds are of `passes` times as many operations."""
    flops = tuple(map(float, curve.sizes))
    seconds = monotone([s / passes for s in curve.seconds])
    return MatmulRates(dtype, flops, tuple(n / s for n, s in zip(flops, seconds, strict=True)), curve.spread)
