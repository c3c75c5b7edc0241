"""`JointGraph`: one ATen FX graph of forward and backward together, and what its ends mean.

And the values of nodes that are emitted into it: fake tensors, computed once for equal calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.ir.process_state import autocast_off
from passes.ir.routing import BALANCED, Routing
from passes.ir.torch_compat import no_fake_mode
from passes.ir.torch_dispatch import input_nodes


class FakeCalls:
    """Runs ops on the values (meta "val") of their operands; equal calls share one result.

    Calls are equal if the op is, every tensor operand in shape, strides, offset, dtype and device, and
    every other argument in type and value. A result says how a tensor looks, and not whose storage it
    shares: of a model's layers, equal but for the numbers in them, each op is run once.

    For values of one fake mode (or of none: `meta` tensors).
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def __call__(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], mode: Any = None
    ) -> Any:
        """`target(*args, **kwargs)` with nodes standing for their values. mode: entered to run it, if given."""
        key = (target, looks(tuple(args)), looks(kwargs))
        found = self._results.get(key, _MISSING)
        if found is _MISSING:
            values = map_arg((tuple(args), kwargs), lambda node: node.meta["val"])
            with torch.no_grad(), autocast_off(), nullcontext() if mode is None else mode:
                found = self._results[key] = _laid_as_run(target, target(*values[0], **values[1]), *values[0])
        return found


_MISSING = object()
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def _laid_as_run(target: Callable[..., Any], fake: Any, operand: Any = None, *rest: Any) -> Any:
    """`fake`, with the strides that a tensor has. Fakes give dims of size 1 others in a view (torch 2.13), by which a
    convolution chooses the order of its result."""
    if target not in _RESHAPES or fake.is_meta or 1 not in fake.shape:
        return fake
    with no_fake_mode():
        strides = target(torch.empty_strided(operand.shape, operand.stride(), device="meta"), *rest).stride()
    return fake if strides == fake.stride() else fake.as_strided(fake.shape, strides)


_PLAIN = frozenset({int, bool, float, str, type(None), torch.dtype})


def _whole_look(tensor: torch.Tensor) -> Hashable:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)


def looks(argument: Any, of_tensor: Callable[[torch.Tensor], Hashable] = _whole_look) -> Hashable:
    """An op's arguments with every tensor, a node's value too, exchanged for what `of_tensor` says, and every other
    value beside its type."""
    kind = type(argument)
    if kind in _PLAIN:
        return kind, argument
    if kind is fx.Node:
        argument = argument.meta["val"]
    if isinstance(argument, torch.Tensor):
        return of_tensor(argument)
    if isinstance(argument, (tuple, list)):
        return type(argument).__name__, *[looks(item, of_tensor) for item in argument]
    if isinstance(argument, dict):
        return tuple((key, looks(item, of_tensor)) for key, item in argument.items())
    return type(argument), argument


CPU = torch.device("cpu")
"""Where every model is traced and every graph is made (docs/decisions/0020)."""

T = TypeVar("T")

InputKind = Literal["param", "buffer", "constant", "input", "tangent", "seed"]
OutputKind = Literal["output", "grad", "buffer"]


@dataclass(frozen=True)
class GraphInput:
    """One placeholder.

    name:  parameter or buffer name in the user's model ("layers.0.w.weight"), a readable path of
           a user input ("input_ids", "args[0]"), "tangent 0", "seed".
    index: for "input" the position among the flattened tensor inputs of a call; for "tangent" the
           position among the flattened tensor outputs of a call; otherwise 0.
    """

    kind: InputKind
    name: str
    index: int = 0


@dataclass(frozen=True)
class GraphOutput:
    """One element of the flat tuple the graph returns.

    "output": tensor output `index` of a call. "grad": gradient of the input named `name`, whose
    placeholder position is `index`. "buffer": the new value of the buffer `name` (placeholder
    position `index`).
    """

    kind: OutputKind
    name: str
    index: int = 0


@dataclass(frozen=True)
class JointGraph:
    """module: placeholders in the order of `inputs`; its output node returns one flat tuple in the
    order of `outputs` (an element may be None: no gradient).

    Every call_function node has meta: "val" (FakeTensor or tuple of them, global shapes),
    "phase" ("forward" | "backward"), "module" (dotted path in the user's model, "" for the root),
    "source" ("file.py:12", "" if unknown), and "checkpoint" (which call of `torch.utils.checkpoint` runs it) where
    one does, with "saved" where that call's policy saves its result. Placeholders have "val". The graph is
    functional: no in-place ops, no get_attr (constants are inputs of kind "constant", values in `constants`).

    pieces: how often the ops whose meta "runs" is "piece" run in a step, once for each piece of the batch; others, that
    say "before" or "after", run once (`passes.micro_batches`). 1: nothing is in pieces, and no op says when it runs.
    The graph is then that of the first piece, and `others` are those of the other pieces, in order. in_flight: of how
    many pieces at once a stage of a pipeline holds what their backward will read.

    head_pieces: into how many parts over tokens head and loss are written (`passes.micro_batches.cut_head`).
    routing: of rows to experts.

    calls: of ops on the values of ranks' programs, which are much the same in all programs of a graph. facts: of
    `known`.

    device: where the ranks run. The graph itself is on the CPU, on every machine; `passes.compile.bind_device` moves a
    rank's graph there.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    device: torch.device = CPU
    pieces: int = 1
    others: tuple[JointGraph, ...] = ()
    in_flight: int = 1
    head_pieces: int = 1
    routing: Routing = BALANCED
    calls: FakeCalls = field(default_factory=FakeCalls, repr=False, compare=False)
    facts: dict[Hashable, tuple[tuple[object, ...], Any]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def known(self, name: Hashable, compute: Callable[[], T]) -> T:
        """What `compute` says of this graph, once: for the many plans of a graph that no pass changes any more."""
        asked = self.module, self.inputs, self.outputs, self.pieces
        given, found = self.facts.get(name, ((), None))
        if len(given) < len(asked) or any(one is not two for one, two in zip(given, asked, strict=True)):
            self.facts[name] = asked, (found := compute())
        return found  # type: ignore[return-value]

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def output_node(self) -> fx.Node:
        return self.graph.output_node()

    @property
    def results(self) -> list[fx.Node | None]:
        """The flat returned nodes, parallel to `outputs`."""
        return list(self.output_node.args[0])  # type: ignore[arg-type]

    @property
    def given(self) -> list[tuple[fx.Node, GraphInput]]:
        """Each placeholder and what it is."""
        return list(zip(self.placeholders, self.inputs, strict=True))

    def given_as(self, *kinds: InputKind) -> list[fx.Node]:
        """The placeholders of these kinds."""
        return [node for node, spec in self.given if spec.kind in kinds]

    @property
    def returned(self) -> list[tuple[GraphOutput, fx.Node | None]]:
        """What each result is, and its node."""
        return list(zip(self.outputs, self.results, strict=True))

    @property
    def trained(self) -> set[fx.Node]:
        """Placeholders of the parameters that get a gradient."""
        graded = {end.index for end, result in self.returned if end.kind == "grad" and result is not None}
        return {node for i, (node, spec) in enumerate(self.given) if i in graded and spec.kind == "param"}

    @property
    def trains(self) -> bool:
        """Whether there are gradients: without, nothing is kept that pieces would make less of."""
        return any(end.kind == "grad" and result is not None for end, result in self.returned)


def repeats(node: fx.Node) -> int:
    """How often an op runs in a step."""
    return int(node.meta.get("repeats", 1))


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among `node`'s args and kwargs in order of appearance, repeats included."""
    found: list[fx.Node] = []
    for argument in node.args:
        if isinstance(argument, fx.Node):
            found.append(argument)
        elif isinstance(argument, _NESTED):
            _collect(argument, found)
    if node.kwargs:
        _collect(node.kwargs, found)
    return found


_NESTED = (tuple, list, dict)


def map_operands(node: fx.Node, new: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`node`'s (args, kwargs) with its tensor operands replaced, in the order of `tensor_operands`."""
    queue = iter(new)
    return _replaced(node.args, queue), _replaced(node.kwargs, queue)


# These two are most of what planning asks of a graph; torch's pytree does the same ten times slower.
def _collect(nested: Any, found: list[fx.Node]) -> None:
    for item in nested.values() if isinstance(nested, dict) else nested:
        if isinstance(item, fx.Node):
            found.append(item)
        elif isinstance(item, _NESTED):
            _collect(item, found)


def _replaced(argument: Any, queue: Iterator[Any]) -> Any:
    """`argument` as plain tuples, lists and dicts, its nodes exchanged for what comes next."""
    if isinstance(argument, fx.Node):
        return next(queue)
    if isinstance(argument, tuple):
        return tuple(_replaced(item, queue) for item in argument)
    if isinstance(argument, list):
        return [_replaced(item, queue) for item in argument]
    if isinstance(argument, dict):
        return {key: _replaced(item, queue) for key, item in argument.items()}
    return argument


def result_index(node: fx.Node) -> tuple[fx.Node, int]:
    """(producer, which of its results) that `node` stands for: looks through `getitem`."""
    if node.op == "call_function" and node.target is operator.getitem:
        producer, index = node.args
        return producer, int(index)  # type: ignore[return-value, arg-type]
    return node, 0


def node_value(node: fx.Node, index: int = 0) -> torch.Tensor:
    """The FakeTensor of result `index` of `node`."""
    value = node.meta["val"]
    return value[index] if isinstance(value, (tuple, list)) else value


def result_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """Shapes of a node's results; () for a result that is None."""
    return [() if value is None else tuple(value.shape) for value in node_values(node)]


def tensor_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """Shapes of a node's tensor operands, and of its results."""
    return [tuple(node_value(operand).shape) for operand in tensor_operands(node)] + result_shapes(node)


def node_values(node: fx.Node) -> Sequence[torch.Tensor | None]:
    """The FakeTensors of all results of `node`; None for one that does not exist."""
    value = node.meta["val"]
    return value if isinstance(value, (tuple, list)) else (value,)


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Of the results of `node` those that are tensors; none of a node without a value."""
    return (
        [value for value in node_values(node) if isinstance(value, torch.Tensor)]
        if "val" in node.meta
        else []
    )


def first_value(node: fx.Node) -> torch.Tensor:
    """The FakeTensor of the first result of `node` that is not None (a masked-out gradient is)."""
    return next(v for v in node_values(node) if v is not None)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and all they are computed from."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(input_nodes(node))
    return found


def dependents(nodes: Iterable[fx.Node], sources: Iterable[fx.Node]) -> set[fx.Node]:
    """`sources`, and all of `nodes`, which are in the graph's order, that are computed from them."""
    found = set(sources)
    for node in nodes:
        if any(operand in found for operand in input_nodes(node)):
            found.add(node)
    return found


def results_nbytes(node: fx.Node) -> int:
    """Bytes of all results of `node`."""
    return sum(value.numel() * value.element_size() for value in node_values(node) if value is not None)


@dataclass(frozen=True)
class Segments:
    """The ops of a step in the order in which they run: what runs before the pieces of a batch, forward and backward of
    each piece, what runs after. Where nothing is in pieces, all is forward and backward."""

    before: tuple[fx.Node, ...]
    forward: list[fx.Node]
    backward: list[fx.Node]
    after: tuple[fx.Node, ...]


def segments(joint: JointGraph) -> Segments:
    """The ops of `joint` by the part of a step in which they run."""
    forward, backward = ops_by_phase(joint)
    if joint.pieces == 1:
        return Segments((), forward, backward, ())
    whole = [*forward, *backward]
    of = lambda ops, runs: [node for node in ops if node.meta["runs"] == runs]
    piece = of(forward, "piece"), of(backward, "piece")
    return Segments(tuple(of(whole, "before")), *piece, tuple(of(whole, "after")))


def ops_by_phase(joint: JointGraph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The ops of the forward (what outputs and new buffers depend on) and of the backward (the rest)."""
    ops = [n for n in joint.graph.nodes if n.op == "call_function"]
    forward = ancestors(n for spec, n in joint.returned if n is not None and spec.kind != "grad")
    dependent = after_tangents(joint)
    late = [n for n in ops if n not in forward]
    roots = [*(n for n in late if n in dependent), *late]
    return [n for n in ops if n in forward], on_demand(roots, forward)


def after_tangents(joint: JointGraph) -> set[fx.Node]:
    """The tangents, and every op that depends on one."""
    return dependents(joint.graph.nodes, joint.given_as("tangent"))


def on_demand(roots: Iterable[fx.Node], available: AbstractSet[fx.Node] = frozenset()) -> list[fx.Node]:
    """The ops that lead from `available` values and placeholders to `roots`, each right before its
    first reader: what the backward computes again or gathers lives no longer than it must."""
    order: dict[fx.Node, None] = {}
    unmet = lambda node: node.op == "call_function" and node not in order and node not in available
    for root in roots:
        stack = [root]
        while stack:
            missing = [n for n in input_nodes(stack[-1]) if unmet(n)] if unmet(stack[-1]) else []
            if missing:
                stack.extend(reversed(missing))
            elif unmet(node := stack.pop()):
                order[node] = None
    return list(order)
