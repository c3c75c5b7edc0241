"""From a rank's forward or backward graph to a callable."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, fx

from cost_model.checked_arguments import reject
from cost_model.errors import ShardingError, UnsupportedOpError
from passes.compile.call_directly import call_directly
from passes.compile.expand_ops import CALLED, expand_ops
from passes.compile.fuse_eager import FuseEager
from passes.compile.join_linears import JoinLinears
from passes.compile.keep_strides import keep_strides, result_values
from passes.compile.write_into_buckets import WriteIntoBuckets
from passes.ir.autocast_off import autocast_off
from passes.ir.graph_pass import run_rank_passes
from passes.ir.op_traits import is_collective
from passes.ir.torch_compat import (
    boxed_forward,
    compile_with_inductor,
    compiler_names,
    fresh_fakes,
    inductor_graph_order,
    lookup_compiler,
    lower_as_collectives,
    torch_deprecations_ignored,
)
from passes.lower.add_early import add_early
from passes.ops.named_collective import ALL_REDUCE_IN_PLACE, NAMED, NAMED_BY_NAME

__all__ = ["Compiled", "check_backend", "compile_graph", "name_collectives"]

_WAIT = torch.ops._c10d_functional.wait_tensor.default

Compiled = Callable[[list[Tensor]], Sequence[Tensor | None]]
"""Takes the graph's inputs in a list, which it may empty to free them early; returns its flat results."""


def check_backend(backend: str) -> None:
    """ShardingError, listing the choices, unless `backend` is "eager" or a torch.compile backend."""
    if not isinstance(backend, str):
        raise reject("backend", backend, "'inductor', 'eager', or the name of a torch.compile backend")
    if backend in ("eager", "inductor"):
        return
    with torch_deprecations_ignored():
        known = lookup_compiler(backend) is not None
    if not known:
        choices = ", ".join(repr(name) for name in sorted({"eager", "inductor", *compiler_names()}))
        raise ShardingError(f"backend is {backend!r}, which is no compiler\n  try: one of {choices}")


@autocast_off()
def compile_graph(module: fx.GraphModule, backend: str = "inductor", adding: Sequence[int] = ()) -> Compiled:
    """A callable that computes what `module` does, for inputs like its placeholders' "val".

    module:  functional, local tensors, one flat tuple returned. Not changed.
    backend: "inductor", "eager" (the graph's own ops, one by one), or any torch.compile backend.

    adding:  results that are added in place to what inputs after the others hold (`add_early`); of "eager" alone.

    The callable checks nothing: sizes, strides, dtypes and devices must be those of the placeholders.
    Every collective with meta "serves" is, under a profiler, inside a range of that name.
    Raises ShardingError for an unknown backend, UnsupportedOpError if Inductor reorders collectives.
    """
    check_backend(backend)
    if backend == "eager":
        expanded = name_collectives(expand_ops(module, called=CALLED))
        joined = run_rank_passes(expanded, [FuseEager(), JoinLinears(), WriteIntoBuckets()])
        # Last: passes take functional graphs.
        return boxed_forward(call_directly(add_early(joined, adding) if adding else joined))
    assert not adding, "what compilers are given is functional"
    expanded = name_collectives(expand_ops(module))
    examples = fresh_fakes([n.meta["val"] for n in expanded.graph.nodes if n.op == "placeholder"])
    with torch.no_grad(), torch_deprecations_ignored():
        if backend == "inductor":
            lower_as_collectives(NAMED_BY_NAME, ALL_REDUCE_IN_PLACE)
            launches, wanted = _launches(expanded), result_values(module)
            with inductor_graph_order():
                call, source = compile_with_inductor(expanded, examples, partial(keep_strides, wanted=wanted))
            _check_order(launches, source)
            return call
        compiler = lookup_compiler(backend)
        assert compiler is not None
        function = compiler(expanded, examples)
        return lambda inputs: function(*inputs)


def name_collectives(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, in place, with every collective that has meta "serves" carrying that name."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in NAMED and node.meta.get("serves"):
            node.target = NAMED[node.target]
            node.args = (*node.args, str(node.meta["serves"]))
    module.recompile()
    return module


Launch = tuple[str, tuple[str, ...]]
"""A collective as it appears in code: its name and its string arguments (reduction, group, serves)."""

_LAUNCH = re.compile(r"torch\.ops\.\w*_c10d_functional\.(\w+)\.default\((.*)\)")
_QUOTED = re.compile(r"'([^']*)'")


def _launches(module: fx.GraphModule) -> list[Launch]:
    """The collectives of a graph in order, waits not counted."""
    nodes = [n for n in module.graph.nodes if is_collective(n) and n.target is not _WAIT]
    return [
        (n.target.__name__.split(".")[0], tuple(a for a in n.args if isinstance(a, str)))  # type: ignore[union-attr]
        for n in nodes
    ]


def _check_order(expected: list[Launch], source: str) -> None:
    """All ranks must start the same collectives in the same order, and their graphs say which; a compiler
    that sorts by sizes may sort differently on ranks with shards of different sizes."""
    found = [(name.removesuffix("_"), tuple(_QUOTED.findall(args))) for name, args in _LAUNCH.findall(source)]
    found = [launch for launch in found if launch[0] != "wait_tensor"]
    if source and found != expected:
        raise UnsupportedOpError(
            f"Inductor changed the collectives of a graph: {len(expected)} in the graph, {len(found)} in its "
            'code, or in another order\n  try: backend="eager"'
        )
