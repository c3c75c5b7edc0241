"""Records and layouts as JSON data, and back: the schema, which msgspec checks, of what `passes.plan.records` holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from cost_model.timed import Priced
from passes.layout.assignment import FactorSplit
from passes.layout.layout import Halo, Layout
from passes.plan.records import NodeRecord, OperandRecord, ResultRecord, Transfer
from passes.redistribution.steps import STEPS, Step

__all__ = [
    "PRINTABLE",
    "Count",
    "LayoutData",
    "NodeData",
    "Text",
    "layout_to_json",
    "record_to_json",
    "records_of",
]

Count = Annotated[int, Meta(ge=0, le=2**62)]
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]*$"
Text = Annotated[str, Meta(pattern=PRINTABLE, max_length=20_000)]
"""What may be printed, and written to any format that a plan is drawn in."""

_Word = Annotated[str, Meta(pattern=r"^\w+$", max_length=200)]
_Position = Annotated[int, Meta(ge=-(2**62), le=2**62)]
_Span = tuple[_Position, _Position]
_Phase = Literal["forward", "backward"]
_MAX_DIMS = 64
_Dim = Annotated[int, Meta(ge=0, lt=_MAX_DIMS)]


class HaloData(Struct, frozen=True, forbid_unknown_fields=True):
    """`Halo`."""

    spans: tuple[_Span, ...]
    summed: bool

    def halo(self) -> Halo:
        return Halo(self.spans, self.summed)


class LayoutData(Struct, frozen=True, forbid_unknown_fields=True):
    """`Layout`; what is None for every dim is left out."""

    dims: Annotated[tuple[tuple[_Word, ...], ...], Meta(max_length=_MAX_DIMS)]
    partial: tuple[tuple[_Word, Literal["sum", "max", "min"]], ...] = ()
    sizes: tuple[tuple[Count, ...] | None, ...] = ()
    halos: tuple[HaloData | None, ...] = ()

    def layout(self) -> Layout:
        """ValueError for what no layout can be, on any mesh."""
        for name, given in (("sizes", self.sizes), ("halos", self.halos)):
            if given and len(given) != len(self.dims):
                raise ValueError(f"a layout of {len(self.dims)} dims has {name} of {len(given)}")
        axes = [axis for dim in self.dims for axis in dim] + [axis for axis, _ in self.partial]
        if len(set(axes)) < len(axes):
            raise ValueError(f"a layout uses a mesh axis twice: {', '.join(axes)}")
        return Layout(
            self.dims, self.partial, self.sizes, tuple(None if h is None else h.halo() for h in self.halos)
        )


class StepData(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`Step`, its `kind` the step's name; without the layout it begins with, where the one before it has led."""

    kind: _Word
    axes: tuple[_Word, ...]
    dim: _Dim | None = None
    from_dim: _Dim | None = None
    to_dim: _Dim | None = None
    op: Literal["sum", "max", "min"] | None = None

    def step(self, before: Layout, after: Layout) -> Step:
        """ValueError for a step that there is not, or of other arguments."""
        make = STEPS.get(self.kind)
        if make is None:
            raise ValueError(f"there is no step {self.kind}, but {', '.join(STEPS)}")
        said = {name: getattr(self, name) for name in ("dim", "from_dim", "to_dim", "op")}
        given = {name: value for name, value in said.items() if value is not None}
        if given.keys() != set(make.argument_names()):
            wanted = ", ".join(make.argument_names()) or "no argument"
            raise ValueError(f"a step {self.kind} has {wanted}, and not {', '.join(given) or 'none'}")
        return make(before=before, after=after, axes=self.axes, **given)


class TransferData(Struct, frozen=True, forbid_unknown_fields=True):
    """`Transfer`."""

    step: StepData
    nbytes: Count
    seconds: float
    after: LayoutData
    priced: Priced = "modelled"

    def transfer(self, before: Layout) -> Transfer:
        return Transfer(self.step.step(before, self.after.layout()), self.nbytes, self.seconds, self.priced)


class OperandData(Struct, frozen=True, forbid_unknown_fields=True):
    """`OperandRecord`."""

    source: _Word
    result: Annotated[int, Meta(ge=0, le=10_000)]
    layout: LayoutData
    transfers: tuple[TransferData, ...]
    hides: bool
    turn: tuple[Literal[0, 1, 2, 3], Count] | None = None
    ahead: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None

    def operand(self, held: Layout) -> OperandRecord:
        """held: the layout of what is read."""
        transfers: list[Transfer] = []
        for data in self.transfers:
            transfers.append(data.transfer(transfers[-1].step.after if transfers else held))
        layout = self.layout.layout()
        return OperandRecord(
            self.source, self.result, layout, tuple(transfers), self.hides, self.turn, self.ahead
        )


class ResultData(Struct, frozen=True, forbid_unknown_fields=True):
    """`ResultRecord`."""

    shape: Annotated[tuple[Count, ...], Meta(max_length=_MAX_DIMS)]
    dtype: _Word
    layout: LayoutData

    def result(self) -> ResultRecord:
        return ResultRecord(self.shape, self.dtype, self.layout.layout())


class SplitData(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`FactorSplit`, a list."""

    factor: Text
    axes: tuple[_Word, ...]
    spans: tuple[_Span, ...] | None = None

    def split(self) -> FactorSplit:
        return FactorSplit(self.factor, self.axes, self.spans)


class NodeData(Struct, frozen=True, forbid_unknown_fields=True):
    """`NodeRecord`."""

    name: _Word
    op: Text
    text: Text
    operands: tuple[OperandData, ...]
    results: tuple[ResultData, ...]
    splits: tuple[SplitData, ...]
    seconds: float
    phase: _Phase
    module: Text
    source: Text
    interior: Text | None = None
    priced: Priced = "modelled"

    def record(self, before: Mapping[str, NodeRecord]) -> NodeRecord:
        """before: the nodes before it, by name. ValueError, naming the node, for a layout or a step that cannot be."""
        try:
            given: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
            given["operands"] = tuple(operand.operand(_held(operand, before)) for operand in self.operands)
            given["results"] = tuple(result.result() for result in self.results)
            given["splits"] = tuple(split.split() for split in self.splits)
            return NodeRecord(**given)
        except ValueError as error:
            raise ValueError(f"node {self.name}: {error}") from None


def _held(operand: OperandData, before: Mapping[str, NodeRecord]) -> Layout:
    source = before.get(operand.source)
    if source is None or operand.result >= len(source.results):
        raise ValueError(f"it reads result {operand.result} of {operand.source}, which is no node before it")
    return source.results[operand.result].layout


def records_of(nodes: Sequence[NodeData]) -> tuple[NodeRecord, ...]:
    """ValueError, naming the node, for what no record can be, or for two of one name."""
    found: dict[str, NodeRecord] = {}
    for node in nodes:
        if node.name in found:
            raise ValueError(f"two nodes are called {node.name}")
        found[node.name] = node.record(found)
    return tuple(found.values())


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


def record_to_json(record: NodeRecord) -> dict[str, Any]:
    return _without_none(
        {
            **vars(record),
            "operands": [_operand_to_json(operand) for operand in record.operands],
            "results": [
                {**vars(r), "shape": list(r.shape), "layout": layout_to_json(r.layout)}
                for r in record.results
            ],
            "splits": [_split_to_json(split) for split in record.splits],
            "priced": _unusual(record.priced),
        }
    )


def _unusual(priced: Priced) -> Priced | None:
    return None if priced == "modelled" else priced


def _without_none(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None}


def _split_to_json(split: FactorSplit) -> list[Any]:
    data: list[Any] = [split.factor, list(split.axes)]
    return data if split.spans is None else [*data, [list(span) for span in split.spans]]


def _operand_to_json(operand: OperandRecord) -> dict[str, Any]:
    return _without_none(
        {
            **vars(operand),
            "layout": layout_to_json(operand.layout),
            "transfers": [_transfer_to_json(transfer) for transfer in operand.transfers],
            "turn": None if operand.turn is None else list(operand.turn),
        }
    )


def _transfer_to_json(transfer: Transfer) -> dict[str, Any]:
    step = transfer.step
    return _without_none(
        {
            "step": {"kind": step.name, "axes": list(step.axes), **step.arguments},
            "nbytes": transfer.nbytes,
            "seconds": transfer.seconds,
            "after": layout_to_json(step.after),
            "priced": _unusual(transfer.priced),
        }
    )
