"""Private torch APIs by which ops find their kernels, and graphs are copied: one small function each, saying what for.

The others are in `passes/ir/torch_compat.py`. Supported: see there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.fx.node import map_arg

input_nodes: Callable[[torch.fx.Node], Mapping[torch.fx.Node, None]] = attrgetter("_input_nodes")
"""`all_input_nodes` as the node has them, for loops over whole graphs. Since 1.8."""


def copied_node(
    graph: torch.fx.Graph, node: torch.fx.Node, new: Callable[[torch.fx.Node], Any], *, named: bool = True
) -> torch.fx.Node:
    """`graph.node_copy(node, new)` where graphs grow, three times as fast: a node that some graph has needs no look for
    symbols among its arguments, and its name, if that is free, no look for what is illegal. Since 2.3.

    named: as `node` is; otherwise as a new call of its op, as which it has no meta."""
    names, name = graph._graph_namespace, node.name
    if not named:
        name = names.create_name(graph._target_to_str(node.target), None)
    elif name in names._used_names:
        return graph.node_copy(node, new)
    else:
        base, _, number = name.rpartition("_")
        numbered = base and number.isdecimal()
        names._base_count[base if numbered else name] = (
            int(number) if numbered else names._base_count.get(name, 0)
        )
        names._used_names.add(name)
    copy = torch.fx.Node(
        graph, name, node.op, node.target, map_arg(node.args, new), map_arg(node.kwargs, new), node.type
    )
    names._obj_to_name[copy] = name
    graph._insert(copy)
    graph._find_nodes_lookup_table.insert(copy)
    graph._len += 1
    if named:
        copy.meta.update(node.meta)
    return copy


def copied_input(graph: torch.fx.Graph, node: torch.fx.Node, name: str | None = None) -> torch.fx.Node:
    """A placeholder named as `node`, or `name`, with its meta. `graph.placeholder` would call `A_log` `a_log`."""
    name = name or node.name
    copy = graph.create_node("placeholder", name, name=name)
    copy.meta = dict(node.meta)
    return copy


def accelerator_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Inside, on this thread, calls of these ops run the given functions first, before autograd sees them. A function
    that calls its op again reaches torch."""
    return _kernels_first(kernels, torch._C.DispatchKey.AutocastHPU)  # type: ignore[attr-defined]


def values_asked(kernels: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[None]:
    """The same for ops that take values out of tensors, at the same time."""
    return _kernels_first(kernels, torch._C.DispatchKey.AutocastIPU)  # type: ignore[attr-defined]


@contextmanager
def _kernels_first(kernels: Mapping[Any, Callable[..., Any]], key: Any) -> Generator[None]:
    """key: that of an autocast which no backend in torch uses, put among the keys of every call; torch's own
    autocast keys follow a tensor's device.
    `_C._ExcludeDispatchKeyGuard` and `_IncludeDispatchKeyGuard` since torch 1.13, `Library.fallback` since torch 2.6.
    """
    own, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")

    def below(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return function(*args, **kwargs)

        return run

    try:
        others.fallback(torch.library.fallthrough_kernel, key.name)
        for op, function in kernels.items():
            own.impl(op, below(function), key.name)
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        with torch._C._IncludeDispatchKeyGuard(key):
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
        own._destroy()
        others._destroy()


def is_autocast_op(name: str) -> bool:
    """Whether this torch's autocast of CUDA does something at the ATen op "name" or "name.overload". Since 1.13."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")


def autocast_of_cpu_ignored() -> AbstractContextManager[Any]:
    """`torch.autocast("cpu")` casts nothing inside. `_C._ExcludeDispatchKeyGuard` since torch 1.13."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def higher_order_answered(answers: Mapping[str, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Inside, calls of the higher-order ops of these names are calls of the given functions, seen by every mode that
    is on. Since torch 2.0."""
    from torch._ops import HigherOrderOperator

    known = HigherOrderOperator.__call__

    def call(op: Any, /, *args: Any, **kwargs: Any) -> Any:
        answer = answers.get(op.name())
        return known(op, *args, **kwargs) if answer is None else answer(*args, **kwargs)

    return replaced_attribute(HigherOrderOperator, "__call__", call)


@contextmanager
def compiled_as_written() -> Generator[None]:
    """Inside, what `torch.compile` made or makes runs as it is written, and so do functions of TorchScript, which runs
    other ops once it has seen them run. Dynamo is not imported for it: what was compiled before has imported it.
    `torch.compiler.set_stance` since torch 2.6; `_torchdynamo_inline`, the function in Python, since 2.1."""
    script: Any = torch.jit.ScriptFunction
    run = script.__call__

    def compile(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    def written(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, "_torchdynamo_inline", partial(run, self))(*args, **kwargs)

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        stack.enter_context(replaced_attribute(torch, "compile", compile))
        stack.enter_context(replaced_attribute(script, "__call__", written))
        yield


@contextmanager
def flex_without_kernel() -> Generator[None]:
    """`flex_attention` reaches its op with gradients on a CPU too, and without a word about its kernel. Since 2.9."""
    from torch.nn.attention import flex_attention

    with ExitStack() as stack:
        for name, value in (("_validate_device", _nothing), ("_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)):
            if hasattr(flex_attention, name):
                stack.enter_context(replaced_attribute(flex_attention, name, value))
        yield


def _nothing(*_: Any) -> None:
    return None


def indexed_by_tensors() -> AbstractContextManager[Any]:
    """Inside, `table[place]` by a tensor of one element reads no value, as `vmap` needs it. Since torch 2.6."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


@contextmanager
def traced_values_answered(
    truth: Callable[[torch.Tensor], bool], read: Callable[[torch.Tensor, Callable[..., Any]], Any]
) -> Generator[None]:
    """Inside, `bool()` of a traced tensor is `truth(tensor)`, and its `item()` and `tolist()`, and `numpy()` of a list
    of whole numbers, are `read(tensor, torch's own)`: by methods in Python, which no TorchFunctionMode sees, torch asks
    for each number. Since torch 2.0."""
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    def of(known: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
        return lambda tensor: read(tensor, known)

    def numpy(tensor: torch.Tensor, **options: Any) -> Any:
        if tensor.ndim != 1 or tensor.dtype not in (torch.int64, torch.int32):
            return torch.Tensor.numpy(tensor, **options)
        found = tensor.tolist()
        return np.array(found, str(tensor.dtype).removeprefix("torch.")) if type(found) is list else found

    with ExitStack() as stack:
        stack.enter_context(replaced_attribute(FunctionalTensor, "__bool__", lambda tensor: truth(tensor)))
        for kind in (FakeTensor, FunctionalTensor):
            stack.enter_context(replaced_attribute(kind, "tolist", of(kind.tolist)))
            for name, answer in (("item", of(torch.Tensor.item)), ("numpy", numpy)):
                setattr(kind, name, answer)
                stack.callback(delattr, kind, name)
        yield


@contextmanager
def replaced_attribute(owner: Any, name: str, value: Any) -> Generator[None]:
    """`owner.name` is `value` inside."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


@contextmanager
def python_functions_run() -> Generator[None]:
    """Inside, torch's functions that are written in Python run as written, and do not ask their arguments to answer."""
    from torch import _tensor

    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    with ExitStack() as stack:
        for module in (torch.nn.functional, torch.functional, _tensor):
            for name in names:
                if hasattr(module, name):
                    stack.enter_context(replaced_attribute(module, name, lambda *given: False))
        yield


@contextmanager
def replaced_kernels(op: Any, kernels: Mapping[str, Callable[..., Any] | None]) -> Generator[None]:
    """Inside, `op` has these kernels in Python, by the names of their keys; None: none. Only registering one makes
    torch forget which it chose last. `py_kernels` since torch 2.0."""
    wanted = {getattr(torch._C.DispatchKey, name): kernel for name, kernel in kernels.items()}
    before = {key: op.py_kernels.get(key) for key in wanted}
    changed = [key for key in wanted if before[key] is not wanted[key]]

    def put(found: Mapping[Any, Callable[..., Any] | None]) -> None:
        for key in changed:
            op.py_kernels.pop(key, None)
            op.py_impl(key)(found[key])
            if found[key] is None:
                del op.py_kernels[key]

    put(wanted)
    try:
        yield
    finally:
        put(before)


def fake_devices_answered(
    asked: Callable[[], bool], answer: Callable[[torch.Tensor], torch.device]
) -> AbstractContextManager[None]:
    """Inside, `tensor.device` of a fake is `answer(tensor)` where `asked()`, called by what answers, says so: it is a
    property in Python, which no TorchFunctionMode sees. Since torch 2.0."""
    from torch._subclasses import FakeTensor

    known: Any = FakeTensor.device

    def device(tensor: Any) -> torch.device:
        return answer(tensor) if asked() else known.fget(tensor)

    return replaced_attribute(FakeTensor, "device", known.getter(device))


@contextmanager
def module_reads_seen(note: Callable[[torch.nn.Module, str, Any], None]) -> Generator[None]:
    """Inside, `note(module, name, value)` is told of every attribute that is found on an `nn.Module` by the usual way,
    and of every one that is asked for and is not there (`hasattr`), with NotImplemented for its value.

    nn.Module has no `__getattribute__` of its own, so one can be given to it, and taken away.
    """

    def seen(module: torch.nn.Module, name: str) -> Any:
        try:
            value = object.__getattribute__(module, name)
        except AttributeError:
            held = object.__getattribute__(module, "__dict__")
            if not any(name in held.get(table, ()) for table in ("_parameters", "_buffers", "_modules")):
                note(module, name, NotImplemented)
            raise
        note(module, name, value)
        return value

    assert "__getattribute__" not in vars(torch.nn.Module)
    torch.nn.Module.__getattribute__ = seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.nn.Module.__getattribute__


def compiling_flag() -> AbstractContextManager[None]:
    """`torch.compiler.is_compiling()` is True inside: models skip checks that read values. Since 2.1."""
    return replaced_attribute(torch.compiler, "_is_compiling_flag", True)


def encoder_masks_trusted() -> AbstractContextManager[None]:
    """nn.TransformerEncoder compares a given mask with the causal one by value, to drop it; inside, it
    believes `is_causal` and keeps the mask. The result is the same. Since torch 2.0."""
    from torch.nn.modules import transformer

    def trust(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    return replaced_attribute(transformer, "_detect_is_causal_mask", trust)


@contextmanager
def onednn_off() -> Generator[None]:
    """Recurrent layers are traced to products, not to one oneDNN op whose backward cannot be called.

    `torch.backends.mkldnn.flags` sets unrelated flags as well, and warns. Since torch 1.13.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
