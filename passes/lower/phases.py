"""Split one rank's joint graph into the forward and the backward that run as two programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from passes.ir.joint import GraphInput, GraphOutput, ancestors, on_demand, result_index
from passes.ir.op_traits import is_cheap, is_collective, is_view, numel
from passes.ir.process_state import collector_paused
from passes.ir.torch_compat import lazy_module
from passes.ir.torch_dispatch import copied_input, copied_node, input_nodes
from passes.lower.own_rows import with_sorted_rows
from passes.states.compute_again import choose_saved, runs_again

_aten = torch.ops.aten


@dataclass(frozen=True)
class Backward:
    """The graph of the backward and where its inputs come from.

    module:    placeholders in the order passed, saved, tangents; returns one flat tuple.
    passed:    positions among the forward's placeholders: inputs handed on as they were.
    saved:     positions among the forward's flat results.
    tangents:  the tangents it takes.
    gradients: what it returns; an element may be None (no gradient).
    """

    module: fx.GraphModule
    passed: tuple[int, ...]
    saved: tuple[int, ...]
    tangents: tuple[GraphInput, ...]
    gradients: tuple[GraphOutput, ...]


@dataclass(frozen=True)
class Phases:
    """forward:  takes `inputs` (the joint graph's, less the tangents), returns one flat tuple:
              `outputs` (kinds "output" and "buffer") and after them the values saved.
    backward: None where the joint graph has no gradients.
    """

    forward: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    backward: Backward | None


@collector_paused()
def split_phases(
    module: fx.GraphModule,
    inputs: Sequence[GraphInput],
    outputs: Sequence[GraphOutput],
    *,
    fused: bool = True,
) -> Phases:
    """Forward and backward of one rank's joint graph; `inputs` and `outputs` say what its ends mean.

    An op runs in the forward if an output or new buffer depends on it, in the backward otherwise; a
    collective by its meta "turn", if it has one: on a rank whose shard is empty nothing may read what the
    others of the group wait for. So a collective that only gradients depend on (ZeRO-3's second gather of
    a weight) stays in the backward, and none ever runs twice. The order of those that nothing reads is
    for `passes.schedule.overlap`. Values that both need are saved, or computed again from others that are, at
    the fewest bytes (`passes.states.compute_again`). No output aliases an input or another output. fused: whether a
    compiler joins kernels, so that what is computed again is stored nowhere.

    `module` is left as it is.
    """
    joint = _Joint(with_sorted_rows(module), inputs, outputs)
    forward_inputs = tuple(i for i in joint.inputs if i.kind != "tangent")
    saved, backward_ops = _plan_backward(joint, fused) if joint.gradients else ([], [])
    results = [*joint.values, *(n for n in saved if n not in joint.values)]
    leaves = [p for p, spec in joint.placeholders if spec.kind != "tangent"]
    keep = ancestors(n for n in [*results, *joint.exchanges[0]] if n is not None)
    forward = extract(leaves, [n for n in joint.ops if n in keep], results)
    backward = None
    if joint.gradients:
        positions = {node: results.index(node) for node in saved}
        backward = _backward(joint, leaves, positions, backward_ops)
    return Phases(forward, forward_inputs, tuple(joint.value_specs), backward)


class _Joint:
    """A private copy of the joint graph, so that clones can be added to it."""

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[GraphInput], outputs: Sequence[GraphOutput]
    ) -> None:
        self.graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        *given, output = module.graph.nodes
        for node in given:
            new[node] = copied_node(self.graph, node, new.__getitem__)
        returned = [None if node is None else new[node] for node in output.args[0]]  # type: ignore[union-attr]
        nodes = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.inputs = tuple(inputs)
        self.placeholders = list(zip(nodes, inputs, strict=True))
        pairs = list(zip(outputs, returned, strict=True))
        nodes_of: Callable[[bool], list[Any]] = lambda grad: [
            n for o, n in pairs if (o.kind == "grad") is grad
        ]
        self.value_specs = [o for o, _ in pairs if o.kind != "grad"]
        self.values = unaliased(nodes_of(False), set())
        self.gradient_specs = [o for o, _ in pairs if o.kind == "grad"]
        self.exchanges = (exchanges(self.graph.nodes, 0), exchanges(self.graph.nodes, 1))
        forward = ancestors(n for n in [*self.values, *self.exchanges[0]] if n is not None)
        self.gradients = [_apart(node) for node in unaliased(nodes_of(True), forward)]
        self.copies = self._protect_buffers()
        self.ops = [n for n in self.graph.nodes if n.op == "call_function"]

    def _protect_buffers(self) -> set[fx.Node]:
        """Let every reader of a buffer that the call overwrites read a copy taken before.

        The backward runs after the new value is written; it may save the copy, never the buffer.
        """
        copies: set[fx.Node] = set()
        for spec in self.value_specs:
            if spec.kind != "buffer":
                continue
            old = self.placeholders[spec.index][0]
            readers = list(old.users)
            if not readers:
                continue
            with self.graph.inserting_before(readers[0]):
                copy = self.graph.call_function(_aten.clone.default, (old,))
            copy.meta = dict(old.meta)
            old.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)
            copies.add(copy)
        return copies


def _plan_backward(joint: _Joint, fused: bool) -> tuple[list[fx.Node], list[fx.Node]]:
    """(values to save in graph order, ops of the backward in the order they run)."""
    results = [n for n in [*joint.gradients, *joint.exchanges[1]] if n is not None]
    needed = ancestors(results)
    forward = ancestors(n for n in [*joint.values, *joint.exchanges[0]] if n is not None)
    late: set[fx.Node] = {p for p, spec in joint.placeholders if spec.kind == "tangent"}
    assert not late & forward, "a forward output depends on a tangent"
    dependent = set(late)  # on a tangent: these set the order of the backward
    for node in joint.ops:
        if node in forward or node not in needed:
            continue
        operands = input_nodes(node)
        if any(n in dependent for n in operands):
            dependent.add(node)
        if any(n in late for n in operands) or not is_cheap(node) or node in results or runs_again(node):
            late.add(node)
    candidates = [n for n in joint.ops if n not in late and (n in forward or n in needed)]
    returned = {n for n in joint.values if n is not None}
    saved = choose_saved(candidates, forward, late, joint.copies, returned, fused=fused)
    roots = [n for n in joint.ops if n in dependent] + results
    return saved, on_demand(roots, set(saved))


def _backward(
    joint: _Joint, leaves: list[fx.Node], positions: dict[fx.Node, int], ops: list[fx.Node]
) -> Backward:
    read = {n for op in ops for n in input_nodes(op)} | {n for n in joint.gradients if n is not None}
    passed = [i for i, node in enumerate(leaves) if node in read]
    saved = [node for node in positions if node in read]
    tangents = [(node, spec) for node, spec in joint.placeholders if spec.kind == "tangent"]
    inputs = [*(leaves[i] for i in passed), *saved, *(node for node, _ in tangents)]
    return Backward(
        module=extract(inputs, ops, joint.gradients),
        passed=tuple(passed),
        saved=tuple(positions[node] for node in saved),
        tangents=tuple(spec for _, spec in tangents),
        gradients=tuple(joint.gradient_specs),
    )


def extract(
    inputs: Sequence[fx.Node], ops: Sequence[fx.Node], results: Sequence[fx.Node | None]
) -> fx.GraphModule:
    """A module that computes `results` from `inputs` by `ops` (all nodes of one graph, `ops` in an
    order that may run). Names and meta are kept."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = copied_input(graph, node)
    for node in ops:
        new[node] = copied_node(graph, node, new.__getitem__)
    graph.output(tuple(None if node is None else new[node] for node in results))
    return lazy_module(graph)


def exchanges(nodes: Iterable[fx.Node], phase: int) -> list[fx.Node]:
    """The collectives, waits included, that all ranks of a group have in that phase (0 the forward)."""
    return [n for n in nodes if is_collective(n) and n.meta.get("turn", (None,))[0] == phase]


def unaliased(values: Sequence[fx.Node | None], owned: Set[fx.Node]) -> list[fx.Node | None]:
    """`values` with a copy of each whose storage is an input's, an earlier value's, or in `owned`."""
    owners = set(owned)
    result: list[fx.Node | None] = []
    for node in values:
        owner = None if node is None else _owner(node)
        if node is None or owner is None:
            result.append(None)
            continue
        copied = owner.op == "placeholder" or owner in owners
        owners.add(owner)
        result.append(_copied(node) if copied else node)
    return result


def _apart(node: fx.Node | None) -> fx.Node | None:
    """A copy of what shares its storage with as much again and more, such as a rank's part of what was reduced whole:
    a gradient lives until the update, and all of its storage with it."""
    if node is None:
        return None
    whole, part = numel(_owner(node)), numel(node)
    return _copied(node) if whole >= 2 * part and whole > 0 else node


def _copied(node: fx.Node) -> fx.Node:
    placeholders = [n for n in node.graph.nodes if n.op == "placeholder"]
    with node.graph.inserting_after(node if node.op == "call_function" else placeholders[-1]):
        copy = node.graph.call_function(_aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    return copy


def _owner(node: fx.Node) -> fx.Node:
    """Whose storage the value of `node` is. Each of an op's several results has its own, if the op is no view."""
    while is_view(result_index(node)[0]):
        node = node.all_input_nodes[0]
    return node


@dataclass(frozen=True)
class BackwardHalves:
    """input:  takes what the backward takes; returns the gradients `first`, and after them what the other half reads.
    weight: takes of the backward's inputs those at `given`, and after them what `input` returned for it; returns the
            gradients `second`.
    first, second: positions among the backward's gradients.
    """

    input: fx.GraphModule
    weight: fx.GraphModule
    first: tuple[int, ...]
    second: tuple[int, ...]
    given: tuple[int, ...]


def split_backward(backward: Backward, received: Collection[str]) -> BackwardHalves:
    """received: names of the gradients that are sent to the stage before. No op runs in both halves.

    The first half of the first stage is empty. What the second half reads of the first is kept between them; results of
    the first may be among that.
    """
    nodes: list[fx.Node] = list(backward.module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    results = cast(tuple[fx.Node | None, ...], nodes[-1].args[0])
    places = range(len(results))
    first = tuple(i for i in places if backward.gradients[i].name in received)
    second = tuple(i for i in places if i not in first)
    early = ancestors(n for i in first if (n := results[i]) is not None)
    # Of an op with several results these are kept, and not the tuple.
    early |= {n for n in nodes if result_index(n)[0] is not n and result_index(n)[0] in early}
    ops = [n for n in nodes if n.op == "call_function"]
    soon, late = [n for n in ops if n in early], [n for n in ops if n not in early]
    read = {n for op in late for n in op.all_input_nodes} | {results[i] for i in second}
    kept = [n for n in soon if n in read]
    given = [i for i, n in enumerate(inputs) if n in read]
    return BackwardHalves(
        extract(inputs, soon, [*(results[i] for i in first), *kept]),
        extract([*(inputs[i] for i in given), *kept], late, [results[i] for i in second]),
        first,
        second,
        tuple(given),
    )
