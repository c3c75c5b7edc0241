"""From a rank's forward or backward graph to a callable."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from cost_model.errors import ShardingError
from passes.expand_ops import expand_ops
from passes.ops.named_collective import ALL_REDUCE_IN_PLACE, NAMED, NAMED_BY_NAME
from passes.torch_compat import (
    compile_with_inductor,
    compiler_names,
    fresh_fakes,
    lookup_compiler,
    lower_as_collectives,
)

__all__ = ["Compiled", "check_backend", "compile_graph", "name_collectives"]

Compiled = Callable[[list[Tensor]], Sequence[Tensor | None]]
"""Takes the graph's inputs in a list, which it may empty to free them early; returns its flat results."""


def check_backend(backend: str) -> None:
    """ShardingError, listing the choices, unless `backend` is "eager" or a torch.compile backend."""
    if backend != "eager" and lookup_compiler(backend) is None:
        choices = ", ".join(repr(name) for name in sorted({"eager", "inductor", *compiler_names()}))
        raise ShardingError(f"backend is {backend!r}, which is no compiler\n  try: one of {choices}")


def compile_graph(module: fx.GraphModule, backend: str = "inductor") -> Compiled:
    """A callable that computes what `module` does, for inputs like its placeholders' "val".

    module:  functional, local tensors, one flat tuple returned. Not changed.
    backend: "inductor", "eager" (the graph's own ops, one by one), or any torch.compile backend.

    The callable checks nothing: sizes, strides, dtypes and devices must be those of the placeholders.
    Every collective with meta "serves" is, under a profiler, inside a range of that name.
    Raises ShardingError for an unknown backend.
    """
    check_backend(backend)
    expanded = name_collectives(expand_ops(module))
    if backend == "eager":
        # The graph's generated code: it frees every value after its last use.
        return _starred(expanded.forward)
    examples = fresh_fakes([n.meta["val"] for n in expanded.graph.nodes if n.op == "placeholder"])
    with torch.no_grad():
        if backend == "inductor":
            lower_as_collectives(NAMED_BY_NAME, ALL_REDUCE_IN_PLACE)
            return compile_with_inductor(expanded, examples)
        compiler = lookup_compiler(backend)
        assert compiler is not None
        return _starred(compiler(expanded, examples))


def name_collectives(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, in place, with every collective that has meta "serves" carrying that name."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in NAMED and node.meta.get("serves"):
            node.target = NAMED[node.target]
            node.args = (*node.args, str(node.meta["serves"]))
    module.recompile()
    return module


def _starred(function: Callable[..., Sequence[Tensor | None]]) -> Compiled:
    """`function`, which takes its inputs one by one, as a callable of a list."""
    return lambda inputs: function(*inputs)
