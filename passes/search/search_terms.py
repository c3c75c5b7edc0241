"""What is asked of a search: where it starts, how far it goes, what ops may choose from, what layouts ends have.

Beside an op's own rule: along which dims ops that move data (slice, cat, pad, flip, roll) are split, what a tensor that
no op makes may look like, and where the order of its axes is free.

Ops that move data can be split along any dim. That is offered only along one that can be split together with a window
(convolution, pooling, resizing, neighbourhood attention): space. Elsewhere it would cost the search time and has no
use: the halves of rotary embeddings would offer the channels of a head, at 3 % more strategies of a Llama layer on
three axes and half as long again to price its edges, for the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from networkx.utils import UnionFind
from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value, result_index, tensor_operands
from passes.ir.op_traits import is_cast, is_use
from passes.layout.layout import Assignment, Layout, NodeLayouts
from passes.rules.core.rule import OpRule
from passes.search.search_space import SearchSpace

Choose = Callable[[Sequence[NodeLayouts]], Sequence[int]]
"""Of an op's strategies the positions of those that are allowed: one at least, or InfeasibleError."""


@dataclass(frozen=True)
class Narrowing:
    """held: layouts of nodes of a graph like this one at other sizes. allowed: by node name.
    further: of the graph that is searched what else is allowed, of those that are.
    still: (reader, position among its tensor operands) -> axes over which the value does not move before it is read:
    they split the same dim of it as it is held and as it is read, or none."""

    held: Mapping[str, NodeLayouts] = field(default_factory=dict)
    allowed: Mapping[str, Choose] = field(default_factory=dict)
    further: Callable[[JointGraph], Mapping[str, Choose]] | None = None
    still: Mapping[tuple[str, int], frozenset[str]] = field(default_factory=dict)

    def of(self, joint: JointGraph) -> Narrowing:
        """The same, by node name alone."""
        if self.further is None:
            return self
        more = self.further(joint)
        within = {name: in_turn(self.allowed[name], more[name]) for name in self.allowed.keys() & more}
        return replace(self, allowed={**self.allowed, **more, **within}, further=None)

    def places(self, name: str, strategies: Sequence[NodeLayouts]) -> tuple[int, ...] | None:
        """Positions of the strategies that node `name` keeps; None: all. A held one that it does not have is no reason
        to keep none."""
        if name in self.allowed:
            return tuple(self.allowed[name](strategies))
        if name in self.held:
            sign = _signature(self.held[name])
            place = next((i for i, s in enumerate(strategies) if _signature(s) == sign), None)
            return None if place is None else (place,)
        return None


def most(good: Callable[[NodeLayouts], int]) -> Choose:
    """Those that are best."""

    def choose(strategies: Sequence[NodeLayouts]) -> Sequence[int]:
        found = list(map(good, strategies))
        best = max(found)
        return [i for i, count in enumerate(found) if count == best]

    return choose


def in_turn(first: Choose, then: Choose) -> Choose:
    """Of those that the first allows, those that the other does."""

    def choose(strategies: Sequence[NodeLayouts]) -> Sequence[int]:
        kept = first(strategies)
        return [kept[i] for i in then([strategies[i] for i in kept])]

    return choose


ALL = Narrowing()
"""Nothing is left out."""


def stays(held: Layout, read: Layout, axes: Iterable[str]) -> bool:
    """Whether nothing moves over `axes` between the two layouts of a value, of which neither is pending."""
    return all(held.dim_of(axis) == read.dim_of(axis) for axis in axes)


def _signature(strategy: NodeLayouts) -> Hashable:
    """What of a strategy does not depend on sizes: the axes of every dim, and what is pending."""
    return tuple((layout.dims, layout.partial) for layout in strategy.tensors)


@dataclass(frozen=True)
class SearchStart:
    """near: the layouts of a plan of the same graph, which may be good under these prices too; None: none is known.
    gap: share of the step by which the plan may be above the bound when the search ends by itself; None: as the task
    says, and where there is none, when nothing is left to try. together: all axes are used together, wherever the ends
    of the graph allow it: a plan at once (`passes.search.coarse_to_fine`). room: bytes; what holds more, as it is
    counted, is only where others start."""

    near: Assignment | None = None
    gap: float | None = None
    together: bool = False
    room: float = math.inf

    def ending_at(self, gap: float) -> SearchStart:
        """Where it does not say at which gap it ends: at this one."""
        return self if self.gap is not None else replace(self, gap=gap)

    def choice(self, space: SearchSpace) -> tuple[int, ...] | None:
        """`near` among the strategies of `space`; None where one of it is not listed there."""
        if self.near is None:
            return None
        slots = (slot for slot in space.output_slots if slot is not None)
        ends = zip(slots, self.near["output"].operands, strict=True)
        layouts = {space.names[slot]: NodeLayouts((), (layout,)) for slot, layout in ends} | {**self.near}
        places: list[int] = []
        for name, strategies in zip(space.names, space.strategies, strict=True):
            held = layouts.get(name)
            alike = (i for i, one in enumerate(strategies) if held is not None and same_layouts(one, held))
            if (place := next(alike, None)) is None:
                return None
            places.append(place)
        return tuple(places)


COLD = SearchStart()
"""Nothing is known."""


def same_layouts(one: NodeLayouts, other: NodeLayouts) -> bool:
    """Whether two strategies have the same layouts, whatever is stored for them."""
    return (one.operands, one.results, one.splits) == (other.operands, other.results, other.splits)


@dataclass(frozen=True)
class Boundary:
    """inputs:  placeholder position -> the layouts it may have (absent: any split in torch's sizes).
    outputs: result position -> the layouts it may have, where it is not tied (absent: any split in torch's sizes).
    tied:    result position -> placeholder position whose layout it shares: a gradient and its
             parameter, a buffer's new value and the buffer, an output and its tangent.
    """

    inputs: Mapping[int, tuple[Layout, ...]]
    outputs: Mapping[int, tuple[Layout, ...]]
    tied: Mapping[int, int]

    def has_parts(self, joint: JointGraph) -> bool:
        """Whether an input of the call is split in another dim than the first."""
        given = (self.inputs.get(i, ()) for i, spec in enumerate(joint.inputs) if spec.kind == "input")
        return any(any(layout.dims[1:]) for layouts in given for layout in layouts)


def boundary_of(
    joint: JointGraph,
    parameters: Mapping[str, Layout],
    inputs: Mapping[int, Layout],
    outputs: Mapping[int, Layout | None],
    free: Collection[int] = (),
    state: Mapping[int, int] | None = None,
) -> Boundary:
    """The ends of `joint`.

    parameters: pinned parameters by name; the others are free.
    inputs:     layout of user inputs by tensor position; the others are replicated (global).
    outputs:    layout of user outputs by tensor position; None leaves it to the search; the others
                are replicated. A tangent always has its output's layout.
    free:    tensor outputs of any layout, also without a tangent.
    state:   tensor outputs that have the layout of a user input, whose new value they are, by its position: any that
             `inputs` does not say.
    Buffers, constants and the seed are replicated.
    """
    nodes, state = joint.placeholders, state or {}
    placed: dict[int, int] = {}
    fixed: dict[int, tuple[Layout, ...]] = {}
    tangents: dict[int, int] = {}
    for position, (spec, node) in enumerate(zip(joint.inputs, nodes, strict=True)):
        replicated = Layout.replicated(node_value(node).ndim)
        if spec.kind == "param":
            if spec.name in parameters:
                fixed[position] = (parameters[spec.name],)
        elif spec.kind == "input":
            placed[spec.index] = position
            if spec.index in inputs or spec.index not in state.values():
                fixed[position] = (inputs.get(spec.index, replicated),)
        elif spec.kind == "tangent":
            tangents[spec.index] = position
            layout = outputs.get(spec.index, replicated)
            if layout is not None:
                fixed[position] = (layout,)
        else:
            fixed[position] = (replicated,)
    tangents |= {index: placed[position] for index, position in state.items()}
    return _tie_outputs(joint, fixed, tangents, outputs, free)


def _tie_outputs(
    joint: JointGraph,
    fixed: Mapping[int, tuple[Layout, ...]],
    tangents: Mapping[int, int],
    outputs: Mapping[int, Layout | None],
    free: Collection[int],
) -> Boundary:
    tied: dict[int, int] = {}
    untied: dict[int, tuple[Layout, ...]] = {}
    for position, (spec, result) in enumerate(joint.returned):
        if result is None:
            continue
        if spec.kind == "output":
            if spec.index in tangents:
                tied[position] = tangents[spec.index]
            elif spec.index not in free:
                layout = outputs.get(spec.index)
                untied[position] = (layout or Layout.replicated(node_value(result).ndim),)
        else:
            tied[position] = spec.index
    return Boundary(fixed, untied, tied)


def out_of_space(ops: Sequence[tuple[fx.Node, OpRule]]) -> Mapping[fx.Node, frozenset[str]]:
    """Node -> factors along which it moves data, and along which no window of the graph can be split with it.

    ops: with their rules (`ops_of`).
    """
    if not any(rule.moved for _, rule in ops):
        return {}
    together = _split_together(ops)
    space = {
        together[node, rule.operands_and_results[t][d][0]]
        for node, rule in ops
        for t, d in rule.windows
        if rule.operands_and_results[t][d][0] not in rule.moved
    }
    return {
        node: frozenset(f for f in rule.moved if together[node, f] not in space)
        for node, rule in ops
        if rule.moved
    }


def factors_along(
    ops: Sequence[tuple[fx.Node, OpRule]], dims: Iterable[tuple[fx.Node, int]]
) -> Mapping[fx.Node, frozenset[str]]:
    """Node -> its factors that are split where these dims of placeholders are, if nothing moves. ops: as above."""
    together = _split_together(ops)
    roots = {together[node, 0, dim] for node, dim in dims}
    return {node: frozenset(f for f in rule.sizes if together[node, f] in roots) for node, rule in ops}


def _split_together(ops: Sequence[tuple[fx.Node, OpRule]]) -> UnionFind:
    """Of (node, factor) and (node, result, dim)."""
    together = UnionFind()
    for node, rule in ops:
        _connect(together, node, rule)
    return together


def _connect(together: UnionFind, node: fx.Node, rule: OpRule) -> None:
    """Each factor that may be split, with the dims that it splits."""
    values = [result_index(operand) for operand in tensor_operands(node)]
    values += [(node, i) for i in range(len(rule.results))]
    for (producer, result), dims in zip(values, rule.operands_and_results, strict=True):
        for d, dim in enumerate(dims):
            if dim and dim[0] not in rule.whole:
                together.union((node, dim[0]), (producer, result, d))


def tensor_rule(shape: Sequence[int]) -> OpRule:
    """The rule of a tensor that simply is: every dim a factor of its own."""
    names = [f"d{i}" if length > 1 else "" for i, length in enumerate(shape)]
    dims = tuple((name,) if name else () for name in names)
    return OpRule((), (dims,), {n: length for n, length in zip(names, shape, strict=True) if n})


def is_storable(layout: Layout, shape: Sequence[int], mesh: MeshSpec) -> bool:
    """DTensor states an axis order other than the mesh's only where the split is even."""
    for length, axes in zip(shape, layout.dims, strict=True):
        in_order = sorted(axes, key=mesh.index) == list(axes)
        if not in_order and length % mesh.size(*axes):
            return False
    return True


def free_axis_order(joint: JointGraph) -> set[fx.Node]:
    """Nodes that only pass a parameter or a gradient along: there the order of axes matters."""
    found: set[fx.Node] = set()
    parameters = set(joint.given_as("param"))
    for node in joint.graph.nodes:
        passes_on = is_use(node) or is_cast(node)
        if passes_on and tensor_operands(node)[0] in parameters | found:
            found.add(node)
    for node in reversed(joint.graph.nodes):
        passes_on = is_use(node) or is_cast(node)
        if passes_on and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    return found
