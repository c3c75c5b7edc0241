"""What every pass is, how a sequence of them is run, verified or not, and the few edits that they make to a graph."""

from __future__ import annotations

import bisect
import dataclasses
import keyword
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import fx
from torch.fx.node import map_arg

from passes.ir.graph_properties import (
    ENDS,
    INVARIANTS,
    RANK_INVARIANTS,
    BrokenGraphError,
    HasGraph,
    Kept,
    Property,
)
from passes.ir.joint import FakeCalls, JointGraph
from passes.ir.torch_compat import fake_mode_of, lazy_module
from passes.ir.torch_dispatch import copied_node

G = TypeVar("G", bound=HasGraph)


@dataclass(frozen=True)
class Pass(ABC, Generic[G]):
    """A rewrite of a graph. Its fields are its options; its name is its class in kebab-case.

    requires: properties of the graph that it is given.
    ensures:  properties of the graph that it returns. They hold until a pass says that it breaks them.
    breaks:   properties that may hold before and not after.
    keeps:    what it does not change.

    A pass owns the graph it is given and may rewrite it in place; copy first to keep the original.
    """

    requires: ClassVar[tuple[Property[Any], ...]] = ()
    ensures: ClassVar[tuple[Property[Any], ...]] = ()
    breaks: ClassVar[tuple[Property[Any], ...]] = ()
    keeps: ClassVar[tuple[Kept[Any], ...]] = ()

    @property
    def name(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    @abstractmethod
    def __call__(self, graph: G, /) -> G: ...


@dataclass(frozen=True)
class GraphPass(Pass[JointGraph]):
    """A rewrite of a joint graph. `passes.ir.graph_properties` says what holds before and after every one.

    Beyond that, and not checked: outputs and gradients are the same functions of the inputs, rounding aside.
    """

    keeps = (ENDS,)


class OpPass(GraphPass):
    """Rewrites op by op, in their order. What nothing reads then is dropped."""

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in list(joint.graph.nodes):
            if node.op == "call_function":
                self.rewrite(node)
        erase_dead(joint.graph)
        return joint

    @abstractmethod
    def rewrite(self, node: fx.Node) -> None: ...


@dataclass(frozen=True)
class RankPass(Pass[fx.GraphModule]):
    """A rewrite of one rank's forward or backward. `passes.ir.graph_properties` says what holds before and after."""

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        self.rewrite(module.graph)
        module.recompile()
        return module

    def rewrite(self, graph: fx.Graph) -> None:
        """In place."""


def run_passes(joint: JointGraph, passes: Iterable[GraphPass]) -> JointGraph:
    """`joint` after `passes`. With AUTOSHARD_VERIFY=1 in the environment every graph on the way is checked.

    Raises BrokenGraphError, then, naming the pass, the property, the node and its source line.
    """
    return _runner()(joint, tuple(passes), INVARIANTS)


def run_rank_passes(module: fx.GraphModule, passes: Iterable[RankPass]) -> fx.GraphModule:
    """`run_passes` for one rank's graph."""
    return _runner()(module, tuple(passes), RANK_INVARIANTS)


def properties_after(graph_pass: Pass[Any], before: Sequence[Property[Any]]) -> tuple[Property[Any], ...]:
    """What holds after a pass, of what held before it and what it ensures."""
    kept = [held for held in before if held not in graph_pass.breaks and held not in graph_pass.ensures]
    return (*kept, *graph_pass.ensures)


def _runner() -> Callable[[G, Sequence[Pass[G]], Sequence[Property[G]]], G]:
    return _verified if os.environ.get("AUTOSHARD_VERIFY") == "1" else _plain


def _plain(graph: G, passes: Sequence[Pass[G]], invariants: Sequence[Property[G]]) -> G:
    for graph_pass in passes:
        graph = graph_pass(graph)
    return graph


def _verified(graph: G, passes: Sequence[Pass[G]], invariants: Sequence[Property[G]]) -> G:
    """`_plain`, with the invariants, all that was ensured and not broken, and what is kept, checked after each."""
    held: tuple[Property[Any], ...] = ()
    for first, graph_pass in enumerate(passes):
        required = graph_pass.requires if first else (*invariants, *graph_pass.requires)
        _check(graph, required, f"{graph_pass.name} requires")
        before = [(kept, kept.lines(graph)) for kept in graph_pass.keeps]
        graph = graph_pass(graph)
        held = properties_after(graph_pass, held)
        _check(graph, (*invariants, *held), f"{graph_pass.name} breaks")
        for kept, lines in before:
            change = kept.change(lines, kept.lines(graph))
            if change is not None:
                raise _error(f"{graph_pass.name} keeps", kept.name, change)
    return graph


def _check(graph: G, properties: Sequence[Property[G]], what: str) -> None:
    for stated in properties:
        violation = stated.violation(graph)
        if violation is not None:
            raise _error(what, stated.name, violation)


def _error(what: str, name: str, violation: str) -> BrokenGraphError:
    return BrokenGraphError(
        f"{what}: {name}\n  {violation}\n  try: report this with the model; AUTOSHARD_VERIFY=0 runs without the check"
    )


INHERITED = ("phase", "module", "source", "checkpoint", "saved", "runs", "repeats")


def tensor_at(node: fx.Node, position: int = 0) -> fx.Node:
    """The tensor operand that is argument `position`."""
    operand = node.args[position]
    assert isinstance(operand, fx.Node), f"argument {position} of {node.format_node()} is no tensor"
    return operand


def int_at(node: fx.Node, position: int) -> int:
    """The number (a dim, an index) that is argument `position`."""
    return int(cast(int, node.args[position]))


def ints_at(node: fx.Node, position: int) -> list[int]:
    """The list of numbers (dims, sizes) that is argument `position`."""
    return list(cast(Sequence[int], node.args[position]))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Global shape of a node with one result."""
    return tuple(node.meta["val"].shape)


_CALLS: WeakKeyDictionary[fx.Graph, FakeCalls] = WeakKeyDictionary()
"""A graph that is rewritten -> the ops run for it: those of equal layers are run once."""


def inherit(node: fx.Node, origin: fx.Node) -> None:
    """Give `node` the phase, module and source of `origin`."""
    for key in INHERITED:
        if key in origin.meta:
            node.meta[key] = origin.meta[key]


def emit_at(
    point: fx.Node, origin: fx.Node, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> fx.Node:
    """A new op right before `point`, with the phase, module and source of `origin`.

    Its value is computed under the fake mode of `origin`'s value (a tensor or a tuple of tensors).
    """
    with point.graph.inserting_before(point):
        node = point.graph.call_function(target, tuple(args), kwargs)
    inherit(node, origin)
    calls = _CALLS.setdefault(point.graph, FakeCalls())
    node.meta["val"] = calls(target, args, kwargs, fake_mode_of(origin.meta["val"]))
    return node


def emit(anchor: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """`emit_at` before, and on behalf of, one and the same node."""
    return emit_at(anchor, anchor, target, args, kwargs)


def call_like(node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    """`emit` of `node`'s own op on other arguments."""
    return emit(node, cast(Callable[..., Any], node.target), *args, **kwargs)


def replace(node: fx.Node, new: fx.Node) -> None:
    """Let every reader of `node` read `new`, and erase `node`."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def erase_dead(graph: fx.Graph) -> None:
    """Erase ops that nothing reads. Legal because the graph is functional."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def copy_joint(joint: JointGraph) -> JointGraph:
    """The same graph in new nodes, so that passes can rewrite it.

    Placeholders are renamed after what they are ("layers.0.w.weight" -> layers_0_w_weight), ops
    after their aten op with a number, in graph order: the same model always gets the same names.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    names = iter(joint.inputs)
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            name = _identifier(next(names).name)
            copy = graph.create_node("placeholder", name, name=name)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
            copy = graph.create_node(node.op, node.target, args, kwargs, name=_op_name(node))
        if node.op == "placeholder":
            copy.target = copy.name  # names are made unique; the generated signature prints the target
        copy.meta = dict(node.meta)
        new[node] = copy
    return dataclasses.replace(joint, module=lazy_module(graph, "JointGraph"))


def duplicate_joint(joint: JointGraph) -> JointGraph:
    """The same graph in new nodes of the same names, by which its ops are known: a stage's are those of the call."""
    return dataclasses.replace(joint, module=duplicate_module(joint.module, "JointGraph"))


def duplicate_module(module: fx.GraphModule, name: str = "GraphModule") -> fx.GraphModule:
    """The same nodes once more, of the same names, so that they can be ordered or changed. name: of its class."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        new[node] = copied_node(graph, node, new.__getitem__)
        assert new[node].name == node.name, (new[node], node)
    return lazy_module(graph, name)


def _op_name(node: fx.Node) -> str | None:
    """ "add" for aten.add.Tensor: fx appends a number where it is taken. None: fx chooses."""
    packet = getattr(node.target, "overloadpacket", None)
    return None if packet is None else str(packet.__name__)


def _identifier(name: str) -> str:
    text = re.sub(r"\W+", "_", name).strip("_")
    return f"_{text}" if not text or text[0].isdigit() or keyword.iskeyword(text) else text


class Sweep:
    """Nodes in the graph's order, each once; more may be added while they come. last_first: in the other order. What is
    few of a large graph is found without a walk through all of it."""

    def __init__(self, nodes: Iterable[fx.Node], *, last_first: bool = False) -> None:
        self._wanted, self._seen = list[fx.Node](), set[fx.Node]()
        self._next = -1 if last_first else 0
        self.add(nodes)

    def add(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node not in self._seen:
                self._seen.add(node)
                bisect.insort(self._wanted, node)

    def __iter__(self) -> Iterator[fx.Node]:
        while self._wanted:
            yield self._wanted.pop(self._next)
