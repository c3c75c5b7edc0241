"""A graph in words: its hash, the names and texts of its ops, and the text of a planned one."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from cost_model.memory import format_seconds
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, map_operands, node_values, result_index, tensor_operands
from passes.ir.op_work import Word
from passes.layout.layout import JoinedAxes, joined_text
from passes.plan.planned_graph import NodeRecord, OperandRecord, PlannedGraph, ResultRecord
from passes.rules.core.rule_registry import is_fallback


def fallback_ops(joint: JointGraph) -> tuple[str, ...]:
    """Ops of the graph that no rule describes; they run replicated, their inputs gathered."""
    nodes = (n for n in joint.graph.nodes if n.op == "call_function" and result_index(n)[0] is n)
    return tuple(sorted({str(node.target) for node in nodes if is_fallback(node)}))


def op_counts(joint: JointGraph) -> Counter[str]:
    """How often each op occurs, by its name and the dtype of its first result: "contract bf16"."""
    nodes = (n for n in joint.graph.nodes if n.op == "call_function" and result_index(n)[0] is n)
    return Counter(f"{op_name(node)} {shapes_of(node)[0][1]}" for node in nodes)


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


def end_names(joint: JointGraph) -> tuple[str, ...]:
    """What each tensor that the graph returns is: "grad up.weight", "buffer mean", "output 0"."""
    ends = (end for end, result in joint.returned if result is not None)
    return tuple(end.name if end.kind == "output" else f"{end.kind} {end.name}" for end in ends)


def op_name(node: fx.Node) -> str:
    namespace, _, name = str(node.target).partition(".")
    name = name.removesuffix(".default")
    return name if namespace == "autoshard" else f"{namespace}.{name}"


def op_text(node: fx.Node) -> str:
    tokens = [f"\0{i}\0" for i in range(len(tensor_operands(node)))]
    args, kwargs = map_operands(node, [Word(token) for token in tokens])
    shown = [_shown(a) for a in args] + [
        f"{k}={_shown(v)}" for k, v in kwargs.items() if not _is_placement(k, v)
    ]
    text = escaped(f"{op_name(node)}({', '.join(shown)})")
    for i, token in enumerate(tokens):
        text = text.replace(token, f"{{{i}}}")
    return text


def _is_placement(name: str, value: Any) -> bool:
    """Arguments that say where and not what: they differ between machines and tell a reader nothing."""
    return name in ("device", "pin_memory", "layout") or value is None


def _shown(value: Any) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_shown(v) for v in value) + "]"
    return short_dtype(value) if isinstance(value, torch.dtype) else str(value)


def escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def format_graph(
    planned: PlannedGraph, mesh: MeshSpec, *, seconds: bool = True, joined: JoinedAxes = (), raced: int = 0
) -> str:
    """The planned graph, forward then backward. With `seconds=False` no prices (golden files).

    `use` nodes are not printed: what they redistribute appears as collectives on the value. raced: of how many
    plans that ran it is the fastest.
    """
    writer = _Writer(planned.nodes, seconds)
    body = "\n".join(f"  {line}" for line in writer.lines())
    together = f"  // axes searched together: {joined_text(joined)}" if joined else ""
    return f"{mesh}{together}{raced_mark(raced if seconds else 0)}\ngraph joint {{\n{body}\n}}\n"


def raced_mark(count: int) -> str:
    """Behind the mesh, of a plan that is the fastest of so many that ran; 0: none did."""
    return f"  // raced: the fastest of {count} by the clock" if count else ""


class _Writer:
    def __init__(self, records: Sequence[NodeRecord], seconds: bool) -> None:
        self._records = records
        self._seconds = seconds
        self._by_name = {record.name: record for record in records}
        self._shown: dict[tuple[str, int], str] = {}  # value -> the name it is printed by
        self._copies: dict[str, int] = {}

    def lines(self) -> Iterator[str]:
        backward = False
        for record in self._records:
            if record.phase == "backward" and record.operands and not backward:
                backward = True
                yield "// backward"
            yield from self._node(record)

    def _node(self, record: NodeRecord) -> Iterator[str]:
        names: list[str] = []
        for operand in record.operands:
            lines, name = self._operand(operand)
            yield from lines
            names.append(name)
        if record.op == "use":
            self._shown[record.name, 0] = names[0]
            return
        if record.op == "output":
            yield f"return ({', '.join(names)})"
            return
        yield self._line(record, names)

    def _operand(self, operand: OperandRecord) -> tuple[list[str], str]:
        name = self._value(operand.source, operand.result)
        shape = self._by_name[operand.source].results[operand.result]
        lines: list[str] = []
        for transfer in operand.transfers:
            copy = self._copy(name)
            value = ResultRecord(shape.shape, shape.dtype, transfer.after)
            lines.append(self._priced(f"{copy}: {value} = {transfer.step.text(name)}", transfer.seconds))
            name = copy
        return lines, name

    def _line(self, record: NodeRecord, names: Sequence[str]) -> str:
        kinds = ", ".join(str(result) for result in record.results)
        value = kinds if len(record.results) == 1 else f"({kinds})"
        return self._priced(f"%{record.name}: {value} = {record.text.format(*names)}", record.seconds)

    def _priced(self, line: str, seconds: float) -> str:
        return f"{line}  // {format_seconds(seconds)}" if self._seconds and seconds > 0 else line

    def _value(self, source: str, result: int) -> str:
        if (source, result) in self._shown:
            return self._shown[source, result]
        many = len(self._by_name[source].results) > 1
        return f"%{source}[{result}]" if many else f"%{source}"

    def _copy(self, name: str) -> str:
        base = name.split(".")[0]
        self._copies[base] = self._copies.get(base, 0) + 1
        return f"{base}.{self._copies[base]}"
