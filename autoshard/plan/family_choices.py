"""What a family of plans allows at the nodes of a graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autoshard.plan.families import Family, Role
from cost_model.errors import InfeasibleError
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, ancestors, node_value, result_index, tensor_operands
from passes.ir.op_traits import is_product
from passes.layout.layout import Layout, NodeLayouts
from passes.ops.routed_ops import ROUTED
from passes.search.search_terms import Choose, Narrowing, most

_Wish = Callable[[NodeLayouts], bool]


def family_narrowing(family: Family, joint: JointGraph, mesh: MeshSpec) -> Narrowing:
    """What the family allows of parameters, and of the ops that read them.

    Where no strategy is all that the family says (a bias of 5 cannot be split over 8), those that are most of it.
    Raises InfeasibleError, saying why, where the mesh or the model has no such plan.
    """
    if len(mesh.real_axes()) < family.axes:
        raise InfeasibleError(
            f"it needs {family.axes} mesh {'axes' if family.axes > 1 else 'axis'} of several ranks, "
            f"and {mesh} has {len(mesh.real_axes())}\n  try: a mesh of more axes"
        )
    wishes: dict[str, list[_Wish]] = {}
    found = _Wishes(family, joint, mesh)
    for name, wish in found.all():
        wishes.setdefault(name, []).append(wish)
    return Narrowing(allowed={name: _most(wish) for name, wish in wishes.items()}, still=found.still())


def _most(wishes: Sequence[_Wish]) -> Choose:
    return most(lambda strategy: sum(wish(strategy) for wish in wishes))


@dataclass(frozen=True)
class _Read:
    """Operand `position` of `reader` is `parameter`, or what ops of one operand make of it."""

    parameter: fx.Node
    reader: fx.Node
    position: int

    @property
    def by_product(self) -> bool:
        return is_product(self.reader)


@dataclass(frozen=True)
class _Wishes:
    family: Family
    joint: JointGraph
    mesh: MeshSpec

    def all(self) -> Iterator[tuple[str, _Wish]]:
        for axis, role in self.family.roles(self.mesh):
            if role == "experts":
                yield from self._by_expert(axis)
            elif role == "sequence":
                yield from self._residual(axis, True)
            else:
                yield from self._of_weights(axis, role)

    def _of_weights(self, axis: str, role: Role) -> Iterator[tuple[str, _Wish]]:
        but = self._experts if (axis, "experts") in self.family.by_axis else frozenset[fx.Node]()
        for parameter in (one for one in self.joint.given_as("param") if one not in but):
            if role != "used":
                yield parameter.name, _stored(axis, role)
            elif parameter in self._splittable:
                yield parameter.name, self._held(axis, parameter)
        for read in (one for one in self._reads if one.parameter not in but):
            if role != "used":
                yield read.reader.name, _read_whole(axis, read.position)
            elif read.by_product and read.parameter in self._splittable:
                yield read.reader.name, self._read_split(axis, read)
        if role == "used" and self.family.residual is not None:
            yield from self._residual(axis, self.family.residual)

    def _by_expert(self, axis: str) -> Iterator[tuple[str, _Wish]]:
        for parameter in self._experts:
            yield parameter.name, lambda strategy: _splits(strategy.results[0], axis, [0])
        for read in self._reads:
            if read.reader.target in ROUTED and read.parameter in self._experts:
                position = read.position
                yield (
                    read.reader.name,
                    lambda strategy, position=position: _splits(strategy.operands[position], axis, [0]),
                )

    def still(self) -> dict[tuple[str, int], frozenset[str]]:
        """Every read on the way from a weight to the products that read it split: it stays where it is."""
        roles, experts = self.family.roles(self.mesh), self._experts
        by_expert = frozenset(axis for axis, role in roles if role == "experts")
        used = frozenset(axis for axis, role in roles if role == "used")
        axes = {node: used - by_expert if node in experts else used for node in self._splittable}
        axes |= {node: axes.get(node, frozenset()) | by_expert for node in experts}
        passed = {node.name: of for node, of in _passed_on(self.joint).items() if node is not of}
        found = {(name, 0): axes[of] for name, of in passed.items() if axes.get(of)}
        ends = [read for read in self._reads if read.by_product and axes.get(read.parameter)]
        return found | {(read.reader.name, read.position): axes[read.parameter] for read in ends}

    @cached_property
    def _reads(self) -> list[_Read]:
        return list(_reads(self.joint))

    @cached_property
    def _experts(self) -> frozenset[fx.Node]:
        """Weights of experts, of which "experts" speaks. InfeasibleError if there are none."""
        found = _expert_weights(self._reads)
        if not found and any(role == "experts" for _, role in self.family.roles(self.mesh)):
            raise InfeasibleError("the model has no products with experts\n  try: another family")
        return found

    @cached_property
    def _splittable(self) -> set[fx.Node]:
        """Parameters of which "used" speaks. InfeasibleError if there are none."""
        found = {
            read.parameter for read in self._reads if read.by_product and node_value(read.parameter).ndim > 1
        }
        if self.family.vocabulary:
            found = {parameter for parameter in found if self._words(parameter)}
        if not found and any(role == "used" for _, role in self.family.roles(self.mesh)):
            missing = "whose length is a vocabulary's" if self.family.vocabulary else "of two dims or more"
            raise InfeasibleError(
                f"the model has no weight {missing} that a product reads\n  try: another family"
            )
        return found

    def _words(self, node: fx.Node) -> list[int]:
        """The dims of a value that are as long as the vocabulary."""
        return [
            dim for dim, length in enumerate(node_value(node).shape) if length in _vocabularies(self.joint)
        ]

    def _held(self, axis: str, parameter: fx.Node) -> _Wish:
        words = self._words(parameter) if self.family.vocabulary else None
        return lambda strategy: _splits(strategy.results[0], axis, words)

    def _read_split(self, axis: str, read: _Read) -> _Wish:
        operand = tensor_operands(read.reader)[read.position]
        words = self._words(operand) if self.family.vocabulary else None
        return lambda strategy: _splits(strategy.operands[read.position], axis, words)

    def _residual(self, axis: str, split: bool) -> Iterator[tuple[str, _Wish]]:
        sums = list(_residual_sums(self.joint))
        if not sums and split:
            raise InfeasibleError(
                "the model adds no value of two dims or more to what is computed of it: it has no residual stream\n"
                "  try: another family"
            )
        for node in sums:
            ndim = node_value(node).ndim
            dims = list(range(1, ndim - 1)) or [0]
            wish = lambda strategy, dims=dims: _splits(strategy.results[0], axis, dims)
            yield node.name, wish if split else _stored(axis, "whole")


def _stored(axis: str, role: Role) -> _Wish:
    if role == "whole":
        return lambda strategy: axis not in strategy.results[0].axes
    return lambda strategy: _splits(strategy.results[0], axis, None)


def _read_whole(axis: str, position: int) -> _Wish:
    return lambda strategy: axis not in strategy.operands[position].axes


def _splits(layout: Layout, axis: str, dims: Sequence[int] | None) -> bool:
    """Whether `axis` splits one of `dims`; None: any."""
    chosen = layout.dims if dims is None else [layout.dims[dim] for dim in dims]
    return axis in itertools.chain(*chosen)


def made_of_experts(joint: JointGraph) -> frozenset[fx.Node]:
    """Weights of experts, and what ops of one operand make of them."""
    weights = _expert_weights(_reads(joint))
    return frozenset(node for node, parameter in _passed_on(joint).items() if parameter in weights)


def _expert_weights(reads: Iterable[_Read]) -> frozenset[fx.Node]:
    return frozenset(read.parameter for read in reads if read.reader.target in ROUTED)


def _reads(joint: JointGraph) -> Iterator[_Read]:
    """Every read of a parameter by an op of several operands, forward and backward, through casts and views."""
    of = _passed_on(joint)
    for node in joint.graph.nodes:
        if node.op == "call_function" and node not in of:
            for position, operand in enumerate(tensor_operands(node)):
                if operand in of:
                    yield _Read(of[operand], node, position)


def _passed_on(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """Parameters, and what ops of one operand make of them -> the parameter."""
    of = {parameter: parameter for parameter in joint.given_as("param")}
    for node in joint.graph.nodes:
        if node.op == "call_function" and result_index(node)[0] is node:
            operands = tensor_operands(node)
            if len(operands) == 1 and operands[0] in of:
                of[node] = of[operands[0]]
    return of


def _vocabularies(joint: JointGraph) -> set[int]:
    """Rows of the tables that words are looked up in."""
    return {
        node_value(operand).shape[0]
        for node in joint.graph.nodes
        if node.op == "call_function" and "embedding" in str(node.target)
        for operand in tensor_operands(node)[:1]
        if node.meta.get("phase") == "forward"
    }


def _residual_sums(joint: JointGraph) -> Iterator[fx.Node]:
    """Forward sums of two values of one shape, of which one is computed from the other by way of a product."""
    for node in joint.graph.nodes:
        operands = tensor_operands(node) if node.op == "call_function" else []
        if node.meta.get("phase") != "forward" or len(operands) != 2 or "add" not in str(node.target):
            continue
        shapes = {tuple(node_value(value).shape) for value in (node, *operands)}
        if len(shapes) == 1 and node_value(node).ndim > 1 and _passes_a_product(*operands):
            yield node


def _passes_a_product(one: fx.Node, other: fx.Node) -> bool:
    for early, late in ((one, other), (other, one)):
        between = ancestors([late])
        if early in between:
            return any(
                is_product(node) and early in ancestors([node]) for node in between - ancestors([early])
            )
    return False
