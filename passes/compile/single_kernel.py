"""One kernel of a rank's program by itself, as often in a row as it takes to time it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from passes.compile.compile_graph import compile_graph
from passes.ir.fake_calls import FakeCalls
from passes.ir.torch_compat import fake_mode_of, fresh_fakes
from passes.predict.step_work import KernelCase, TensorLook

__all__ = ["repeated_kernel"]

_COLD_NBYTES = 2**26
"""Bytes of tensors between two uses of one that is in no cache by then: twice a large last-level cache."""


def repeated_kernel(case: KernelCase, calls: int, device: torch.device) -> Callable[[], object]:
    """What runs the kernel `calls` times, op by op as eager programs do, on invented values.

    Operands that are cold in the program are so here: each call has its own, until they are more than caches hold.
    Raises whatever torch does for arguments that it refuses.
    """
    graph = fx.Graph()
    values: list[Tensor] = []
    generator = torch.Generator(device).manual_seed(0)

    def placeholder(look: TensorLook) -> fx.Node:
        values.append(_invented(look, device, generator))
        return graph.placeholder(f"x{len(values)}")

    copies = [
        [placeholder(look) for _ in range(_count(look, calls) if cold else 1)]
        for look, cold in zip(case.operands, case.cold, strict=True)
    ]
    fakes = fresh_fakes(values)
    for node, fake in zip(graph.nodes, fakes, strict=True):
        node.meta["val"] = fake
    run, result = FakeCalls(), None
    for call in range(calls):
        operands = iter([places[call % len(places)] for places in copies])
        args, kwargs = pytree.tree_map_only(
            TensorLook, lambda _, at=operands: next(at), (case.args, case.kwargs)
        )
        result = graph.call_function(_op(case.op), args, kwargs)
        result.meta["timed"] = True  # it runs, though nothing reads it
        result.meta["val"] = run(_op(case.op), args, kwargs, fake_mode_of(tuple(fakes)))
    assert result is not None
    graph.output((_first(graph, result),))
    compiled = compile_graph(fx.GraphModule(torch.nn.Module(), graph), "eager")

    def repeated() -> object:
        with torch.no_grad():
            return compiled(list(values))

    return repeated


def _count(look: TensorLook, calls: int) -> int:
    return max(1, min(calls, -(-_COLD_NBYTES // max(1, look.nbytes))))


def _first(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The first result of an op of several."""
    value: Any = node.meta["val"]
    if isinstance(value, Tensor):
        return node
    index = next(i for i, item in enumerate(value) if item is not None)
    first = graph.call_function(operator.getitem, (node, index))
    first.meta["val"] = value[index]
    return first


def _op(name: str) -> Callable[..., Any]:
    """ "aten.add.Tensor" -> the op."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _invented(look: TensorLook, device: torch.device, generator: torch.Generator) -> Tensor:
    """Random values, as GPUs clock higher on constants; of integers and truth values only ones."""
    value = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device=device)
    if look.dtype.is_floating_point and look.dtype.itemsize > 1:
        return value.copy_(torch.rand(look.shape, generator=generator, device=device))
    return value.fill_(1)
