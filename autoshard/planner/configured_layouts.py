"""What layouts a configuration allows: of weights and gradients, and of what is computed of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import fx

from autoshard.plan.family_choices import family_narrowing, made_of_experts
from autoshard.planner.configuration import Configuration
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value
from passes.ir.op_traits import is_cast, is_collect, is_piece, is_use, is_view
from passes.layout.layout import Layout, NodeLayouts
from passes.ops.routed_ops import READ_ROWS
from passes.search.search_terms import Choose, Narrowing, factors_along, in_turn
from passes.strategies.cuts import ops_of


def configured_narrowing(joint: JointGraph, mesh: MeshSpec, configuration: Configuration) -> Narrowing:
    """joint: in its micro-batches; of stages too, which are cut of it. Raises as `family_narrowing`."""
    family = configuration.family
    narrowing = Narrowing() if family is None else family_narrowing(family, joint, mesh)
    allowed = {**narrowing.allowed, **_as_frameworks_do(joint, configuration)}
    return replace(narrowing, allowed=allowed, further=AlongTheCall.of(joint, configuration))


def _as_frameworks_do(joint: JointGraph, configuration: Configuration) -> Mapping[str, Choose]:
    """Every rank makes gradients of its own part of the batch, to be summed over the data-parallel ranks. Of what
    micro-batches share: weights are gathered in each, and gradients reduced; or once, before and after."""
    found: dict[str, Choose] = {}
    summed = {*configuration.batch_axes, *configuration.stored_axes}
    summed |= {"cp"} if configuration.context > 1 else set()
    stored, by_expert = frozenset(configuration.stored_axes), frozenset(configuration.expert_axes)
    experts = made_of_experts(joint) if by_expert else frozenset()
    named = {spec.name for node, spec in joint.given if node in experts}
    split = _most(lambda one: len(stored & _splits(one)))
    for spec, node in joint.returned:
        if spec.kind == "grad" and node is not None:
            pending = _pending(summed - by_expert if spec.name in named else summed)
            *after, made = _until_made(node)
            for one in filter(is_collect, after):
                found[one.name] = split if configuration.each_piece else pending
            found[made.name] = pending
    for node in joint.graph.nodes if stored else ():
        if is_use(node) and node.meta.get("runs") == "before":
            axes, sign = (
                stored - by_expert if node in experts else stored,
                1 if configuration.each_piece else -1,
            )
            found[node.name] = _most(lambda one, axes=axes, sign=sign: sign * len(axes & _splits(one)))
    return found


def _pending(axes: Set[str]) -> Choose:
    """Those that are sums to come over most of these axes."""
    return _most(lambda one: len(axes & {axis for axis, _ in one.partial}))


@dataclass(frozen=True)
class AlongTheCall:
    """What is computed of a call's tensors is split along their first dim over the axes of the batch, and along the
    second over those of its sequences, but within attention, which gathers keys, exchanges them for heads, or passes
    them round. Rows of experts are split by expert over the axes of these, and their ids known to all of them.

    dims: per such dim of the call the axes, and those dims of the whole graph's values, by name, that are split with
    it: a stage knows what it receives by its name."""

    dims: tuple[tuple[frozenset[str], frozenset[tuple[str, int]]], ...]
    by_expert: frozenset[str]

    @staticmethod
    def of(joint: JointGraph, configuration: Configuration) -> AlongTheCall:
        ops = list(ops_of(joint))
        heads = [*joint.given_as("input"), *filter(is_piece, joint.graph.nodes)]
        sequence = ("cp",) if configuration.context > 1 else ()
        dims: list[tuple[frozenset[str], frozenset[tuple[str, int]]]] = []
        for dim, axes in enumerate((configuration.batch_axes, sequence)):
            along = factors_along(ops, [(node, dim) for node in heads if node_value(node).ndim > dim])
            split = {
                (node.name, d)
                for node, rule in ops
                for d, factors in enumerate(rule.results[0])
                if along[node].intersection(factors[:1])
            }
            dims.append((frozenset(axes), frozenset(split | {(node.name, dim) for node in heads})))
        return AlongTheCall(tuple(dims), frozenset(configuration.expert_axes))

    def __call__(self, joint: JointGraph) -> Mapping[str, Choose]:
        ops, found = list(ops_of(joint)), dict[str, Choose]()
        named = {node.name: node for node in joint.graph.nodes}
        for dim, (axes, places) in enumerate(self.dims):
            along = factors_along(ops, [(named[name], d) for name, d in places if name in named])
            for node, rule in ops:
                exchanges = any(way.exchange is not None for way in rule.ways)
                routed = node.meta.get("rows") or any(user.target in READ_ROWS for user in node.users)
                own = axes - self.by_expert if routed else axes
                if along[node] and own and not (dim and exchanges):
                    choose = _split_along(along[node], own)
                    found[node.name] = in_turn(found[node.name], choose) if node.name in found else choose
        return found


def _split_along(factors: frozenset[str], axes: frozenset[str]) -> Choose:
    """Those that split most of one of these factors over these axes."""
    return _most_of(
        lambda one: sum(len(axes.intersection(of.axes)) for of in one.splits if of.factor in factors)
    )


def _splits(layout: Layout) -> frozenset[str]:
    """Axes that split a dim: not those over which it is a sum to come."""
    return frozenset(itertools.chain(*layout.dims))


def _until_made(gradient: fx.Node) -> list[fx.Node]:
    """From where it is returned to where it is made, before it is cast, viewed or added to those of other pieces."""
    found = [gradient]
    while is_collect(found[-1]) or is_view(found[-1]) or is_cast(found[-1]):
        found.append(found[-1].all_input_nodes[0])
    return found


def _most(good: Callable[[Layout], int]) -> Choose:
    return _most_of(lambda strategy: good(strategy.results[0]))


def _most_of(good: Callable[[NodeLayouts], int]) -> Choose:
    def choose(strategies: Sequence[NodeLayouts]) -> Sequence[int]:
        found = list(map(good, strategies))
        return [i for i, count in enumerate(found) if count == max(found)]

    return choose
