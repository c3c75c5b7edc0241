"""One kernel of a rank's program by itself, as often in a row as it takes to time it."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from cost_model.errors import log
from passes.compile.compile_graph import Compiled, compile_graph
from passes.ir.joint import FakeCalls
from passes.ir.torch_compat import fake_mode_of
from passes.ir.torch_sizes import fakes_on
from passes.predict.step_work import KernelCase, OpCall, Operand, TensorLook


def keep_freed_memory(device: torch.device) -> None:
    """glibc gives a freed block back to the system if none as large was freed before, and the next of that size is
    mapped page by page: some microseconds each. One large block, freed once, teaches it to keep 64 MiB; CUDA's
    allocator needs no such lesson. No price of a kernel has such pages, and no step is to have them.
    [glibc: mallopt(3), M_MMAP_THRESHOLD, dynamic up to 32 MiB]"""
    if device.type == "cpu":
        torch.empty(
            2**25 - 2**16, dtype=torch.uint8
        )  # the largest block that glibc may keep when it is freed


COLD_NBYTES = 2**26
"""Bytes of tensors between two uses of one that is in no cache by then: twice a large last-level cache. A step that
holds less touches less in between."""


def repeated_kernel(
    case: KernelCase, calls: int, device: torch.device, backend: str, pool: Tensor | None = None
) -> Callable[[], object]:
    """What runs the kernel `calls` times on invented values: compiled by `backend` where it is fused, else op by op as
    eager programs do.

    Operands that are cold in the program are so here: every call, and every run of all calls, has its own, until they
    are as many bytes as the step holds, or more than caches do. Results that outlive the program's phase are written
    where nothing was written lately, as there.

    Each call of a fused one is a program of its own: in one program a compiler would see that they all compute the
    same. pool: random numbers in one dim, which operands of its dtype are parts of; without one each has memory of its
    own. Raises whatever torch, or the compiler, does for arguments that it refuses.
    """
    between = min(case.step_nbytes, COLD_NBYTES)
    times = 1 if case.fused else calls
    each = [
        min(times, uses(look.nbytes, between)) if cold else 1
        for look, cold in zip(case.operands, case.cold, strict=True)
    ]
    module = kernel_graph(case, device, times, each)
    generator = torch.Generator(device).manual_seed(0)
    looks = itertools.chain.from_iterable(map(itertools.repeat, case.operands, each))
    values = [invented(look, device, generator) for look in looks]
    colds = list(itertools.chain.from_iterable(map(itertools.repeat, case.cold, each)))
    results: Any = module.graph.output_node().args[0]
    written = sum(result.meta["val"].nbytes for result in results)
    sets = operand_sets(values, colds, between, pool)
    compiled = compile_graph(module, backend if case.fused else "eager")
    return repeated_runs(compiled, sets, calls // times, uses(written, between) if case.kept else 0)


def repeated_runs(
    compiled: Compiled, sets: Sequence[list[Tensor]], runs: int, kept: int
) -> Callable[[], object]:
    """What runs a program `runs` times, on one set of operands after the other, and returns the last results.

    kept: of how many runs the results are held, so that the next are written elsewhere. As many have run before it is
    returned: memory that is written for the first time takes longer than any other.
    """
    given = itertools.cycle(sets)
    held = deque[object](maxlen=kept)

    def repeated() -> object:
        with torch.no_grad():
            for _ in range(runs - 1):  # what is not held is freed before the next
                held.append(compiled(list(next(given))))
            results = compiled(list(next(given)))
        held.append(results)
        return results

    for _ in range(-(-kept // runs)):
        repeated()
    return repeated


def uses(nbytes: int, between: int) -> int:
    """Of tensors of so many bytes, each once, until `between` bytes were touched; one at least."""
    return max(1, -(-between // max(1, nbytes)))


def operand_sets(
    values: Sequence[Tensor], colds: Sequence[bool], between: int, pool: Tensor | None
) -> list[list[Tensor]]:
    """Operands for one run after the other: those that are cold are others, until `between` bytes were touched."""
    cold = sum(value.nbytes for value, own in zip(values, colds, strict=True) if own)
    other = Tensor.clone if pool is None else _Parts(pool).like
    others = lambda: [other(value) if own else value for value, own in zip(values, colds, strict=True)]
    return [list(values), *(others() for _ in range((uses(cold, between) if cold else 1) - 1))]


@dataclass
class _Parts:
    """Parts of a pool, one behind the other, and from the front again."""

    pool: Tensor
    begin: int = 0

    def like(self, value: Tensor) -> Tensor:
        reach = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True)) + 1
        if self.pool.dtype != value.dtype or reach > self.pool.numel():
            return value.clone()
        begin = self.begin if self.begin + reach <= self.pool.numel() else 0
        self.begin = begin + reach
        return self.pool.as_strided(value.shape, value.stride(), begin)


def _first(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The first result of an op of several."""
    value: Any = node.meta["val"]
    if isinstance(value, Tensor):
        return node
    index = next(i for i, item in enumerate(value) if item is not None)
    first = graph.call_function(operator.getitem, (node, index))
    first.meta["val"] = value[index]
    return first


def op_named(name: str) -> Callable[..., Any]:
    """ "aten.add.Tensor" -> the op."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def invented(look: TensorLook, device: torch.device, generator: torch.Generator) -> Tensor:
    """Random values, as GPUs clock higher on constants; of integers and truth values only ones."""
    held = [1 if stride == 0 else n for n, stride in zip(look.shape, look.stride, strict=True)]
    value = torch.empty_strided(held, look.stride, dtype=look.dtype, device=device)
    if look.dtype.is_floating_point and look.dtype.itemsize > 1:
        value.copy_(torch.rand(held, generator=generator, device=device))
    else:
        value.fill_(1)
    return value.as_strided(look.shape, look.stride)


def compile_group(case: KernelCase, device: torch.device, backend: str) -> None:
    """Compile it into the compiler's cache on disk, in which other processes of the host find it."""
    compile_graph(kernel_graph(case, device), backend)


def start_compiler(device: torch.device, backend: str) -> None:
    """Have the compiler read and set up what it needs once in a process. What it cannot do shows when it is used."""
    negated, look = OpCall("aten.neg.default", (Operand(0),), {}), TensorLook((16,), (1,), torch.float32)
    try:
        compile_graph(_graph((negated,), (look,), device, False, 1, (1,)), backend)
    except Exception as error:
        log.debug("refine: %s does not start: %s", backend, error)


def kernel_graph(
    case: KernelCase, device: torch.device, times: int = 1, each: Sequence[int] | None = None
) -> fx.GraphModule:
    """The kernel's ops so many times, and what is stored last, or each time if that is kept. each: per operand, how
    many there are, taken in turn."""
    return _graph(case.calls, case.operands, device, case.kept, times, each or (1,) * len(case.operands))


def _graph(
    calls: Sequence[OpCall],
    operands: Sequence[TensorLook],
    device: torch.device,
    kept: bool,
    times: int,
    each: Sequence[int],
) -> fx.GraphModule:
    graph, run = fx.Graph(), FakeCalls()
    like = [torch.empty_strided(o.shape, o.stride, dtype=o.dtype, device="meta") for o in operands]
    fakes = fakes_on(device, like)
    given: list[list[fx.Node]] = []
    for fake, count in zip(fakes, each, strict=True):
        given.append([graph.placeholder(f"x{len(graph.nodes)}") for _ in range(count)])
        for node in given[-1]:
            node.meta["val"] = fake
    results: list[fx.Node] = []
    for time in range(times):
        nodes = [places[time % len(places)] for places in given]
        for call in calls:
            args, kwargs = pytree.tree_map(partial(_placed, nodes, device), (call.args, call.kwargs))
            nodes.append(graph.call_function(op_named(call.op), args, kwargs))
            nodes[-1].meta["val"] = run(op_named(call.op), args, kwargs, fake_mode_of(tuple(fakes)))
        nodes[-1].meta["timed"] = True  # it runs, though nothing reads it
        results.append(nodes[-1])
    graph.output(tuple(_first(graph, result) for result in (results if kept else results[-1:])))
    return fx.GraphModule(torch.nn.Module(), graph)


def _placed(nodes: list[fx.Node], device: torch.device, argument: object) -> object:
    if isinstance(argument, Operand):
        return nodes[argument.place]
    return device if isinstance(argument, torch.device) else argument
