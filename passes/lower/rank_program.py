"""From a plan to the program of one rank: the one way, whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from cost_model.mesh import MeshSpec
from passes.compile.bind_device import bind_device
from passes.compile.join_kernels import JoinKernels
from passes.compile.join_linears import JoinConvolutions
from passes.ir.graph_pass import duplicate_module, erase_dead, run_rank_passes
from passes.ir.joint import GraphInput, GraphOutput, JointGraph, ancestors, node_value
from passes.ir.op_traits import reads_shape_only
from passes.ir.torch_compat import lazy_module
from passes.ir.torch_dispatch import copied_input, copied_node, input_nodes
from passes.lower.partition import RankGraph, partition
from passes.lower.phases import Backward, Phases, exchanges, split_phases, unaliased
from passes.plan.planned_graph import PlannedGraph
from passes.schedule.schedule import scheduled
from passes.states.compute_again import compute_again

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)


def without_tangents(backward: Backward, missing: Set[int]) -> Backward:
    """`backward` for a call in which the tangents of outputs `missing` (`GraphInput.index`) are zero.

    Every value of a backward is linear in the tangents, so an op whose operands that depend on a
    tangent are all zero is zero, a collective included: it is left out, on all ranks alike. A sum
    with a zero is its other operand. A gradient that is zero becomes None, as autograd has it.

    The result takes none of the missing tangents, and only the values that are still read.
    """
    placeholders = [n for n in backward.module.graph.nodes if n.op == "placeholder"]
    tangents = dict(zip(placeholders[-len(backward.tangents) :], backward.tangents, strict=True))
    folder = _Folder({node for node, spec in tangents.items() if spec.index in missing})
    folder.dependent.update(tangents)
    for node in backward.module.graph.nodes:
        if node not in folder.missing:
            folder.fold(node)
    return _finished(backward, folder, missing)


def without_usually_missing(joint: JointGraph) -> JointGraph:
    """A new joint graph that gives no gradient to outputs that get none in a usual step. It takes all tangents."""
    folder = _Folder(missing_tangents(joint))
    folder.dependent.update(joint.given_as("tangent"))
    for node in joint.graph.nodes:
        folder.fold(node)
    folder.graph.output(tuple(folder.results))
    erase_dead(folder.graph)
    return replace(joint, module=lazy_module(folder.graph, "JointGraph"))


def missing_tangents(joint: JointGraph) -> set[fx.Node]:
    """The tangents of outputs that get no gradient in a usual step."""
    tangents = {node: spec for node, spec in joint.given if spec.kind == "tangent"}
    missing = all_but_the_loss({spec.index: node_value(node).ndim for node, spec in tangents.items()})
    return {node for node, spec in tangents.items() if spec.index in missing}


def usually_missing(backward: Backward) -> frozenset[int]:
    """The outputs that get no gradient in a usual step: all but the loss, where there is one scalar."""
    placeholders = [n for n in backward.module.graph.nodes if n.op == "placeholder"]
    nodes = placeholders[len(placeholders) - len(backward.tangents) :]
    return all_but_the_loss(
        {spec.index: node_value(n).ndim for n, spec in zip(nodes, backward.tangents, strict=True)}
    )


def all_but_the_loss(ndims: Mapping[int, int]) -> frozenset[int]:
    """Outputs, by index, that get no gradient in a usual step. ndims: of every one that may get a gradient."""
    scalars = [index for index, ndim in ndims.items() if ndim == 0]
    return frozenset(ndims.keys() - set(scalars)) if len(scalars) == 1 else frozenset()


class _Folder:
    """Rebuilds the graph. `made[node]` is the new node, or None for one known to be zero."""

    def __init__(self, missing: set[fx.Node]) -> None:
        self.missing = missing
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node | None] = dict.fromkeys(missing)
        self.zeros: dict[fx.Node, fx.Node] = {}
        self.dependent: set[fx.Node] = set()
        self.results: list[fx.Node | None] = []

    def fold(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "output":
            self.results = [None if n is None else self.made[n] for n in node.args[0]]  # type: ignore[union-attr]
        else:
            self._op(node)

    def _placeholder(self, node: fx.Node) -> None:
        new = copied_input(self.graph, node)
        self.made[node] = None if node in self.missing else new

    def _op(self, node: fx.Node) -> None:
        tangents = [n for n in input_nodes(node) if n in self.dependent]
        zeros = [n for n in tangents if self.made[n] is None]
        if reads_shape_only(node):  # not linear in a tangent, so never folded
            self._copy(node)
            return
        if tangents:
            self.dependent.add(node)
        if tangents and len(zeros) == len(tangents):
            self.made[node] = None
        elif not (zeros and self._sum(node)):
            self._copy(node)

    def _sum(self, node: fx.Node) -> bool:
        """Fold x + alpha * 0, x - alpha * 0 and 0 + x, where x has the result's shape and dtype."""
        if node.target not in _SUMS or len(node.args) != 2:
            return False
        left, right = node.args
        if isinstance(right, fx.Node) and self.made[right] is None:
            other = left
        elif node.target is _aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
            other = right
        else:
            return False
        if not isinstance(other, fx.Node) or not _alike(other.meta["val"], node.meta["val"]):
            return False
        self.made[node] = self.made[other]
        return True

    def _copy(self, node: fx.Node) -> None:
        self.made[node] = copied_node(self.graph, node, self._operand)

    def _operand(self, node: fx.Node) -> fx.Node:
        """The new node of `node`, a tensor of zeros where it must exist after all."""
        new = self.made[node]
        if new is not None:
            return new
        if node not in self.zeros:
            value = node.meta["val"]
            assert isinstance(value, torch.Tensor), f"zero of {node.format_node()}"
            keywords: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            zero = self.graph.call_function(_aten.full.default, (list(value.shape), 0), keywords)
            zero.meta = {**node.meta, "val": value}
            self.zeros[node] = zero
        return self.zeros[node]


def _finished(old: Backward, folder: _Folder, missing: Set[int]) -> Backward:
    """The folded backward, which takes only what it still reads."""
    graph, results = folder.graph, unaliased(folder.results, set())
    read = ancestors(n for n in [*results, *exchanges(graph.nodes, 1)] if n is not None)
    new = [n for n in graph.nodes if n.op == "placeholder"]
    n_passed, n_saved = len(old.passed), len(old.saved)
    given = new[: n_passed + n_saved]
    passed = tuple(p for n, p in zip(given, old.passed, strict=False) if n in read)
    saved = tuple(s for n, s in zip(given[n_passed:], old.saved, strict=True) if n in read)
    graph.output(tuple(results))
    for node in [*given, *(n for n in graph.nodes if n.op == "call_function")][::-1]:
        if node not in read:
            graph.erase_node(node)
    return Backward(
        module=lazy_module(graph),
        passed=passed,
        saved=saved,
        tangents=tuple(t for t in old.tangents if t.index not in missing),
        gradients=old.gradients,
    )


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and one.dtype == two.dtype


Schedule = Callable[[fx.GraphModule], fx.GraphModule]
"""Puts a phase's graph, in place, into the order in which it runs."""


def rank_program(
    joint: JointGraph,
    planned: PlannedGraph,
    mesh: MeshSpec,
    rank: int,
    groups: Mapping[tuple[str, ...], str],
    *,
    schedule: Schedule = scheduled,
) -> RankProgram:
    """What `rank` runs: partitioned, lowered, split into forward and backward, collectives merged and in order.

    No price is read, so equal plans give equal programs. groups: axes, in mesh
    order, -> name of their process group. schedule: the order in which each phase runs. The graphs are bound to
    `joint.device`.
    """
    joint = compute_again(joint, planned.again)
    local = partition(joint, planned, mesh, rank, groups)
    bind_device(local.module, joint.device)
    return RankProgram.of(local, joint.inputs, joint.outputs, schedule)


@dataclass(frozen=True)
class RankProgram:
    """local: the rank's joint graph, every op of the global graph where it stands there.
    inputs, outputs: what the ends of the joint graph mean.
    schedule: what orders a phase; the backward, once it is known which tangents there are.
    split: forward and backward before they are put in order, where they are known; they are changed in place.
    fused: whether a compiler joins its kernels; else it runs op by op.
    """

    local: RankGraph
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    schedule: Schedule
    split: Phases | None = None
    fused: bool = True

    @staticmethod
    def of(
        local: RankGraph,
        inputs: Sequence[GraphInput],
        outputs: Sequence[GraphOutput],
        schedule: Schedule = scheduled,
    ) -> RankProgram:
        """The program of a lowered graph, which stays as it is."""
        return RankProgram(local, tuple(inputs), tuple(outputs), schedule)

    @cached_property
    def phases(self) -> Phases:
        """The forward, in the order in which it runs, and the backward as it was split off."""
        phases = self.split or self.in_phases()
        self.schedule(phases.forward)
        return phases

    def in_phases(self) -> Phases:
        """Forward and backward as they are split, in no order yet."""
        return split_phases(self.local.module, self.inputs, self.outputs, fused=self.fused)

    def backward(self, missing: Set[int] = frozenset()) -> Backward:
        """What runs where the outputs `missing` (`GraphInput.index`) get no gradient."""
        whole = self.phases.backward
        assert whole is not None, "nothing is trained"
        found = (
            without_tangents(whole, missing)
            if missing
            else replace(whole, module=duplicate_module(whole.module))
        )
        self.schedule(found.module)
        return found

    def complete(self) -> Phases:
        """As they run with a gradient for every output."""
        return self._complete

    @cached_property
    def _complete(self) -> Phases:
        return replace(self.phases, backward=None if self.phases.backward is None else self.backward())

    def usual(self) -> Phases:
        """As they run in a usual step: with a gradient for the loss alone, if there is one."""
        whole = self.phases.backward
        return replace(self.phases, backward=None if whole is None else self.backward(usually_missing(whole)))

    def joined(self) -> RankProgram:
        """The same, of fewer and larger kernels: torch's own, for what capture took apart and no split keeps apart.

        For a program that runs op by op; a compiler joins more.
        """
        module = run_rank_passes(duplicate_module(self.local.module), (JoinKernels(), JoinConvolutions()))
        return replace(self, local=replace(self.local, module=module), fused=False)

    def text(self) -> str:
        """Every node of forward and backward in the order in which they run, for all outputs' gradients."""
        modules = [self.phases.forward]
        if self.phases.backward is not None:
            modules.append(self.backward().module)
        return "\n".join(f"{node.format_node()}" for module in modules for node in module.graph.nodes)
