"""Which layers a plan splits over an axis as `parallelize_module` can: by columns, and by rows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from autoshard.plan.plan_words import made_of_parameters
from passes.plan.planned_graph import NodeRecord

_PRODUCTS = ("contract", "routed_mm", "aten.convolution")
Kind = Literal["linear", "embedding", "other"]


@dataclass(frozen=True)
class Weight:
    """A parameter, and the op of the forward that reads it. dim: that the axis splits where it is read; None: none."""

    name: str
    kind: Kind
    dim: int | None
    reader: str

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class TensorStyles:
    """Of one axis: module -> how it is split, of those that are; and what is wrong with that, in words.

    columns: with the gathered result, where no rows follow. rows: with whether the input comes in parts. whole: other
    products of weights, and those of which parts are gathered."""

    columns: Mapping[str, bool] = field(default_factory=dict)
    rows: Mapping[str, bool] = field(default_factory=dict)
    embeddings: Mapping[str, int] = field(default_factory=dict)
    others: Sequence[str] = ()
    whole: Sequence[str] = ()
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class Styled:
    """records: of a plan's only graph."""

    records: Sequence[NodeRecord]
    axis: str

    @cached_property
    def of(self) -> Mapping[str, NodeRecord]:
        return {record.name: record for record in self.records}

    @cached_property
    def made(self) -> set[str]:
        return made_of_parameters(self.records)

    @cached_property
    def readers(self) -> Mapping[str, list[NodeRecord]]:
        """Of the forward."""
        found: dict[str, list[NodeRecord]] = defaultdict(list)
        for record in self.records:
            for source in {operand.source for operand in record.operands if record.phase == "forward"}:
                found[source].append(record)
        return found

    @cached_property
    def weights(self) -> list[Weight]:
        return [weight for record in self.records if record.op == "param" for weight in self._read(record)]

    def _read(self, parameter: NodeRecord) -> Iterator[Weight]:
        """Once by each op that is more than a cast or a view of it."""
        names, seen = [parameter.name], set[str]()
        while names:
            name = names.pop()
            for reader in self.readers[name]:
                if reader.name in self.made:
                    names.append(reader.name)
                elif reader.name not in seen:
                    seen.add(reader.name)
                    place = next(i for i, operand in enumerate(reader.operands) if operand.source == name)
                    straight = self.of[name].results[0].shape == parameter.results[0].shape
                    kind = _kind(reader, place, len(parameter.results[0].shape)) if straight else "other"
                    dim = reader.operands[place].layout.dim_of(self.axis)
                    yield Weight(parameter.parameter, kind, dim, reader.name)

    def styles(self) -> TensorStyles:
        """Of every layer whose weight is read split."""
        reads = defaultdict[str, list[Weight]](list)
        for weight in self.weights:
            reads[weight.name].append(weight)
        split = [
            w for w in self.weights if w.dim is not None and w.kind != "other" and len(reads[w.name]) == 1
        ]
        linears = [weight for weight in split if weight.kind == "linear"]
        rows = {weight.reader: weight.module for weight in linears if weight.dim == 1}
        columns = {weight.module: self._reached(weight.reader, rows) for weight in linears if weight.dim == 0}
        parts = set[str]().union(*(reached for reached in columns.values() if reached is not None))
        problems = [
            f"{weight.name}, read whole by what a rank has of {self.of[weight.reader].module or 'the model'}"
            for weight in self.weights
            if weight.reader in parts and weight.module not in columns and weight.reader not in rows
        ]
        gathered = {module: reached is None for module, reached in columns.items()}
        in_parts = {module: self._activation(reader) in parts for reader, module in rows.items()}
        alone = {weight.module for weight in split}
        whole = [
            weight.module
            for weight in self.weights
            if self.of[weight.reader].op in _PRODUCTS
            and gathered.get(weight.module, True)
            and not in_parts.get(weight.module)
        ]
        return TensorStyles(
            gathered,
            in_parts,
            {
                weight.module: weight.dim
                for weight in split
                if weight.kind == "embedding" and weight.dim is not None
            },
            sorted({weight.module for weight in self.weights} - alone),
            whole,
            problems,
        )

    def _reached(self, start: str, rows: Mapping[str, str]) -> set[str] | None:
        """What is computed of a layer's parts, up to layers split by rows, which are in it. None where it moves over
        the axis before, or goes elsewhere: then the parts are gathered first."""
        found, left = {start}, [start]
        while left:
            name = left.pop()
            layout = self.of[name].results[0].layout
            for reader in self.readers[name]:
                read = [one.layout for one in reader.operands if one.source == name]
                if (
                    any(one.dim_of(self.axis) != layout.dim_of(self.axis) for one in read)
                    or reader.op == "output"
                ):
                    return None
                if reader.name not in found:
                    found.add(reader.name)
                    left += [] if reader.name in rows else [reader.name]
        return found if found & rows.keys() else None

    def _activation(self, reader: str) -> str:
        return next(one.source for one in self.of[reader].operands if one.source not in self.made)


def _kind(reader: NodeRecord, place: int, ndim: int) -> Kind:
    """linear: of an nn.Linear, whose weight is [out, in]."""
    if reader.op.startswith("aten.embedding") and place == 0:
        return "embedding"
    equation = re.search(r"'(.+), (.+) -> (.+)'", reader.text)
    if reader.op != "contract" or equation is None or ndim != 2 or place != 1:
        return "other"
    out, contracted = equation[2].split()
    return "linear" if out in equation[3].split() and contracted not in equation[3].split() else "other"
