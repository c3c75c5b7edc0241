"""Work of one device: matrix products, memory traffic, kernel launches, and a collective behind products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from cost_model.measure.collective_work import Team

__all__ = [
    "LAUNCHES",
    "launch_work",
    "matmul_edge",
    "matmul_flops",
    "matmul_work",
    "memory_work",
    "overlap_works",
]

LAUNCHES = 50
"""Ops in the graph of `launch_work`. A GPU queues about a thousand before its host waits, and 16 runs are issued at
once."""

Work = Callable[[], object]


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
