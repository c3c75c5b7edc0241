"""A plan as a networkx graph: what `Plan.to_networkx` returns and every drawing is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import networkx as nx

from autoshard.plan.plan_memory import MemoryTimeline
from cost_model.memory import format_bytes, format_seconds
from cost_model.mesh import MeshSpec
from passes.plan.planned_graph import NodeRecord, OperandRecord, PlannedGraph, Reshard, Turn

PLACEHOLDERS = frozenset({"param", "buffer", "constant", "input", "tangent", "seed"})

_Bucket = tuple[Turn | None, str, tuple[str, ...]]
"""Turn, kind and axes."""
_Moved = tuple[Reshard, str]
"""A collective, and what edges say of its bucket."""
_Read = tuple[str, Sequence[_Moved]]
"""A layout as read, and the collectives in front."""


def plan_graph(planned: PlannedGraph, mesh: MeshSpec, memory: MemoryTimeline | None = None) -> nx.DiGraph:
    """Nodes are ops, placeholders and the output, edges the values they read. All attributes are plain
    strings and numbers, so the graph can be written in any format.

    graph: mesh; with `memory` its outline, "step bytes; step bytes; ...", memory_backward, the first step of that
    phase, and memory_peak in words. Nodes, in the order of execution:
        label    the op ("aten.mm"), or what a placeholder stands for ("up.weight")
        kind     "op", "use", "output", or a placeholder's "param", "buffer", "input", ...
        layout   of the results ("f32[8@dp, 64@tp]"), "; " between several
        seconds  of the op itself, without the transfers in front of it
        phase, module, source
    Edges:
        layout      as the reader needs it ("[@dp, @tp]")
        collective  "reduce_scatter[tp](dim=1)", "; " between several, "" if the value is read as it is
        seconds, nbytes  of those collectives together
        each_kind, each_axes, each_seconds, each_nbytes  of each of them, "; " between several; axes as "dp,tp"
        each_bucket  of each, what it is merged into: turn, bytes and seconds of all ("0.3 1234 2e-05"), or "-"; the
                     seconds of a member are what it adds to that

    A `use` (one redistribution for several readers) stays where it has both; otherwise its readers
    read the value itself, through its transfers.
    """
    records = planned.nodes
    buckets = _buckets(records)
    skipped = _transparent_uses(records)
    reader_module = {o.source: record.module for record in reversed(records) for o in record.operands}
    graph = nx.DiGraph(mesh=str(mesh))
    graph.graph.update({} if memory is None else _memory_attributes(memory))
    for record in records:
        if record.name not in skipped:
            graph.add_node(record.name, **_node_attributes(record, reader_module.get(record.name, "")))
    reads: dict[tuple[str, str], list[_Read]] = {}  # the same value may be read twice, perhaps in two layouts
    for record in records:
        for operand in () if record.name in skipped else record.operands:
            source, moved = _through_uses(operand, planned.by_name, skipped, buckets)
            reads.setdefault((source, record.name), []).append((str(operand.layout), moved))
    for (source, reader), found in reads.items():
        graph.add_edge(source, reader, **_edge_attributes(found))
    return graph


def _buckets(records: Sequence[NodeRecord]) -> dict[_Bucket, str]:
    """What edges say of the collectives that are merged: those of one turn, kind and axes of several reads."""
    members: dict[_Bucket, list[Reshard]] = {}
    for record in records:
        for operand in record.operands:
            for transfer in operand.transfers:
                if operand.turn is not None and not transfer.is_local:
                    members.setdefault(_bucket(operand.turn, transfer), []).append(transfer)
    return {
        key: f"{'.'.join(map(str, key[0] or ()))} {sum(t.nbytes for t in found)} {sum(t.seconds for t in found)!r}"
        for key, found in members.items()
        if len(found) > 1
    }


def _bucket(turn: Turn | None, transfer: Reshard) -> _Bucket:
    return turn, transfer.step.name, transfer.step.axes


def _memory_attributes(memory: MemoryTimeline) -> dict[str, str | int]:
    steps = memory.outline().steps
    kinds = sorted(memory.by_kind.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{kind} {nbytes / max(1, memory.peak.nbytes):.0%}" for kind, nbytes in kinds if nbytes
    )
    found: dict[str, str | int] = {
        "memory": "; ".join(f"{step.place} {step.nbytes}" for step in steps),
        "memory_peak": f"peak {format_bytes(memory.peak.nbytes)}: {shares}",
    }
    backward = next((step.place for step in steps if step.phase == "backward"), None)
    return found if backward is None else {**found, "memory_backward": backward}


def _node_attributes(record: NodeRecord, reader_module: str) -> dict[str, str | float]:
    """reader_module: of the first op that reads the node, which is where a `use` belongs."""
    placeholder = record.op in PLACEHOLDERS
    label = (
        record.text.replace("{{", "{").replace("}}", "}").removeprefix(f"{record.op} ")
        if placeholder
        else record.op
    )
    module = record.module
    if not module and record.op in ("param", "buffer"):
        module = label.rpartition(".")[0]
    if not module and record.op == "use":
        module = reader_module
    return {
        "label": label,
        "kind": record.op if placeholder or record.op in ("use", "output") else "op",
        "layout": "; ".join(str(result) for result in record.results),
        "seconds": record.seconds,
        "phase": record.phase,
        "module": module,
        "source": record.source,
    }


def _transparent_uses(records: Sequence[NodeRecord]) -> frozenset[str]:
    """`use` nodes that redistribute nothing, or for one reader only."""
    readers: dict[str, int] = {}
    for record in records:
        for operand in record.operands:
            readers[operand.source] = readers.get(operand.source, 0) + 1
    return frozenset(
        record.name
        for record in records
        if record.op == "use" and (not record.operands[0].transfers or readers.get(record.name, 0) < 2)
    )


def _through_uses(
    operand: OperandRecord,
    by_name: Mapping[str, NodeRecord],
    skipped: frozenset[str],
    buckets: Mapping[_Bucket, str],
) -> tuple[str, list[_Moved]]:
    """What is read, and the collectives in front, those of transparent uses between included."""
    source, moved = operand.source, _moved(operand, buckets)
    while source in skipped:
        through = by_name[source].operands[0]
        source, moved = through.source, [*_moved(through, buckets), *moved]
    return source, moved


def _moved(operand: OperandRecord, buckets: Mapping[_Bucket, str]) -> list[_Moved]:
    """The collectives of a read, with what edges say of their buckets."""
    return [(t, buckets.get(_bucket(operand.turn, t), "-")) for t in operand.transfers if not t.is_local]


def _edge_attributes(reads: Sequence[_Read]) -> dict[str, str | float]:
    moved = [one for _, each in reads for one in each]
    each = {
        "collective": [transfer.step.text() for transfer, _ in moved],
        "each_kind": [transfer.step.name for transfer, _ in moved],
        "each_axes": [",".join(transfer.step.axes) for transfer, _ in moved],
        "each_seconds": [repr(transfer.seconds) for transfer, _ in moved],
        "each_nbytes": [str(transfer.nbytes) for transfer, _ in moved],
        "each_bucket": [bucket for _, bucket in moved],
    }
    return {
        "layout": "; ".join(dict.fromkeys(layout for layout, _ in reads)),
        "seconds": float(sum(transfer.seconds for transfer, _ in moved)),
        "nbytes": sum(transfer.nbytes for transfer, _ in moved),
        **{name: "; ".join(values) for name, values in each.items()},
    }


# Dark enough for white text on them, and told apart in the common forms of colour blindness.
COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "all_gather": "#2563eb",
        "reduce_scatter": "#0f8a5f",
        "all_reduce": "#d92d20",
        **dict.fromkeys(
            ("all_to_all", "send_rows", "return_rows", "halo_exchange", "halo_reduce", "reshard"), "#8b35d6"
        ),
    }
)
OTHER = "#b45309"


@dataclass(frozen=True)
class Total:
    """count collectives of one kind and phase; nbytes and seconds of all together."""

    kind: str
    phase: str
    count: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Moved:
    """One collective of an edge. kind: "all_gather"; over axes: "dp", or "dp,tp"; text: "all_gather[dp](dim=0)".
    bucket: that it is merged into, as an edge names it ("0.3 1234 2e-05"), or "-"; seconds: what it adds to that."""

    kind: str
    axes: str
    text: str
    nbytes: int
    seconds: float
    bucket: str


def collectives(edge: Mapping[str, Any]) -> list[Moved]:
    """The collectives of an edge, in order."""
    if not edge["collective"]:
        return []
    names = ("each_kind", "each_axes", "collective", "each_nbytes", "each_seconds", "each_bucket")
    columns = zip(*(str(edge[name]).split("; ") for name in names), strict=True)
    return [Moved(kind, axes, text, int(n), float(s), bucket) for kind, axes, text, n, s, bucket in columns]


def price(moves: Sequence[Moved]) -> str:
    """Bytes and seconds of collectives. Of one in a bucket the time is the bucket's, which stands beside its bytes."""
    own = sum(moved.nbytes for moved in moves)
    counted = [(moved.nbytes, moved.seconds) for moved in moves if moved.bucket == "-"]
    for *_, bucket in dict.fromkeys((m.kind, m.axes, m.bucket) for m in moves if m.bucket != "-"):
        _, of_all, took = bucket.split()
        counted.append((int(of_all), float(took)))
    nbytes, seconds = sum(n for n, _ in counted), sum(s for _, s in counted)
    whole = "" if nbytes == own else f", with its bucket {format_bytes(nbytes)}"
    return f"{format_bytes(own)}{whole} {format_seconds(seconds)}"


def colour(kind: str) -> str:
    return COLOURS.get(kind, OTHER)
