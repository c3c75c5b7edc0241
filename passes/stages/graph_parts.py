"""What every op of a joint graph is to a cut into stages: the forward in order, the backward, and what every stage has.

`use` nodes are looked through: a stage shares its readers anew, and pieces of a batch hold what they read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from passes.ir.joint import GraphInput, JointGraph, after_tangents, dependents, ops_by_phase, results_nbytes
from passes.ir.op_traits import draws, is_cast, is_collect, is_of_piece, is_product, is_use, is_view

TensorKind = tuple[tuple[int, ...], torch.dtype]


def base(node: fx.Node) -> fx.Node:
    """What a `use` is of, any other node itself."""
    while is_use(node):
        (node,) = node.all_input_nodes
    return node


def operands(node: fx.Node) -> list[fx.Node]:
    """The values that `node` reads, without repeats."""
    return list(dict.fromkeys(map(base, node.all_input_nodes)))


Line = tuple[str, str]


def model_line(node: fx.Node) -> Line:
    """(module, source line) that an op comes from, or that it differentiates."""
    return node.meta.get("module", ""), node.meta.get("source", "")


def tensor_kind(node: fx.Node) -> TensorKind:
    value = node.meta["val"]
    return tuple(value.shape), value.dtype


def is_glued(node: fx.Node) -> bool:
    """One of the results of an op, or what a piece of a batch adds to the whole: it is where its operand is."""
    return node.target is operator.getitem or is_collect(node)


def passes_with_piece(joint: JointGraph, node: fx.Node) -> bool:
    """Whether a value may pass between stages: where a batch is in pieces, they pass with each."""
    return joint.pieces == 1 or is_of_piece(node)


@dataclass(frozen=True)
class GraphParts:
    """joint: the graph, of which all nodes are.

    forward:    ops of the forward that belong to one stage, in the graph's order.
    backward:   ops of the backward that belong to one stage, in the graph's order.
    everywhere: ops that each stage computes which needs them: of inputs alone and no product (masks, positions, draws
                by counter) or before the pieces of a batch, and views and casts of parameters.
    results:    for each of `joint.outputs` the value returned, None for none.
    changed:    buffers that the call changes -> the new value.
    after:      the tangents, and every op that depends on one.
    """

    joint: JointGraph
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    everywhere: frozenset[fx.Node]
    results: tuple[fx.Node | None, ...]
    changed: Mapping[fx.Node, fx.Node]
    after: frozenset[fx.Node]
    _roots: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def specs(self) -> dict[fx.Node, GraphInput]:
        return dict(self.joint.given)

    @cached_property
    def in_forward(self) -> frozenset[fx.Node]:
        return frozenset(self.forward)

    @cached_property
    def in_backward(self) -> frozenset[fx.Node]:
        return frozenset(self.backward)

    @cached_property
    def held(self) -> frozenset[fx.Node]:
        """Placeholders that not every stage may have: parameters, buffers that change, inputs that get a gradient."""
        given = self.joint.outputs
        trained = {self.joint.placeholders[spec.index] for spec in given if spec.kind == "grad"}
        params = set(self.joint.given_as("param"))
        return frozenset(params | trained | set(self.changed))

    @cached_property
    def held_uses(self) -> tuple[fx.Node, ...]:
        """By which pieces of a batch read what is there once."""
        uses = filter(is_use, self.joint.graph.nodes)
        return tuple(use for use in uses if use.meta.get("runs") == "before")

    @cached_property
    def differentiable(self) -> frozenset[fx.Node]:
        """Values of the forward that a gradient may pass through."""
        trained = [self.joint.placeholders[s.index] for s in self.joint.outputs if s.kind == "grad"]
        found = dependents(self.joint.graph.nodes, trained)
        return frozenset(
            n for n in found if isinstance(v := n.meta.get("val"), torch.Tensor) and _has_gradient(v)
        )

    @cached_property
    def _others(self) -> tuple[Mapping[str, fx.Node], ...]:
        return tuple({node.name: node for node in other.graph.nodes} for other in self.joint.others)

    def kinds(self, node: fx.Node) -> tuple[TensorKind, ...]:
        """In all pieces of a batch: two rows of two look like two columns of two, and one row does not."""
        return tensor_kind(node), *(tensor_kind(other[node.name]) for other in self._others)

    def roots(self, node: fx.Node) -> frozenset[fx.Node]:
        """The placeholders that an op of `everywhere`, or a placeholder, is computed from."""
        if node.op == "placeholder":
            return frozenset((node,))
        if node not in self._roots:
            self._roots[node] = frozenset[fx.Node]().union(*(self.roots(n) for n in operands(node)))
        return self._roots[node]

    def is_sent_as_operand(self, node: fx.Node) -> bool:
        """Views of what is no larger: a stage that needs one makes it of what it views."""
        if not is_view(node) or is_glued(node) or node not in self.in_forward:
            return False
        (viewed,) = operands(node)
        return viewed in self.in_forward and results_nbytes(viewed) <= results_nbytes(node)

    def leaves(self, wanted: Iterable[fx.Node], place: int, of: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
        """What has to be at hand at `place` for the values `wanted` of the forward: placeholders and ops of `forward`.

        of: the place of every op of the forward; what is made at an earlier place is passed on.
        """
        stack = list(wanted)
        while stack:
            node = stack.pop()
            if node.op == "placeholder" or node in self.everywhere:
                yield from self.roots(node)
            elif of[node] < place and self.is_sent_as_operand(node):
                stack.extend(operands(node))
            else:
                yield node


def graph_parts(joint: JointGraph) -> GraphParts:
    forward, _ = ops_by_phase(joint)
    first = set(forward)
    results = tuple(None if node is None else base(node) for node in joint.results)
    ends = list(zip(joint.outputs, results, strict=True))
    nodes = joint.placeholders
    changed = {nodes[spec.index]: n for spec, n in ends if spec.kind == "buffer" and n is not None}
    everywhere = _everywhere(joint, set(changed))
    ops = [n for n in joint.graph.nodes if n.op == "call_function" and not is_use(n) and n not in everywhere]
    return GraphParts(
        joint,
        tuple(n for n in ops if n in first),
        tuple(n for n in ops if n not in first),
        frozenset(everywhere),
        results,
        changed,
        frozenset(after_tangents(joint)),
    )


def _everywhere(joint: JointGraph, changed: set[fx.Node]) -> set[fx.Node]:
    kept = {joint.placeholders[spec.index] for spec in joint.outputs if spec.kind == "grad"} | changed
    free = set(joint.given_as("input", "buffer", "constant", "seed")) - kept
    params = set(joint.given_as("param"))
    found: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op != "call_function" or is_use(node):
            continue
        read = operands(node)
        if all(n in free for n in read) and _is_shared(node):
            free.add(node)
            found.add(node)
        elif (
            read
            and all(n in params for n in read)
            and not is_glued(node)
            and (is_view(node) or is_cast(node))
        ):
            params.add(node)
            found.add(node)
    return found


def _is_shared(node: fx.Node) -> bool:
    """Of ops of inputs alone. What runs before the pieces of a batch is not sent with each of them."""
    return not draws(node) and (not is_product(node) or node.meta.get("runs") == "before")


def _has_gradient(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
