"""The steps a redistribution is made of, and the bytes each one is priced by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np

from passes.layout.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Step:
    """One move of a tensor from layout `before` to layout `after`.

    name: what a plan calls it, in its file and in print; a key of `STEPS`.
    kind: the collective that performs it, a key of `PAYLOAD_BYTES`; None for a local, free step.
    axes: the mesh axes it works over, in the order in which the layout nests them (AllReduce: mesh
          order). The process group of a collective always has its axes in mesh order.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str | None] = None
    before: Layout
    after: Layout
    axes: tuple[str, ...]

    @classmethod
    def argument_names(cls) -> tuple[str, ...]:
        """What is said of such a step beside its axes and layouts: `dim`, say."""
        return tuple(field.name for field in fields(cls) if field.name not in ("before", "after", "axes"))

    @property
    def arguments(self) -> dict[str, int | str]:
        return {name: getattr(self, name) for name in self.argument_names()}

    def text(self, *operands: str) -> str:
        return step_text(self.name, self.axes, self.arguments, operands)


def step_text(
    name: str, axes: Sequence[str], arguments: Mapping[str, int | str], operands: Sequence[str] = ()
) -> str:
    """As printed: "reduce_scatter[tp](%x, dim=1)". A sum is not said."""
    shown = [f"{name}={value}" for name, value in arguments.items() if value != "sum"]
    return f"{name}[{','.join(axes)}]({', '.join([*operands, *shown])})"


@dataclass(frozen=True, kw_only=True)
class Slice(Step):
    """Every rank keeps its part of `dim`: newly split by `axes` at the minor end, or less of the halo it holds over
    them. Local, free."""

    name = "slice"
    dim: int


@dataclass(frozen=True, kw_only=True)
class ToPartial(Step):
    """Replicated -> Partial(sum): index 0 of the axis keeps the value, the others hold zeros."""

    name = "to_partial"


@dataclass(frozen=True, kw_only=True)
class ToRouted(Step):
    """Replicated -> `ROUTED`: rows of others' experts are no longer looked at. Local, free."""

    name = "to_routed"


@dataclass(frozen=True, kw_only=True)
class AllGather(Step):
    """Undo the split of `dim` by its minor-most `axes`, as one group; or those of two dims, of which `dim` is the
    first, by the axes that only `before` has."""

    name = "all_gather"
    kind = "all_gather"
    dim: int


@dataclass(frozen=True, kw_only=True)
class AllReduce(Step):
    """Reduce the partial `axes` with `op`, as one group."""

    name = "all_reduce"
    kind = "all_reduce"
    op: str


@dataclass(frozen=True, kw_only=True)
class ReduceScatter(Step):
    """Reduce the partial `axes` with `op` and split `dim` by them at its minor end; or two dims, of which `dim` is the
    first, by the axes that only `after` has."""

    name = "reduce_scatter"
    kind = "reduce_scatter"
    dim: int
    op: str


@dataclass(frozen=True, kw_only=True)
class AllToAll(Step):
    """Move `axes` from the minor end of `from_dim` to the minor end of `to_dim`, which nests them as `axes` does;
    `from_dim` may nest them in another order."""

    name = "all_to_all"
    kind = "all_to_all"
    from_dim: int
    to_dim: int


@dataclass(frozen=True, kw_only=True)
class SendRows(Step):
    """Split of `dim`, or of two, by its minor-most `axes` -> `ROUTED` over them: every row goes to the rank of its
    expert, or a token once to each rank that has some of its experts (`copies_of`)."""

    name = "send_rows"
    kind = "all_to_all"
    dim: int


@dataclass(frozen=True, kw_only=True)
class ReturnRows(Step):
    """Partial(`sum_of`) over `axes` -> split by them at the minor end of `dim`, or of two: what a rank has of a token
    returns."""

    name = "return_rows"
    kind = "all_to_all"
    op: ClassVar[str] = "sum"
    dim: int


@dataclass(frozen=True, kw_only=True)
class ToSum(Step):
    """Partial(`sum_of`) -> Partial(sum): of any number of summands. Local, free."""

    name = "to_sum"


@dataclass(frozen=True, kw_only=True)
class Reshard(Step):
    """Same axes on `dim`, other split sizes or another nesting order.

    An all-to-all of interval intersections over `axes`: those below the first difference. Where the
    order of axes stays the same, the price is that of the remote part, as for halos.
    """

    name = "reshard"
    kind = "point_to_point"
    dim: int


@dataclass(frozen=True, kw_only=True)
class HaloExchange(Step):
    """From a split of `dim` to spans of it that overlap, over all its axes: every rank gets what its window reads.

    Each part of a span comes from the rank whose split has it: from any distance, empty shards included. The one
    collective moves what is remote; priced by the bytes of the rank that sends or receives most of it.
    """

    name = "halo_exchange"
    kind = "point_to_point"
    dim: int


@dataclass(frozen=True, kw_only=True)
class HaloReduce(Step):
    """The transpose: overlapping summands of `dim` go to the rank whose split has the place, and are added there."""

    name = "halo_reduce"
    kind = "point_to_point"
    dim: int


STEPS: Mapping[str, type[Step]] = MappingProxyType({step.name: step for step in Step.__subclasses__()})
"""Every step by its name."""

Bytes = Any  # int, or an int64 array with one entry per step

PAYLOAD_BYTES: Mapping[str, Callable[[Bytes, Bytes, Bytes], Bytes]] = {
    # (largest shard before, largest shard after, ranks of the group) -> bytes that price the step.
    # All-gather counts the gathered tensor and reduce-scatter its input, padding included;
    # all-to-all the larger of the two buffers of the rank that has most.
    "all_gather": lambda before, after, ranks: before * ranks,
    "reduce_scatter": lambda before, after, ranks: after * ranks,
    "all_reduce": lambda before, after, ranks: before,
    "all_to_all": lambda before, after, ranks: np.maximum(before, after),
    # What one rank sends or receives, mostly to and from its neighbours; where that is known, it replaces this.
    "point_to_point": lambda before, after, ranks: np.maximum(before, after),
}


class CollectiveSeconds(Protocol):
    """What prices a collective: `cost_model`'s profiles, or a fake in tests."""

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        """kind: "all_gather" (nbytes of the gathered tensor), "reduce_scatter" (of its input),
        "all_reduce", "all_to_all" (of one rank's buffer). axes: of the group, in mesh order."""
        ...


@dataclass(frozen=True)
class Redistribution:
    """steps:        what is done, first to last; () when the layouts are equal.
    seconds:      their sum.
    step_seconds: per step; 0 for local steps.
    step_nbytes:  per step, the bytes that set its price, padding included; 0 for local steps.
    """

    steps: tuple[Step, ...]
    seconds: float
    step_seconds: tuple[float, ...]
    step_nbytes: tuple[int, ...]
