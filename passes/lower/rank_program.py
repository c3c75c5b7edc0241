"""From a plan to the program of one rank: the one way, whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from cost_model.mesh import MeshSpec
from passes.compile.bind_device import bind_device
from passes.compile.join_kernels import JoinKernels
from passes.compile.join_linears import JoinConvolutions
from passes.ir.graph_pass import run_rank_passes
from passes.ir.joint import GraphInput, GraphOutput, JointGraph
from passes.ir.rewrite import duplicate_module
from passes.layout.assignment import Assignment
from passes.lower.missing_tangents import usually_missing, without_tangents
from passes.lower.partition import RankGraph, partition
from passes.lower.phases import Backward, Phases, split_phases
from passes.plan.transfers import LoweringPlan
from passes.schedule.schedule import scheduled
from passes.states.compute_again import compute_again

Schedule = Callable[[fx.GraphModule], fx.GraphModule]
"""Puts a phase's graph, in place, into the order in which it runs."""


def rank_program(
    joint: JointGraph,
    assignment: Assignment,
    lowering: LoweringPlan,
    mesh: MeshSpec,
    rank: int,
    groups: Mapping[tuple[str, ...], str],
    *,
    schedule: Schedule = scheduled,
) -> RankProgram:
    """What `rank` runs: partitioned, lowered, split into forward and backward, collectives merged and in order.

    assignment, lowering: of one plan. No price is read, so equal plans give equal programs. groups: axes, in mesh
    order, -> name of their process group. schedule: the order in which each phase runs. The graphs are bound to
    `joint.device`.
    """
    joint = compute_again(joint, lowering.again)
    local = partition(joint, assignment, mesh, rank, groups, lowering)
    bind_device(local.module, joint.device)
    return RankProgram.of(local, joint.inputs, joint.outputs, schedule)


@dataclass(frozen=True)
class RankProgram:
    """local: the rank's joint graph, every op of the global graph where it stands there.
    inputs, outputs: what the ends of the joint graph mean.
    schedule: what orders a phase; the backward, once it is known which tangents there are.
    split: forward and backward before they are put in order, where they are known; they are changed in place.
    """

    local: RankGraph
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    schedule: Schedule
    split: Phases | None = None

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
        phases = self.split or split_phases(self.local.module, self.inputs, self.outputs)
        self.schedule(phases.forward)
        return phases

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
        return replace(self, local=replace(self.local, module=module))

    def text(self) -> str:
        """Every node of forward and backward in the order in which they run, for all outputs' gradients."""
        modules = [self.phases.forward]
        if self.phases.backward is not None:
            modules.append(self.backward().module)
        return "\n".join(f"{node.format_node()}" for module in modules for node in module.graph.nodes)
