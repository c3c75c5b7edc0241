"""A planned joint graph written down as records: every node, its layouts, prices and transfers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from cost_model.timed import Priced
from passes.ir.collector import collector_paused
from passes.ir.joint import (
    GraphInput,
    JointGraph,
    map_operands,
    node_values,
    repeats,
    result_index,
    tensor_operands,
)
from passes.ir.op_traits import read_repeats
from passes.layout.assignment import Assignment, NodeLayouts
from passes.plan.decide import Moved
from passes.plan.records import NodeRecord, OperandRecord, ResultRecord, Transfer
from passes.plan.transfers import LoweringPlan
from passes.plan.transfers import Transfer as Read
from passes.redistribution.redistribute import Redistribution
from passes.rules.core.rule_registry import is_fallback
from passes.schedule.hiding import hidden_reads
from passes.strategies.prices import Prices, local_nbytes
from passes.strategies.traffic import fused_group


@collector_paused()
def describe(
    joint: JointGraph,
    assignment: Assignment,
    lowering: LoweringPlan,
    moved: Moved,
    prices: Prices,
) -> tuple[NodeRecord, ...]:
    """One record per node of `joint`, `getitem`s left out, in the graph's order. lowering, moved: of `decide_lowering`.

    Prices come from the assignment itself, not from the search: the sum of all seconds is the
    plan's cost, counted a second way.
    """
    kinds = dict(zip(joint.placeholders, joint.inputs, strict=True))
    trained = joint.trained
    writer = _Writer(assignment, lowering, moved, prices, hidden_reads(joint).hides)
    records: list[NodeRecord] = []
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            records.append(_placeholder(node, kinds[node], assignment[node.name], prices, node in trained))
        elif node.op == "output":
            records.append(writer.output(node))
        elif result_index(node)[0] is node:
            records.append(writer.op(node))
    grouped = _priced_in_groups(joint, {record.name: record.priced for record in records}, prices)
    return tuple(
        replace(record, priced=grouped[record.name]) if record.name in grouped else record
        for record in records
    )


def fallback_ops(joint: JointGraph) -> tuple[str, ...]:
    """Ops of the graph that no rule describes; they run replicated, their inputs gathered."""
    nodes = (n for n in joint.graph.nodes if n.op == "call_function" and result_index(n)[0] is n)
    return tuple(sorted({str(node.target) for node in nodes if is_fallback(node)}))


def op_counts(joint: JointGraph) -> Counter[str]:
    """How often each op occurs, by its name and the dtype of its first result: "contract bf16"."""
    nodes = (n for n in joint.graph.nodes if n.op == "call_function" and result_index(n)[0] is n)
    return Counter(f"{_op_name(node)} {shapes_of(node)[0][1]}" for node in nodes)


def graph_hash(joint: JointGraph) -> str:
    """Hash of everything a plan depends on: ops, arguments, shapes, dtypes, inputs and outputs.

    Devices are left out: a plan made on a laptop is valid on a cluster.
    """
    digest = hashlib.sha256()
    for node in joint.graph.nodes:
        arguments = map_operands(node, [f"%{operand.name}" for operand in tensor_operands(node)])
        digest.update(f"{node.name} {node.op} {_portable(arguments)} {_portable(node.target)}".encode())
        if node.op != "output":
            digest.update(str([(v, d) for v, d in shapes_of(node)]).encode())
    if joint.pieces > 1:
        digest.update(f"in {joint.pieces} pieces".encode())
    for end in (*joint.inputs, *joint.outputs):
        digest.update(repr(end).encode())
    return digest.hexdigest()[:16]


def short_dtype(dtype: torch.dtype) -> str:
    """torch.float32 -> "f32"."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return "b8" if name == "bool" else name


def shapes_of(node: fx.Node) -> list[tuple[tuple[int, ...], str]]:
    values = node_values(node)
    return [((), "none") if v is None else (tuple(v.shape), short_dtype(v.dtype)) for v in values]


def _portable(value: Any) -> str:
    """repr without devices."""
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_portable(v) for v in value) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_portable(v)}" for k, v in sorted(value.items())) + "}"
    return str(value)


def _priced_in_groups(joint: JointGraph, priced: Mapping[str, Priced], prices: Prices) -> dict[str, Priced]:
    """Where the prices of ops come from that are computed in the loop of one that was timed: what they take together
    is what was timed. priced: of every op alone."""
    found: dict[str, Priced] = {}
    for node in joint.graph.nodes:
        if node.op != "call_function" or priced.get(node.name, "modelled") == "modelled":
            continue
        group = fused_group(node) if prices.traffic(node).group else None
        found |= {} if group is None else {inner.name: priced[node.name] for inner in group.inner}
    return found


def _placeholder(
    node: fx.Node, spec: GraphInput, layouts: NodeLayouts, prices: Prices, trained: bool
) -> NodeRecord:
    layout = layouts.results[0]
    text = spec.name if spec.kind in ("tangent", "seed") else f"{spec.kind} {spec.name}"
    seconds = prices.optimizer_seconds(local_nbytes(layout, node, 0, prices.mesh)) if trained else 0.0
    phase = "backward" if spec.kind == "tangent" else "forward"
    return NodeRecord(
        node.name, spec.kind, _escaped(text), (), _results(node, layouts), (), seconds, phase, "", ""
    )


@dataclass(frozen=True)
class _Writer:
    """Records of ops and of the output. hides: the reads whose transfers may run behind computation."""

    assignment: Assignment
    lowering: LoweringPlan
    moved: Moved
    prices: Prices
    hides: frozenset[Read]

    def op(self, node: fx.Node) -> NodeRecord:
        prices, layouts = self.prices, self.assignment[node.name]
        return NodeRecord(
            name=node.name,
            op=_op_name(node),
            text=_op_text(node),
            operands=self._operands(node),
            results=_results(node, layouts),
            splits=layouts.splits,
            seconds=repeats(node) * prices.op_seconds(node, layouts),
            phase=node.meta.get("phase", "forward"),
            module=node.meta.get("module", ""),
            source=node.meta.get("source", ""),
            interior=self.lowering.interiors.get(node.name),
            priced=prices.op_priced(node, layouts),
        )

    def output(self, node: fx.Node) -> NodeRecord:
        return NodeRecord("output", "output", "", self._operands(node), (), (), 0.0, "backward", "", "")

    def _operands(self, node: fx.Node) -> tuple[OperandRecord, ...]:
        found: list[OperandRecord] = []
        wanted = self.assignment[node.name].operands
        for position, (operand, layout) in enumerate(zip(tensor_operands(node), wanted, strict=True)):
            producer, index = result_index(operand)
            read = node.name, position
            transfers = _transfers(self.moved.get(read), self.prices, read_repeats(node, operand))
            turn = self.lowering.turns.get(read)
            ahead = self.lowering.ahead.get(read)
            found.append(
                OperandRecord(producer.name, index, layout, transfers, read in self.hides, turn, ahead)
            )
        return tuple(found)


def _transfers(moved: Redistribution | None, prices: Prices, times: int) -> tuple[Transfer, ...]:
    if moved is None:
        return ()
    ways = zip(moved.steps, moved.step_nbytes, moved.step_seconds, strict=True)
    return tuple(
        Transfer.of(step, nbytes, times * seconds, prices.collective_priced(step.kind, step.axes, nbytes))
        for step, nbytes, seconds in ways
    )


def _results(node: fx.Node, layouts: NodeLayouts) -> tuple[ResultRecord, ...]:
    return tuple(
        ResultRecord(shape, dtype, layout)
        for (shape, dtype), layout in zip(shapes_of(node), layouts.results, strict=True)
    )


def _op_name(node: fx.Node) -> str:
    namespace, _, name = str(node.target).partition(".")
    name = name.removesuffix(".default")
    return name if namespace == "autoshard" else f"{namespace}.{name}"


def _op_text(node: fx.Node) -> str:
    tokens = [f"\0{i}\0" for i in range(len(tensor_operands(node)))]
    args, kwargs = map_operands(node, [_Token(token) for token in tokens])
    shown = [_shown(a) for a in args] + [
        f"{k}={_shown(v)}" for k, v in kwargs.items() if not _is_placement(k, v)
    ]
    text = _escaped(f"{_op_name(node)}({', '.join(shown)})")
    for i, token in enumerate(tokens):
        text = text.replace(token, f"{{{i}}}")
    return text


def _is_placement(name: str, value: Any) -> bool:
    """Arguments that say where and not what: they differ between machines and tell a reader nothing."""
    return name in ("device", "pin_memory", "layout") or value is None


class _Token(str):
    """An operand's place in the printed text."""


def _shown(value: Any) -> str:
    if isinstance(value, _Token):
        return str(value)
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_shown(v) for v in value) + "]"
    return short_dtype(value) if isinstance(value, torch.dtype) else str(value)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
