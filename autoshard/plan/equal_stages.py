"""Stages that compute the same are planned once: layers repeat, and so do stages of equal layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from msgspec import structs
from torch import fx

import passes.ops.uniform  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::uniform)
from autoshard.plan.judged import judged
from autoshard.plan.plan import Plan
from autoshard.plan.plan_ends import output_layouts, parameter_layouts
from autoshard.plan.task import Task
from autoshard.plan.task_prices import prices_as_in
from passes.ir.joint import JointGraph, node_values, tensor_operands
from passes.ir.op_signature import op_signature
from passes.layout.assignment import Assignment
from passes.layout.layout import Layout
from passes.plan.describe import graph_hash
from passes.states.compute_again import compute_again

_META = ("phase", "runs", "repeats")


def names_alike(one: JointGraph, two: JointGraph) -> dict[str, str] | None:
    """Name of every node of `one` -> of the node of `two` that does the same; None if they are not alike.

    Alike are graphs of the same ops, shapes and ends in the same order: names of parameters and lines of the model do
    not count, nor which random numbers are drawn, nor the number of a call under `torch.utils.checkpoint`.
    """
    ends = lambda joint: [(end.kind, end.index) for end in (*joint.inputs, *joint.outputs)]
    if len(one.graph.nodes) != len(two.graph.nodes) or ends(one) != ends(two):
        return None
    if _regions(one) != _regions(two):
        return None
    names: dict[str, str] = {}
    for mine, other in zip(one.graph.nodes, two.graph.nodes, strict=True):
        if not _alike(mine, other, names):
            return None
        names[mine.name] = other.name
    return names


def _regions(joint: JointGraph) -> list[int]:
    """Of every node the call under `torch.utils.checkpoint` that it is of, in the order in which they come."""
    found: dict[object, int] = {}
    return [found.setdefault(node.meta.get("checkpoint"), len(found)) for node in joint.graph.nodes]


def _alike(mine: fx.Node, other: fx.Node, names: dict[str, str]) -> bool:
    read = [names[node.name] for node in tensor_operands(mine)]
    if mine.op != other.op or read != [node.name for node in tensor_operands(other)]:
        return False
    if [mine.meta.get(key) for key in _META] != [other.meta.get(key) for key in _META]:
        return False
    if mine.op == "output":
        return [node is None for node in mine.args[0]] == [node is None for node in other.args[0]]  # type: ignore[union-attr]
    if mine.op == "placeholder":
        return _looks(mine) == _looks(other)
    if mine.target is torch.ops.autoshard.uniform.default:
        return mine.target == other.target and _looks(mine) == _looks(other)
    return op_signature(mine) == op_signature(other)


def _looks(node: fx.Node) -> list[object]:
    return [None if value is None else (value.shape, value.dtype) for value in node_values(node)]


@dataclass(frozen=True)
class AlikeStage:
    """A stage with the layouts of another one that computes the same. task: of it; first: the other's plan. joint: with
    what runs again; assignment: of it."""

    task: Task
    first: Plan
    joint: JointGraph
    assignment: Assignment

    @staticmethod
    def of(task: Task, first: Plan, of: JointGraph, runs: JointGraph) -> AlikeStage | None:
        """of: the graph of `first`; runs: with what it computes again. None if the graphs are not alike."""
        names, joint = names_alike(of, task.joint), task.joint
        if names is not None and first.lowering.again:
            joint = compute_again(joint, [names[name] for name in first.lowering.again])
            names = names_alike(runs, joint)
        if names is None:
            return None
        assignment = {names[name]: layouts for name, layouts in first.assignment.items()}
        return AlikeStage(task, first, joint, assignment)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        return parameter_layouts(self.joint, self.assignment, self.task.captured)

    @property
    def outputs(self) -> dict[int, Layout | None]:
        return output_layouts(self.joint, self.assignment)

    def plan(self) -> Plan:
        """What is proven of the first holds of it, where the ends of both graphs are the same."""
        task, prices = self.task, prices_as_in(self.first, self.task.prices)
        found = judged(self.joint, self.assignment, prices)
        return replace(
            self.first,
            memory_limit=task.memory_limit,
            step_time=found.seconds,
            peak_memory=found.peak.nbytes,
            peak_node=found.peak.node,
            origin=structs.replace(self.first.origin, graph_hash=graph_hash(task.joint)),
            again=task.again(),
            **task.program_fields(self.joint, found),
        )
