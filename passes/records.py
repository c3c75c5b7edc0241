"""A planned graph as plain data: what a plan file holds, prints and draws, without FX or torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from passes.assignment import FactorSplit, NodeLayouts
from passes.layout import Halo, Layout

__all__ = ["NodeRecord", "OperandRecord", "ResultRecord", "Transfer", "layouts_of"]


@dataclass(frozen=True)
class Transfer:
    """One step of a redistribution.

    kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", or a local step ("slice",
    "to_partial"). text: as printed, "reduce_scatter[tp](dim=1)". nbytes: as the collective is
    priced (cost_model/collectives.py says of what). after: the layout it leaves.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float
    text: str
    after: Layout


@dataclass(frozen=True)
class OperandRecord:
    """source: name of the node read; result: which of its results; layout: as read; hides: whether the
    transfers may run behind computation (`passes.hiding`)."""

    source: str
    result: int
    layout: Layout
    transfers: tuple[Transfer, ...]
    hides: bool


@dataclass(frozen=True)
class ResultRecord:
    """A result's global shape, short dtype ("f32") and layout."""

    shape: tuple[int, ...]
    dtype: str
    layout: Layout

    def __str__(self) -> str:
        return self.layout.format(self.shape, self.dtype)


@dataclass(frozen=True)
class NodeRecord:
    """One node of the global graph. text: the op with `{0}`, `{1}` ... for its tensor operands,
    or "param up.weight", "input x". seconds: the op alone, transfers not counted."""

    name: str
    op: str
    text: str
    operands: tuple[OperandRecord, ...]
    results: tuple[ResultRecord, ...]
    splits: tuple[FactorSplit, ...]
    seconds: float
    phase: str
    module: str
    source: str


def layouts_of(records: Sequence[NodeRecord]) -> dict[str, NodeLayouts]:
    """The assignment that the records describe."""
    return {
        record.name: NodeLayouts(
            tuple(operand.layout for operand in record.operands),
            tuple(result.layout for result in record.results),
            record.splits,
        )
        for record in records
    }


def layout_to_json(layout: Layout) -> dict[str, Any]:
    data: dict[str, Any] = {"dims": [list(axes) for axes in layout.dims]}
    if layout.partial:
        data["partial"] = [list(pair) for pair in layout.partial]
    if any(sizes is not None for sizes in layout.sizes):
        data["sizes"] = [None if sizes is None else list(sizes) for sizes in layout.sizes]
    if layout.has_halo:
        data["halos"] = [
            None if h is None else {"spans": [list(s) for s in h.spans], "summed": h.summed}
            for h in layout.halos
        ]
    return data


def layout_from_json(data: Mapping[str, Any]) -> Layout:
    dims = tuple(tuple(axes) for axes in data["dims"])
    partial = tuple((axis, op) for axis, op in data.get("partial", ()))
    sizes = tuple(None if s is None else tuple(s) for s in data.get("sizes", (None,) * len(dims)))
    halos = tuple(
        None if h is None else Halo(tuple((lo, hi) for lo, hi in h["spans"]), h["summed"])
        for h in data.get("halos", (None,) * len(dims))
    )
    return Layout(dims, partial, sizes, halos)


def record_to_json(record: NodeRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "op": record.op,
        "text": record.text,
        "operands": [_operand_to_json(operand) for operand in record.operands],
        "results": [
            {"shape": list(r.shape), "dtype": r.dtype, "layout": layout_to_json(r.layout)}
            for r in record.results
        ],
        "splits": [_split_to_json(split) for split in record.splits],
        "seconds": record.seconds,
        "phase": record.phase,
        "module": record.module,
        "source": record.source,
    }


def record_from_json(data: Mapping[str, Any]) -> NodeRecord:
    return NodeRecord(
        name=data["name"],
        op=data["op"],
        text=data["text"],
        operands=tuple(_operand_from_json(operand) for operand in data["operands"]),
        results=tuple(
            ResultRecord(tuple(r["shape"]), r["dtype"], layout_from_json(r["layout"]))
            for r in data["results"]
        ),
        splits=tuple(_split_from_json(split) for split in data["splits"]),
        seconds=data["seconds"],
        phase=data["phase"],
        module=data["module"],
        source=data["source"],
    )


def _split_to_json(split: FactorSplit) -> list[Any]:
    data: list[Any] = [split.factor, list(split.axes)]
    return data if split.spans is None else [*data, [list(span) for span in split.spans]]


def _split_from_json(data: Sequence[Any]) -> FactorSplit:
    factor, axes, *spans = data
    return FactorSplit(factor, tuple(axes), tuple((lo, hi) for lo, hi in spans[0]) if spans else None)


def _operand_to_json(operand: OperandRecord) -> dict[str, Any]:
    return {
        "source": operand.source,
        "result": operand.result,
        "layout": layout_to_json(operand.layout),
        "transfers": [
            {
                "kind": t.kind,
                "axes": list(t.axes),
                "nbytes": t.nbytes,
                "seconds": t.seconds,
                "text": t.text,
                "after": layout_to_json(t.after),
            }
            for t in operand.transfers
        ],
        "hides": operand.hides,
    }


def _operand_from_json(data: Mapping[str, Any]) -> OperandRecord:
    transfers = tuple(
        Transfer(
            t["kind"], tuple(t["axes"]), t["nbytes"], t["seconds"], t["text"], layout_from_json(t["after"])
        )
        for t in data["transfers"]
    )
    layout = layout_from_json(data["layout"])
    return OperandRecord(data["source"], data["result"], layout, transfers, data["hides"])
