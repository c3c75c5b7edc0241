"""Every use of a private torch API: one small function each, saying what it is for.

Private means any name under `torch._*`. Supported: torch 2.11 to 2.15.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.fx.node import map_aggregate


def torch_decompositions(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's own decompositions of `ops` (packets or overloads), for capture. Since torch 1.13."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(ops))


def op_key(op: Any) -> str | None:
    """ "aten::add.Tensor" of an OpOverload, "aten::add" of a packet or of an operator that
    `torch.library.custom_op` made; None for anything else. `_qualified_op_name`, `_qualname` since 2.4."""
    if isinstance(op, torch._ops.OpOverload):
        return op.name() if "." in op.name() else f"{op.name()}.default"
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    return getattr(op, "_qualname", None) if isinstance(op, torch.library.CustomOpDef) else None


def fake_mode_of(value: Any) -> Any:
    """The FakeTensorMode of a FakeTensor (or of the first one in a tuple). `fake_mode` since torch 2.0."""
    from torch._subclasses import FakeTensor

    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, FakeTensor):
            return item.fake_mode
    raise AssertionError(f"no FakeTensor in {value!r}")


def has_value(value: torch.Tensor, device_type: str) -> bool:
    """Whether it is a tensor with values there: no fake, and none of a subclass's parts. Since 2.0."""
    from torch._subclasses import FakeTensor
    from torch.distributed.tensor import DTensor

    return value.device.type == device_type and not isinstance(value, (FakeTensor, DTensor))


def no_fake_mode() -> AbstractContextManager[Any]:
    """Whatever fake mode is at work is not, inside: fakes of another one would not be taken. Since 2.0."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether it stands for several, of which `autograd.grad(..., is_grads_batched=True)` makes one. Since 1.13."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def inside_function_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) is at work; 50 ns. Since 2.0."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def is_profiling() -> bool:
    """Whether a profiler records now; 50 ns, where `record_function` costs microseconds. Since 1.9."""
    return torch.autograd._profiler_enabled()


def ops_run_by(function: Callable[..., Any], fakes: Sequence[torch.Tensor]) -> torch.fx.Graph:
    """The ATen ops that `function(*fakes)` runs, in a graph, with their values: as of `make_fx`, which looks at numbers
    and Python calls too and takes twice as long. `TorchDispatchMode` since 1.13."""
    from torch.utils._python_dispatch import TorchDispatchMode

    graph, nodes = torch.fx.Graph(), dict[int, torch.fx.Node]()
    alive: list[Any] = []  # so that no other value has its id

    def known(value: Any) -> Any:
        return nodes[id(value)] if isinstance(value, torch.Tensor) else value

    def made(node: torch.fx.Node, value: Any) -> None:
        node.meta["val"], nodes[id(value)] = value, node
        alive.append(value)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            read = map_aggregate((args, kwargs or {}), known)
            node = graph.create_node("call_function", func, *read, name=func.overloadpacket.__name__)
            made(node, result)
            for place, one in enumerate(result) if isinstance(result, (tuple, list)) else ():
                if isinstance(one, torch.Tensor):
                    made(graph.call_function(operator.getitem, (node, place)), one)
            return result

    for place, fake in enumerate(fakes):
        made(graph.placeholder(f"operand_{place}"), fake)
    with Recorder():
        result = function(*fakes)
    graph.output(map_aggregate(result, known))
    return graph


@contextmanager
def torch_deprecations_ignored() -> Generator[None]:
    """Inductor and Dynamo import modules that torch itself calls deprecated (2.13): not the user's affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def lazy_module(graph: torch.fx.Graph, name: str = "GraphModule") -> torch.fx.GraphModule:
    """A GraphModule of `graph` that writes its Python code when it is first run or read: of the graphs
    that lead to a program only the last is. `_LazyGraphModule` since torch 2.2."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(torch.nn.Module(), graph, class_name=name)


def last_node(graph: torch.fx.Graph) -> torch.fx.Node:
    """The last node; until torch 2.12, `reversed(graph.nodes)` can be looped over, but is no iterator."""
    return next(iter(reversed(graph.nodes)))


def default_store() -> Any:
    """The key-value store of the default process group. Since torch 1.8."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def abort_process_groups() -> None:
    """End what runs on this process's communicators, so that no host or GPU waits in it: for NCCL, since gloo's
    `abort` interrupts nothing. `_world.pg_map` since torch 2.0, `ProcessGroup.abort` since 2.6."""
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        group.abort()


def process_group_named(name: str) -> Any:
    """The process group that functional collectives know by `name`. `_resolve_process_group` since torch 2.1."""
    known: Any = name
    return torch.distributed.distributed_c10d._resolve_process_group(known)


def waited_for_with(tensor: torch.Tensor, works: Sequence[Any]) -> torch.Tensor:
    """`tensor`; `_c10d_functional.wait_tensor` of it waits for all of `works`. `_register_work` since torch 2.4."""
    from torch._C import _distributed_c10d

    for work in works:
        _distributed_c10d._register_work(tensor, work)
    return tensor


def global_module_hooks() -> list[dict[int, Any]]:
    """The tables of hooks that run around every module's forward and backward. Since torch 1.13."""
    from torch.nn.modules import module

    return [
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    ]


def fake_like(value: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """A fake of `value`'s size, strides, dtype and device, of the same mode as `fake`. Since torch 2.0."""
    with fake_mode_of(fake):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def custom_op_body(op: Any) -> Callable[..., Any]:
    """The function that `torch.library.custom_op` was given, to trace what is inside. `_init_fn` since 2.4."""
    return op._init_fn


def move_gradient_hooks(old: torch.Tensor, new: torch.Tensor, changed: Callable[[Any], Any]) -> None:
    """`new`, a leaf, gets `changed` hooks of `old`, in the same dicts, so that their handles remove them still.

    `_backward_hooks` since torch 0.2, `_post_accumulate_grad_hooks` since 2.1.
    """
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, name)
        if hooks:
            for number, hook in hooks.items():
                hooks[number] = changed(hook)
            setattr(new, name, hooks)
            setattr(old, name, None)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place. `_version` since torch 0.4."""
    return tensor._version


def allocations(seen: torch.profiler.profile) -> list[tuple[float, int]]:
    """(seconds, bytes more or less) of every change of the host's memory that a profiler with `profile_memory` saw, in
    order, on the clock of its `events()`, which tell them by op and not when. `kineto_results` since torch 1.8."""
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    found: Any = seen.profiler.kineto_results
    events = [event for event in found.events() if event.name() == "[memory]"]
    changes = [((event.start_ns() - found.trace_start_ns()) * 1e-9, event.nbytes()) for event in events]
    return sorted(changes, key=lambda change: change[0])


def function_modes() -> list[Any]:
    """The TorchFunctionModes that are on. Since torch 2.0."""
    return torch.overrides._get_current_function_mode_stack()
