"""What of a plan calls of stock PyTorch can do: layers that `parallelize_module` splits over an axis, by columns or by
rows, and what is left over."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from autoshard.plan.plan_content import PlanContent
from autoshard.plan.plan_summary import MOST, SOME, AxisUses, axis_uses, axis_words
from passes.plan.planned_graph import NodeRecord, PlannedGraph, made_of_parameters

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
    """planned: a plan's only graph."""

    planned: PlannedGraph
    axis: str

    @cached_property
    def made(self) -> set[str]:
        return made_of_parameters(self.planned.nodes)

    @cached_property
    def readers(self) -> Mapping[str, list[NodeRecord]]:
        """Of the forward."""
        found: dict[str, list[NodeRecord]] = defaultdict(list)
        for record in self.planned.nodes:
            for source in {operand.source for operand in record.operands if record.phase == "forward"}:
                found[source].append(record)
        return found

    @cached_property
    def weights(self) -> list[Weight]:
        return [
            weight for record in self.planned.nodes if record.op == "param" for weight in self._read(record)
        ]

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
                    straight = self.planned.by_name[name].results[0].shape == parameter.results[0].shape
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
        columns = self._columns([weight for weight in linears if weight.dim == 0], rows)
        parts = set[str]().union(*(reached for reached in columns.values() if reached is not None))
        readers = self.planned.by_name
        problems = [
            f"{weight.name}, read whole by what a rank has of {readers[weight.reader].module or 'the model'}"
            for weight in self.weights
            if weight.reader in parts and weight.module not in columns and weight.reader not in rows
        ]
        gathered = {module: reached is None for module, reached in columns.items()}
        in_parts = {module: self._activation(reader) in parts for reader, module in rows.items()}
        alone = {weight.module for weight in split}
        whole = [
            weight.module
            for weight in self.weights
            if readers[weight.reader].op in _PRODUCTS
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

    def _columns(self, split: Sequence[Weight], rows: Mapping[str, str]) -> dict[str, set[str] | None]:
        """Of each layer what its parts reach. None also where they meet a value that the plan splits and the code has
        whole, as a key from a product split by rows."""
        found = {weight.module: self._reached(weight.reader, rows) for weight in split}
        while True:
            parts = set[str]().union(*(reached for reached in found.values() if reached is not None))
            meet = {
                name
                for name in parts
                for one in self.planned.by_name[name].operands
                if one.layout.dim_of(self.axis) is not None and one.source not in parts | self.made
            }
            mixed = [module for module, reached in found.items() if reached is not None and reached & meet]
            if not mixed:
                return found
            found.update(dict.fromkeys(mixed))

    def _reached(self, start: str, rows: Mapping[str, str]) -> set[str] | None:
        """What is computed of a layer's parts, up to layers split by rows, which are in it. None where it moves or is
        summed over the axis before, or goes elsewhere: then the parts are gathered first."""
        found, left = {start}, [start]
        while left:
            name = left.pop()
            layout = self.planned.by_name[name].results[0].layout
            if layout.dim_of(self.axis) is None:
                return None
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
        return next(
            one.source for one in self.planned.by_name[reader].operands if one.source not in self.made
        )


def _kind(reader: NodeRecord, place: int, ndim: int) -> Kind:
    """linear: of an nn.Linear, whose weight is [out, in]."""
    if reader.op.startswith("aten.embedding") and place == 0:
        return "embedding"
    equation = re.search(r"'(.+), (.+) -> (.+)'", reader.text)
    if reader.op != "contract" or equation is None or ndim != 2 or place != 1:
        return "other"
    out, contracted = equation[2].split()
    return "linear" if out in equation[3].split() and contracted not in equation[3].split() else "other"


@dataclass(frozen=True)
class StockCalls:
    """What calls of stock PyTorch can do of a plan without stages."""

    plan: PlanContent

    @cached_property
    def uses(self) -> dict[str, AxisUses]:
        return {axis: axis_uses([self.plan.records], axis) for axis in self.plan.mesh.real_axes()}

    @cached_property
    def tensor(self) -> str | None:
        """The axis whose ranks have parts of the products: the one with most weights so."""
        axes = [axis for axis, uses in self.uses.items() if uses.where_stored >= MOST and not uses.experts]
        return max(axes, key=lambda axis: self.uses[axis].where_stored, default=None)

    @cached_property
    def styles(self) -> TensorStyles:
        return TensorStyles() if self.tensor is None else Styled(self.plan.planned, self.tensor).styles()

    @cached_property
    def data(self) -> dict[str, bool]:
        """Axes that split the batch, and whether weights are stored split over them: at most one so, and one not."""
        found: dict[str, bool] = {}
        for axis, uses in self.uses.items():
            stored = uses.gathered >= MOST
            if (
                axis != self.tensor
                and uses.share_of_dims("batch") >= MOST / 2
                and stored not in found.values()
            ):
                found[axis] = stored
        return found

    @cached_property
    def sequence(self) -> bool:
        """Whether layers have parts of the sequence between their products, all of which are split by features."""
        whole = any(map(self._is_of_layers, self.styles.whole))
        return self._splits_sequence and bool(self.layers) and not whole

    @property
    def _splits_sequence(self) -> bool:
        return self.tensor is not None and self.uses[self.tensor].share_of_dims("sequence") >= SOME / 2

    @cached_property
    def layers(self) -> dict[str, list[int]]:
        """Of lists of layers the numbers, by the lists' names."""
        found = defaultdict[str, set[int]](set)
        for name in self.plan.parameter_layouts:
            place = re.search(r"(?:^|\.)(\d+)\.", name)
            if place is not None:
                found[name[: place.start()]].add(int(place[1]))
        return {name: sorted(numbers) for name, numbers in found.items()}

    @cached_property
    def again(self) -> list[str]:
        """Lists of layers most of which the backward computes again."""
        share: dict[str, Counter[bool]] = defaultdict(Counter)
        again = set(self.plan.planned.again)
        for record in self.plan.records:
            for name in self.layers:
                if (
                    record.phase == "forward"
                    and record.seconds
                    and f"{record.module}.".startswith(dotted(name))
                ):
                    share[name][record.name in again] += 1
        return [name for name, counts in share.items() if counts[True] > counts[False]]

    def missing(self) -> Iterator[str]:
        """What the code does not do of the plan."""
        for axis in self.plan.mesh.real_axes():
            words = axis_words([self.plan.records], axis)
            if axis != self.tensor and axis not in self.data:
                if words != "every rank computes the same":
                    yield f"{axis}: {words}. Ranks along it compute the same."
            elif self.data.get(axis):
                whole = 1.0 - self.uses[axis].gathered
                if whole >= 0.0005:
                    yield f"{axis}: {whole:.1%} of the weights are not stored and gathered so; fully_shard takes all."
            elif axis in self.data and self.uses[axis].gathered >= 0.0005:
                yield f"{axis}: {self.uses[axis].gathered:.1%} of the weights are stored split; here all are whole."
            elif axis == self.tensor and self.uses[axis].where_stored < 0.9995:
                share = self.uses[axis].where_stored
                yield f"{axis}: {share:.1%} of the weights are split so; layers that share one keep it whole here."
        if self._splits_sequence and not self.sequence:
            whole = next(filter(self._is_of_layers, self.styles.whole), "")
            reason = f"{whole} is not split so" if whole else "the model has no list of layers"
            yield f"{self.tensor}: sequence parallelism, as {reason}."
        if self.plan.planned.again and not self.again:
            yield f"{len(self.plan.planned.again)} single ops that the backward computes again."
        yield "Layouts of other activations, the dims along which weights are stored, order and buckets of transfers."

    def unstyled(self) -> Iterator[str]:
        """Weights that a layer itself has, or a module with others inside, where a rank has a part of the sequence."""
        names = list(self.plan.parameter_layouts)
        for name in names:
            module = name.rpartition(".")[0]
            holds = any(o.startswith(dotted(module)) and o.count(".") > name.count(".") for o in names)
            if self.is_inside(f"{module}.") and (holds or not self.is_inside(module)):
                yield f"{name}, read by a rank's part of the sequence"

    def is_inside(self, module: str) -> bool:
        """Whether the sequence is split around it."""
        return self.sequence and self._is_of_layers(module)

    def _is_of_layers(self, module: str) -> bool:
        return any(re.match(rf"{re.escape(dotted(name))}\d+\.", module) for name in self.layers)


def dotted(name: str) -> str:
    """Of a module, what names of those inside begin with."""
    return f"{name}." if name else ""
