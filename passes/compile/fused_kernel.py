"""One fused group of a rank's program by itself, compiled as that is, as often in a row as it takes to time it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from passes.compile.compile_graph import compile_graph
from passes.compile.single_kernel import COLD_NBYTES, invented, op_named, operand_sets, repeated_runs, uses
from passes.ir.fake_calls import FakeCalls
from passes.ir.torch_compat import fake_mode_of, fakes_on
from passes.predict.step_work import GroupCall, KernelCase, Operand, TensorLook

__all__ = ["compile_group", "group_graph", "repeated_group", "start_compiler"]

_log = logging.getLogger("autoshard")


def repeated_group(
    case: KernelCase, calls: int, device: torch.device, backend: str, pool: Tensor | None = None
) -> Callable[[], object]:
    """What runs the group `calls` times, on invented values, cold and kept as `repeated_kernel` has them.

    Each call is one of a program of its own: in one program a compiler would see that they all compute the same.
    Raises whatever the compiler does for ops that it refuses.
    """
    between = min(case.step_nbytes, COLD_NBYTES)
    generator = torch.Generator(device).manual_seed(0)
    values = [invented(look, device, generator) for look in case.operands]
    module = group_graph(case, device)
    (result,) = module.graph.output_node().args[0]  # type: ignore[misc]
    written = result.meta["val"].nbytes  # type: ignore[union-attr]
    sets = operand_sets(values, case.cold, between, pool)
    kept = uses(written, between) if case.kept else 0
    return repeated_runs(compile_graph(module, backend), sets, calls, kept)


def compile_group(case: KernelCase, device: torch.device, backend: str) -> None:
    """Compile it into the compiler's cache on disk, in which other processes of the host find it."""
    compile_graph(group_graph(case, device), backend)


def start_compiler(device: torch.device, backend: str) -> None:
    """Have the compiler read and set up what it needs once in a process. What it cannot do shows when it is used."""
    negated = GroupCall("aten.neg.default", (Operand(0),), {})
    try:
        compile_graph(_graph((negated,), (TensorLook((16,), (1,), torch.float32),), device), backend)
    except Exception as error:
        _log.debug("refine: %s does not start: %s", backend, error)


def group_graph(case: KernelCase, device: torch.device) -> fx.GraphModule:
    """The group's ops on its operands; returns what is stored."""
    return _graph(case.group, case.operands, device)


def _graph(
    calls: Sequence[GroupCall], operands: Sequence[TensorLook], device: torch.device
) -> fx.GraphModule:
    graph = fx.Graph()
    like = [torch.empty_strided(o.shape, o.stride, dtype=o.dtype, device="meta") for o in operands]
    fakes = fakes_on(device, like)
    nodes: list[fx.Node] = []
    for i, fake in enumerate(fakes):
        nodes.append(graph.placeholder(f"x{i}"))
        nodes[-1].meta["val"] = fake
    for call in calls:
        args, kwargs = pytree.tree_map(lambda arg: _placed(arg, nodes, device), (call.args, call.kwargs))
        nodes.append(graph.call_function(op_named(call.op), args, kwargs))
        nodes[-1].meta["val"] = FakeCalls()(op_named(call.op), args, kwargs, fake_mode_of(tuple(fakes)))
    graph.output((nodes[-1],))
    return fx.GraphModule(torch.nn.Module(), graph)


def _placed(argument: object, nodes: list[fx.Node], device: torch.device) -> object:
    if isinstance(argument, Operand):
        return nodes[argument.place]
    return device if isinstance(argument, torch.device) else argument
