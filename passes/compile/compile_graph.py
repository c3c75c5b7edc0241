"""From a rank's forward or backward graph to a callable: compiled, or the code that was compiled before, here or in
another process, which is found by the graph alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from cost_model.cache_files import remember, remembered
from cost_model.errors import ShardingError, UnsupportedOpError, log, reject
from passes.compile.bind_device import CALLED, WriteIntoBuckets, expand_ops
from passes.compile.fuse_eager import FuseEager, call_directly
from passes.compile.join_linears import JoinLinears
from passes.ir.graph_pass import duplicate_module, run_rank_passes
from passes.ir.joint import tensors_of
from passes.ir.op_traits import is_collective, is_view
from passes.ir.op_work import Word
from passes.ir.process_state import autocast_off
from passes.ir.sized_graph import Numbers, take_numbers
from passes.ir.torch_compat import fake_mode_of, no_fake_mode, torch_deprecations_ignored
from passes.ir.torch_inductor import (
    boxed_forward,
    compile_with_inductor,
    compiler_names,
    inductor_graph_order,
    inductor_settings,
    load_inductor_code,
    lookup_compiler,
    lower_as_collectives,
)
from passes.ir.torch_sizes import SizeSymbols, evaluation, fresh_fakes
from passes.ops.collective_ops import ALL_REDUCE_IN_PLACE, NAMED, NAMED_BY_NAME, exchange_rows
from passes.ops.routed_ops import counted_places, own_places

_NAMESPACES = ("aten", "prims", "_c10d_functional", "autoshard")
"""Of ops whose bodies are torch's, or this code's."""


def code_name(module: fx.GraphModule) -> str | None:
    """What decides the code of a graph, hashed; None where something else may: an op of the user's, whose body may
    change, or a constant. Sizes that are symbols have the names that `SizeSymbols` gives them by their places."""
    if not all(map(_is_known, module.graph.nodes)):
        return None
    return hashlib.sha256("\n".join(_lines(module)).encode()).hexdigest()


def _is_known(node: fx.Node) -> bool:
    if node.op == "call_function":
        target: Any = node.target
        return getattr(target, "namespace", "") in _NAMESPACES or target.__module__ == "_operator"
    return node.op in ("placeholder", "output")


def _lines(module: fx.GraphModule) -> Iterator[str]:
    yield inductor_settings()
    places = {node: f"%{place}" for place, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        target = node.target if node.op == "call_function" else ""
        looks = [
            (tuple(v.shape), v.stride(), v.storage_offset(), v.dtype, v.device) for v in tensors_of(node)
        ]
        given = map_arg((node.args, node.kwargs), lambda operand: Word(places[operand]))
        yield f"{node.op} {target} {given} {node.meta.get('serves')} {looks}"


def keep_code(
    name: str | None, key: str | None, symbols: SizeSymbols | None = None, numbers: Sequence[Any] = ()
) -> None:
    """key: of the code of this name in the compiler's cache. symbols: of its sizes; numbers: in them, that it takes."""
    if name is None or key is None:
        return
    held = Numbers(symbols or SizeSymbols(()))
    for number in numbers:
        held.place(number)
    # Codes of one graph: each for other answers to what was asked of its sizes.
    remember("code", name, text=json.dumps([[key, held.holds(), held.codes()], *_kept(name)][:8]))


def kept_code(
    name: str, symbols: SizeSymbols | None = None
) -> tuple[Callable[[list[Any]], Any], list[Any]] | None:
    """The code of this name, and the numbers that it takes. symbols: of the graph's sizes, as they count now: what was
    asked of them when it was made must hold, and is asked of them again."""
    symbols = symbols or SizeSymbols(())
    for key, holds, codes in _kept(name):
        evaluate = evaluation(len(symbols.hints), holds, codes)
        if evaluate(symbols.hints) is None:
            continue
        numbers = evaluate(symbols.sizes)
        try:
            with torch.no_grad():
                code = load_inductor_code(key)
        except Exception as error:  # of a cache that was cut off, or a torch that loads otherwise
            log.debug("compiled code is not loaded: %s", error)
            continue
        if code is not None and numbers is not None:
            return code, numbers
    return None


def _kept(name: str) -> list[tuple[str, list[str], list[str]]]:
    """Of each code its key, what holds of its sizes, and how the numbers that it takes are computed of them."""
    try:
        return json.loads(remembered("code", name) or "[]")
    except ValueError:  # cut off
        return []


aten = torch.ops.aten


def result_values(module: fx.GraphModule) -> list[Tensor | None]:
    """What each result of `module` looks like; None: it is no tensor, or of as many rows as come, which Inductor does
    not pad."""
    results = module.graph.output_node().args[0]
    is_known = lambda node: isinstance(node, fx.Node) and "counted" not in node.meta
    return [node.meta["val"] if is_known(node) else None for node in results]  # type: ignore[union-attr]


def keep_strides(module: fx.GraphModule, wanted: Sequence[Tensor | None]) -> None:
    """Copy results of `module`, in place, that do not lie as those of `wanted` do.

    Inductor pads matrices for tensor cores and cuts the product: a view with longer rows, which it would return as it
    is, since of a view it keeps the order of the strides only. [torch/_inductor/fx_passes/pad_mm.py, 2.11 to 2.13]

    %cut: bf16[16, 4] = slice(%padded, 1, 0, 4)  # strides 8, 1; wanted 4, 1
    return (%cut,)
    ->
    %copy = clone(%cut, memory_format=contiguous_format)
    return (%copy,)
    """
    output = module.graph.output_node()
    given = output.args[0]
    with module.graph.inserting_before(output):
        results = [
            _lying_as(module.graph, node, like) if isinstance(node, fx.Node) and like is not None else node
            for node, like in zip(given, wanted, strict=True)  # type: ignore[arg-type]
        ]
    output.args = (tuple(results) if isinstance(given, tuple) else results,)
    module.recompile()


def _lying_as(graph: fx.Graph, node: fx.Node, like: Tensor) -> fx.Node:
    value = _value_now(node)
    order = sorted(range(like.ndim), key=lambda dim: (-like.stride(dim), dim))
    if not isinstance(value, Tensor) or _strides(value) == _strides(like):
        return node
    if not _is_dense(like, order):  # such as a broadcast result: nothing that is written out lies so
        return node
    back = [order.index(dim) for dim in range(like.ndim)]
    turned = order != sorted(order)
    node = _called(graph, aten.permute.default, node, order) if turned else node
    node = _called(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
    return _called(graph, aten.permute.default, node, back) if turned else node


def _value_now(node: fx.Node) -> Any:
    """What `node` looks like. Of a view it is computed again: where the product under it was padded, meta "val" still
    says how the view lay before."""
    before = node.meta.get("val")
    viewed = _value_now(node.args[0]) if is_view(node) and isinstance(node.args[0], fx.Node) else None
    if not isinstance(viewed, Tensor):
        return before
    try:
        return _run(node.target, viewed, *node.args[1:], **node.kwargs)
    except RuntimeError:  # no view of what lies so: Inductor copies it
        return before


def _is_dense(x: Tensor, order: Sequence[int]) -> bool:
    """Whether it is contiguous with its dims in `order`. No op is asked: it is a fake of another mode."""
    expected = 1
    for dim in reversed(order):
        if x.shape[dim] > 1 and x.stride(dim) != expected:
            return False
        expected *= x.shape[dim]
    return True


def _strides(x: Tensor) -> list[int]:
    """Of a dim of size 1 it says nothing."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def _called(graph: fx.Graph, op: Any, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    made = graph.call_function(op, (node, *args), kwargs)
    made.meta["val"] = _run(op, node.meta["val"], *args, **kwargs)
    return made


def _run(op: Any, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Under the mode of `value`: while Inductor compiles, another one is at work."""
    with no_fake_mode(), fake_mode_of(value):
        return op(value, *args, **kwargs)


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


def compile_graph(module: fx.GraphModule, backend: str = "inductor", adding: Sequence[int] = ()) -> Compiled:
    """A callable that computes what `module` does, for inputs like its placeholders' "val".

    module:  functional, local tensors, one flat tuple returned. Not changed.
    backend: "inductor", "eager" (the graph's own ops, one by one), or any torch.compile backend.

    adding:  results that are added in place to what inputs after the others hold (`add_early`); of "eager" alone.

    The callable checks nothing: sizes, strides, dtypes and devices must be those of the placeholders.
    Every collective with meta "serves" is, under a profiler, inside a range of that name.
    Raises ShardingError for an unknown backend, UnsupportedOpError if Inductor reorders collectives.
    """
    return compile_sized(module, None, backend, adding)[0]


@autocast_off()
def compile_sized(
    module: fx.GraphModule, symbols: SizeSymbols | None, backend: str = "eager", adding: Sequence[int] = ()
) -> tuple[Compiled, list[Any]]:
    """`compile_graph` of a graph whose sizes are in symbols: what it makes takes, after the inputs, the values of these
    numbers. A compiler may ask things of sizes, which must hold."""
    check_backend(backend)
    is_eager = backend == "eager"
    assert is_eager or not adding, "what compilers are given is functional"
    name = code_name(module) if backend == "inductor" else None
    if name is not None and (kept := kept_code(name, symbols)) is not None:
        return kept
    called, traced = CALLED if is_eager else {}, None if symbols is None else symbols.traced
    expanded = name_collectives(expand_ops(module, called=called, traced=traced))
    made = _for_eager(expanded, adding) if is_eager else count_rows(expanded)
    numbers = [] if symbols is None else take_numbers(made.graph, () if is_eager else symbols.sizes)
    if numbers:
        made.recompile()
    return boxed_forward(made) if is_eager else _compiled(
        made, module, backend, name, symbols, numbers
    ), numbers


def _compiled(
    expanded: fx.GraphModule,
    module: fx.GraphModule,
    backend: str,
    name: str | None = None,
    symbols: SizeSymbols | None = None,
    numbers: Sequence[Any] = (),
) -> Compiled:
    """name: by which the code is kept. numbers: in symbols, that it takes after the inputs of `module`."""
    tensors = expanded.graph.find_nodes(op="placeholder")[: len(module.graph.find_nodes(op="placeholder"))]
    values, counted = ([node.meta.get(key) for node in tensors] for key in ("val", "counted"))
    examples = [*fresh_fakes(values, counted), *numbers]
    with torch.no_grad(), torch_deprecations_ignored():
        if backend == "inductor":
            lower_as_collectives({**NAMED_BY_NAME, "exchange_rows": exchange_rows}, ALL_REDUCE_IN_PLACE)
            launches, wanted = _launches(expanded), result_values(module)
            with inductor_graph_order():
                last = partial(keep_strides, wanted=wanted)
                hints = "" if symbols is None else str(symbols.hints)
                call, source, key = compile_with_inductor(expanded, examples, last, hints)
            _check_order(launches, source)
            keep_code(name, key, symbols, numbers)
            return call
        compiler = lookup_compiler(backend)
        assert compiler is not None
        function = compiler(expanded, examples)
        return lambda inputs: function(*inputs)


def _for_eager(expanded: fx.GraphModule, adding: Sequence[int] = ()) -> fx.GraphModule:
    joined = run_rank_passes(expanded, [FuseEager(), JoinLinears(), WriteIntoBuckets()])
    # Last: passes take functional graphs.
    return call_directly(add_early(joined, adding) if adding else joined)


def count_rows(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, in place, with numbers of rows that are known at run time alone."""
    for node in module.graph.find_nodes(op="call_function", target=own_places):
        node.target = counted_places
    return module


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


def add_early(module: fx.GraphModule, places: Collection[int]) -> fx.GraphModule:
    """`module` with an input more, at the end, for each of the results at `places`, in their order: what is there so
    far, to which the result is added in place and which is returned in its stead.

    Added up by the caller, all results of a piece would live at once: as many bytes as all gradients have, which the
    allocator takes from the system and gives back for every piece.
    """
    made = duplicate_module(module)
    graph, output = made.graph, made.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for place in sorted(places):
        result = results[place]
        with graph.inserting_before(first):
            so_far = graph.placeholder(f"so_far_{place}")
        so_far.meta["val"] = result.meta["val"]
        with graph.inserting_before(first if result.op == "placeholder" else result.next):
            results[place] = graph.call_function(aten.add_.Tensor, (so_far, result))
        results[place].meta = dict(result.meta)
    output.args = (tuple(results),)
    graph.lint()
    made.recompile()
    return made
