"""Every use of a private API of Inductor, one small function each. Supported: torch 2.11 to 2.15."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from cost_model.cache_files import remember, remembered


def compile_with_inductor(
    module: Any, examples: Sequence[torch.Tensor], last: Callable[[Any], None], tag: str = ""
) -> tuple[Callable[[list[Any]], Any], str, str | None]:
    """Inductor's code for an inference graph, taking its inputs in a list that it empties as it goes, the text of that
    code ("" if it has none), and its key in Inductor's cache (None: it is not there).

    `compile_fx` wraps that code in functions with `*args`, which keep every input alive to the end: a
    backward would hold all saved tensors at once. The code itself is taken where the wrappers do
    nothing but pass results through, which its number of results tells. `compile_fx` with
    `inner_compile` since torch 2.0; AOT autograd's own cache would skip `inner_compile`, hence off
    (Inductor's stays on).

    last: changes in place the graph that Inductor lowers, which has as many results as `module`.

    What was compiled before is read from Inductor's cache, whose keys know of its own lowerings alone, hence a tag
    (`torch.compiler.config` since 2.7). tag: more of what decides the code, as what sizes in symbols count as.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    probe_vectors()
    made: list[Any] = []
    results: list[int] = []
    expected = len(module.graph.output_node().args[0])

    def inner(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        output = graph.graph.output_node()
        results.append(len(output.args[0]))
        if results[-1] == expected:
            last(graph)
        made.append(compile_fx_inner(graph, inputs, **kwargs))
        return made[-1]

    # An op of `torch.library.triton_op` runs as it is: it may have another kernel for this device.
    caches: Any = torch.compiler.config
    tagged = caches.patch(cache_key_tag=inspect.getsource(lower_as_collectives) + tag)
    with tagged, config.patch(enable_autograd_cache=False, decompose_custom_triton_ops=False):
        wrapped: Any = compile_fx(module, list(examples), inner_compile=inner)
    if results == [expected]:
        return made[0], getattr(made[0], "source_code", ""), getattr(made[0], "_fx_graph_cache_key", None)
    return lambda inputs: wrapped(*inputs), "", None


def inductor_settings() -> str:
    """A hash of what decides Inductor's code beside the graph: its settings, torch's, threads, and their source. It is
    the key of a graph without ops (`compiled_fx_graph_hash` since torch 2.5)."""
    from torch._inductor.codecache import compiled_fx_graph_hash

    graph = torch.fx.Graph()
    graph.output(())
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return compiled_fx_graph_hash(module, [torch.empty(0)], {}, [])[0]  # on the CPU, where threads count


def warm_inductor() -> None:
    """Imports, and reads, all that comes before a first graph."""
    for name in ("torch._inductor.compile_fx", "torch.utils.cpp_extension"):
        import_module(name)
    inductor_settings()


def load_inductor_code(key: str) -> Callable[[list[Any]], Any] | None:
    """What `compile_with_inductor` made, from Inductor's cache by its key; None where it is not there any more. What it
    takes for granted of sizes, whoever asks knows: each key has one entry.

    As AOT autograd loads what it compiled before (`FxGraphCacheLoadable`, since torch 2.8).
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import codecache, config
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    probe_vectors()
    constants = CompiledFxGraphConstants()
    options: Any = {"cudagraphs": BoxedBool(config.triton.cudagraphs), "is_backward": False}
    # What is there needs no header, which would be looked through for changes.
    headers = patch.object(codecache, "_get_cpp_prefix_header", lambda device: None, create=True)
    with headers, tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        held = lambda *guards: True
        found, _ = codecache.FxGraphCache.load_with_key(key, [], [], True, None, False, constants, held)
        if found is not None:
            found.post_compile([], constants, options)
    return found


@cache
def probe_vectors() -> None:
    """Inductor asks in every process which vector instructions work here, by processes of its own that take a second;
    what they answered before holds for the same compiler, torch and CPU. `VecISA.check_build` since torch 2.4."""
    from torch._inductor import cpu_vec_isa as vectors

    with suppress(AttributeError):
        ask = vectors.VecISA.check_build
        here = vectors._get_isa_dry_compile_fingerprint(" ".join(vectors.x86_isa_checker()))

        def asked(isa: Any, code: str) -> bool:
            question = "vectors", here, platform.machine(), isa, isa.build_arch_flags(), code
            if remembered(*question) is None:
                if not ask(isa, code):
                    return False  # for now: it may have been a time-out
                remember(*question)
            return True

        with patch.object(vectors.VecISA, "check_build", asked):
            vectors.valid_vec_isa_list()


@contextmanager
def compiles_in_child() -> Generator[None]:
    """Inside, in a forked child, torch runs in one thread, as it must there, and Inductor compiles for the parent's:
    by itself, since the processes that the parent started for it do not answer. `compile_threads` since torch 2.0."""
    import torch._inductor.config as config

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with config.patch(compile_threads=1), patch.object(torch, "get_num_threads", lambda: threads):
        yield


def lower_as_collectives(ops: Mapping[str, Any], all_reduce_in_place: Any) -> None:
    """Let Inductor lower `ops` as it does torch's functional collectives.

    ops: name in `torch.ops._c10d_functional` -> the op to treat like it, which has more arguments at
    the end. All but all_reduce run out of place; all_reduce runs on a copy that fuses with whatever
    computes its operand. Inductor then keeps the order of collectives as the graph has it, and reuses no
    buffer in flight. `register_lowering` since torch 2.0, `_CollectiveKernel` since 2.3.
    """
    from torch._inductor import ir, lowering

    def all_reduce(operand: Any, *rest: Any) -> Any:
        operand = ir.ExternKernel.require_contiguous(lowering.clone(operand))
        ir._CollectiveKernel.create_inplace(all_reduce_in_place, operand, *rest)
        return operand

    def out_of_place(op: Any) -> Callable[..., Any]:
        def lower(operand: Any, *rest: Any) -> Any:
            operand = ir.ExternKernel.require_contiguous(operand)
            return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(op, operand, *rest))

        return lower

    for name, op in ops.items():
        if op not in lowering.lowerings:
            lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
            lower = all_reduce if name == "all_reduce" else out_of_place(op)
            lowering.register_lowering(op, type_promotion_kind=None)(lower)


def inductor_graph_order() -> AbstractContextManager[Any]:
    """Inductor runs ops in the graph's order inside, fused ones at the first of them.

    Its own reorderings (producers to their readers; least peak memory) put every collective right before
    its wait again, or all of them at the front. Since torch 2.1 and 2.6.
    """
    import torch._inductor.config as config

    names = ("reorder_for_locality", "reorder_for_peak_memory")
    return config.patch({name: False for name in names if hasattr(config, name)})


def lookup_compiler(name: str) -> Callable[..., Any] | None:
    """A torch.compile backend by name: (GraphModule, example inputs) -> callable; None if unknown.

    `torch._dynamo.lookup_backend` has no public form that does not also trace. Since torch 2.0.
    """
    from torch._dynamo.backends.registry import list_backends, lookup_backend

    if name not in list_backends(exclude_tags=()):
        return None
    return lookup_backend(name)


def compiler_names() -> list[str]:
    """Names of the torch.compile backends of this installation. Since torch 2.0."""
    from torch._dynamo.backends.registry import list_backends

    return list_backends()


def boxed_forward(module: Any) -> Callable[[list[Any]], Any]:
    """The generated code of a GraphModule, taking its inputs in a list that it empties, so that each is
    freed after its last use. `_BoxedCodeGen` since torch 2.10; without it inputs live to the end."""
    from torch.fx import graph

    code_gen = getattr(graph, "_BoxedCodeGen", None)
    if code_gen is None:
        return lambda inputs: module.forward(*inputs)
    module.graph.set_codegen(code_gen())
    return torch.fx.GraphModule(module, module.graph).forward
