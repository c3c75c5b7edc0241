"""Private torch APIs that tracing a model needs, and what for; others and versions: `passes/ir/torch_compat.py`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from passes.ir.process_state import autocast_off
from passes.ir.torch_compat import fake_mode_of
from passes.ir.torch_sizes import SizeSymbols


@dataclass(frozen=True)
class AotEnd:
    """One placeholder or flat result of AOT autograd's graph. kind: placeholders "input", "tangent" (of
    output `index`), "mutated_tangent" (of the new value of input `index`);
    results "output", "mutated" (new value of input `index`), "grad" (of input `index`), "none"."""

    kind: str
    index: int


@dataclass(frozen=True)
class AotGraph:
    """module: placeholders parallel to `inputs`; the flattened result parallel to `outputs`."""

    module: torch.fx.GraphModule
    inputs: tuple[AotEnd, ...]
    outputs: tuple[AotEnd, ...]


def trace_joint(
    module: torch.nn.Module,
    args: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
    *,
    rewrite_writes: bool,
) -> AotGraph:
    """Forward and backward of `module` (no parameters of its own) on fake `args`, in one graph; forward only if nothing
    that is returned requires grad.

    rewrite_writes: write in place as ops that make new tensors, which takes twice as long: AOT autograd runs the
    forward once before it traces it. A program without such writes (`has_writes`) has the same graph either way.

    `aot_export_joint_with_descriptors` says what each end of the graph is. Since torch 2.9.
    An op of `torch.library.triton_op` stays one op, which has a rule: `decompose_custom_triton_ops` since 2.7.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with ExitStack() as stack:
        stack.enter_context(fake_mode_of(tuple(args)))
        stack.enter_context(config.patch(decompose_custom_triton_ops=False))
        stack.enter_context(_use_lazy_graph_module(True))  # nobody runs AOT autograd's module
        if not rewrite_writes:
            return _functional_joint(module, args, decompositions)
        export: Any = _without_metadata_mode(aot_export_joint_with_descriptors)
        graph_module = export(
            stack, module, tuple(args), {}, decompositions=dict(decompositions)
        ).graph_module
    graph = graph_module.graph
    inputs = tuple(_aot_end(node.meta["desc"]) for node in graph.find_nodes(op="placeholder"))
    return AotGraph(graph_module, inputs, tuple(map(_aot_end, graph.output_node().meta["desc"])))


def _without_metadata_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Nobody reads the names of torch functions that it would note. Since torch 2.10."""
    name = "_disable_torch_fn_metadata_mode"
    known = name in inspect.signature(function).parameters
    return partial(function, **{name: True}) if known else function


_TANGENT = "autoshard.tangent"


def _functional_joint(
    module: torch.nn.Module, args: Sequence[torch.Tensor], decompositions: Mapping[Any, Callable[..., Any]]
) -> AotGraph:
    """What AOT autograd makes of a program that writes nothing, in one run of it.

    `make_fx` since torch 1.11, `setup_stacktrace_preservation_hooks`, by which a node of the backward knows the number
    of what it differentiates, since 2.1, `annotate` since 2.9.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
    from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import annotate

    outputs: list[AotEnd] = []
    tangents: list[AotEnd] = []

    def joint(*primals: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        made = module(*primals)
        outputs.extend(AotEnd("output", index) for index in range(len(made)))
        roots = [(index, out) for index, out in enumerate(made) if out.requires_grad]
        wanted = [index for index, arg in enumerate(primals) if arg.requires_grad] if roots else []
        if not wanted:
            return made
        directions: list[torch.Tensor] = []
        for index, out in roots:
            tangents.append(AotEnd("tangent", index))
            with annotate({_TANGENT: index}):
                directions.append(torch.empty(out.shape, dtype=out.dtype, device=out.device))
        setup_stacktrace_preservation_hooks([out.grad_fn for _, out in roots if out.grad_fn is not None])
        with autocast_off():
            given = [out for _, out in roots], [primals[index] for index in wanted], directions
            grads = dict(zip(wanted, torch.autograd.grad(*given, allow_unused=True), strict=True))
        outputs.extend(AotEnd("grad" if index in grads else "none", index) for index in range(len(primals)))
        return (*made, *(grads.get(index) for index in range(len(primals))))

    with (
        enable_python_dispatcher(),
        torch.autograd.set_multithreading_enabled(False),
        _disable_saved_tensors_hooks_during_tracing(),
    ):
        traced = _without_metadata_mode(make_fx)(joint, dict(decompositions))(*args)
    _give_custom_meta(traced.graph)
    _placeholders_for_tangents(traced.graph)
    traced.graph.eliminate_dead_code()
    return AotGraph(
        traced, (*(AotEnd("input", index) for index in range(len(args))), *tangents), tuple(outputs)
    )


def _give_custom_meta(graph: torch.fx.Graph) -> None:
    """What a node of the backward differentiates gives it its entries, as in AOT autograd's graph."""
    forward: dict[int, dict[str, Any]] = {}
    behind = False
    for node in graph.nodes:
        custom, number = node.meta.get("custom", {}), node.meta.get("seq_nr")
        behind = behind or _TANGENT in custom
        if number is not None and not behind:
            forward.setdefault(number, custom)
        elif number in forward and not node.meta.get("is_gradient_acc", False):
            node.meta["custom"] = {**custom, **forward[number]}


def _placeholders_for_tangents(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if _TANGENT in node.meta.get("custom", {}) and isinstance(node.meta["val"], torch.Tensor):
            with graph.inserting_before(node):
                tangent = graph.placeholder("tangent")
            tangent.meta = {"val": node.meta["val"]}
            node.replace_all_uses_with(tangent)


def has_writes(graph: AotGraph) -> bool:
    """Whether an op of a traced graph writes to an operand, or is run for another reason than its results."""
    schemas = [node.target._schema for node in graph.module.graph.nodes if hasattr(node.target, "_schema")]
    return any(schema.is_mutable or not schema.returns for schema in schemas)


def _aot_end(descriptor: Any) -> AotEnd:
    from torch._functorch._aot_autograd import descriptors as d

    match descriptor:
        case None:  # in the place of the gradient of an input that requires none
            return AotEnd("none", 0)
        case d.PlainAOTInput(idx=index):
            return AotEnd("input", index)
        case d.TangentAOTInput(output=d.PlainAOTOutput(idx=index)):
            return AotEnd("tangent", index)
        case d.TangentAOTInput(output=d.InputMutationAOTOutput(mutated_input=d.PlainAOTInput(idx=index))):
            return AotEnd("mutated_tangent", index)
        case d.PlainAOTOutput(idx=index):
            return AotEnd("output", index)
        case d.InputMutationAOTOutput(mutated_input=d.PlainAOTInput(idx=index)):
            return AotEnd("mutated", index)
        case d.GradAOTOutput(grad_of=d.PlainAOTInput(idx=index)):
            return AotEnd("grad", index)
        case _:
            raise RuntimeError(f"a tensor subclass, or an input that changes in shape: {descriptor}")


Seen = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]
"""Is told of an op: its function, args and kwargs, and what came of them."""


def fake_tensors(
    makers: Sequence[Callable[[], torch.Tensor]], seen: Seen | None = None, symbols: SizeSymbols | None = None
) -> list[torch.Tensor]:
    """What each of these makes under one new mode: fakes, and real tensors become constants there.
    seen: is told of every op of them. symbols: that the shapes have. Since torch 2.0."""
    from torch._subclasses import FakeTensorMode

    class Watched(FakeTensorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs or {})
            assert seen is not None
            seen(func, args, kwargs or {}, result)
            return result

    env = None if symbols is None else symbols.env
    mode = (FakeTensorMode if seen is None else Watched)(allow_non_fake_inputs=True, shape_env=env)
    mode.cache_enabled = env is None  # with symbols, to look for a result takes longer than to make it
    with mode, torch.inference_mode(False):
        return [make() for make in makers]


def is_value_missing(error: Exception) -> bool:
    """Whether a traced tensor was asked for its value. The classes since torch 2.0."""
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    missing = "trying to get value out of a tracing tensor" in str(error)
    return missing or isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode))


def fake_of(tensor: torch.Tensor) -> torch.Tensor:
    """The fake below a tensor whose writes in place are rewritten. Since torch 2.1."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor.elem)
    return tensor


def shape_dependent_errors() -> tuple[type[Exception], ...]:
    """Raised by ops whose result shape depends on values, on fake tensors. Since torch 2.0."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    return (DynamicOutputShapeException,)


@contextmanager
def failures_unlogged() -> Generator[None]:
    """Fake tensors log the whole traceback of an op that fails, which the error that follows says too. The logger is
    found by its name, since torch 2.9."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    silent = lambda record: False
    logger.addFilter(silent)
    try:
        yield
    finally:
        logger.removeFilter(silent)


def full_precision_backward() -> AbstractContextManager[None]:
    """The backward is traced outside autocast, as it runs in eager mode; AOT autograd by itself would
    keep autocast on. `backward_pass_autocast` since torch 2.9."""
    import torch._functorch.config as config

    known = hasattr(config, "backward_pass_autocast")
    return config.patch(backward_pass_autocast="off") if known else nullcontext()


def grouped_mm_functions() -> list[Any]:
    """What a TorchFunctionMode sees of a grouped product: `torch._grouped_mm`, which `F.grouped_mm` (2.10) calls, and
    its op. Since torch 2.8; none before."""
    op = getattr(torch.ops.aten, "_grouped_mm", None)
    return [] if op is None else [torch._grouped_mm, op, op.default]


def packing_functions() -> tuple[Any, Any]:
    """What a TorchFunctionMode sees of `pack_padded_sequence` and of `pad_packed_sequence`. Since torch 1.0."""
    return torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence  # type: ignore[attr-defined]


NESTED_MAKERS = ("_nested_view_from_jagged", "_nested_tensor_from_tensor_list")
"""Functions that make nested tensors, as a TorchFunctionMode sees them. Since torch 2.1."""


@contextmanager
def tracing_suspended() -> Generator[None]:
    """Inside, ops run on real tensors, unseen by fake and tracing modes. Since torch 2.1."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield
