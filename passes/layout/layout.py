"""Where a tensor lives on a mesh: `Layout`, the interval every rank holds, and axes of a mesh that layouts use
together.

Text form: f32[8@dp, 128, 512@tp], f32[8, 128]+tp:sum, f32[97@sp{33,32,32}]. With a halo, what the
ranks hold: f32[97@sp{0:34,32:66,64:97}]; as summands of it: f32[97@sp{0:34+32:66+64:97}].

    joined = (("a", "b"), ("c", "d"))     f32[64@a@b, 32@c@d], f32[64@c@d@a@b], f32[64]+a:sum+b:sum
                                          but not f32[64@a], f32[64@b@a], f32[64@a@c]

Axes that no run of `joined` names are on their own; () joins none. Such a layout is one of the whole mesh, with the
sizes and prices that it has there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from cost_model.errors import Count, Text, Word
from cost_model.mesh import MeshSpec


class FactorSplit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`factor` is split over `axes` (major to minor).

    spans: what each linear index over the axes computes of it; None: torch.chunk's parts. They may overlap where every
           result has the factor: then ranks compute the same, and need not be told by others.
    """

    factor: Text
    axes: tuple[Word, ...]
    spans: tuple[Span, ...] | None = None

    def parts(self, length: int, mesh: MeshSpec) -> tuple[Span, ...]:
        """What each linear index over the axes computes of a factor of `length`."""
        if self.spans is not None:
            return self.spans
        return nested_spans(length, tuple(mesh.size(axis) for axis in self.axes))


@dataclass(frozen=True)
class NodeLayouts:
    """operands: the layout in which the op reads each tensor operand (order of `tensor_operands`).
    results:  the layout of each result as the op leaves it.
    splits:   which factors of the op's rule are split, and how.

    A placeholder has one result and no operands; the graph's output node has operands only.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    splits: tuple[FactorSplit, ...] = ()

    @property
    def tensors(self) -> tuple[Layout, ...]:
        """Of operands and results."""
        return (*self.operands, *self.results)


Assignment = Mapping[str, NodeLayouts]
"""Global node name -> layouts. `getitem` nodes are not in it: they select a result of their producer."""

REDUCE_OPS = ("sum", "max", "min")
ROUTED, RING, KEYS = "routed", "s:ring", "t:keys"
"""No reduction, but pending: its expert's rank has a row. Factors whose parts pass by all ranks, or are told to all."""
ReduceOp = Annotated[str, Meta(pattern=r"^(max|min|(sum|routed)([0-9]+of[0-9]+)?)$")]
_MAX_DIMS = 64
Dim = Annotated[int, Meta(ge=0, lt=_MAX_DIMS)]
_Position = Annotated[int, Meta(ge=-(2**62), le=2**62)]

Span = tuple[_Position, _Position]
"""Half-open [lo, hi)."""


def common(one: Span, two: Span) -> Span:
    """The overlap of two ranges; empty as (lo, lo)."""
    lo = max(one[0], two[0])
    return lo, max(lo, min(one[1], two[1]))


def laps(span: Span, part: Span, length: int) -> list[tuple[Span, int]]:
    """Where positions of `part` are in `span`, both counted modulo `length`: (places in the span's own count, what to
    take off one to get the part's), in order. A span within [0, length) meets a part at most once."""
    (lo, hi), (first, last) = span, part
    if lo >= hi or first >= last:
        return []
    inside = min(lo, first) >= 0 and max(hi, last) <= length
    shifts = (0,) if inside else range((lo - last) // length * length, hi - first + 1, length)
    met = ((common(span, (first + shift, last + shift)), shift) for shift in shifts)
    return [(places, shift) for places, shift in met if places[0] < places[1]]


@cache
def spans_of(sizes: tuple[int, ...]) -> tuple[Span, ...]:
    """The ranges that sizes make up in a row."""
    ends = (0, *itertools.accumulate(sizes))
    return tuple(itertools.pairwise(ends))


def chunk_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Sizes of `torch.chunk(length, parts)`, trailing empties included: 32 over 3 -> (11, 11, 10).

    Each part has ceil(length / parts) until nothing is left; the same as DTensor's `Shard`.
    """
    step = -(-length // parts)
    return tuple(max(0, min(step, length - i * step)) for i in range(parts))


@cache
def nested_sizes(length: int, axis_sizes: tuple[int, ...], unit: int = 1) -> tuple[int, ...]:
    """Chunk `length` over the first axis, every part over the next, and so on, in whole `unit`s.

    One size per linear index over `axis_sizes`, major to minor. `unit` must divide `length`.
    """
    assert length % unit == 0, f"unit {unit} does not divide {length}"
    sizes: tuple[int, ...] = (length // unit,)
    for parts in axis_sizes:
        sizes = tuple(itertools.chain.from_iterable(chunk_sizes(size, parts) for size in sizes))
    return tuple(size * unit for size in sizes)


@cache
def nested_spans(length: int, axis_sizes: tuple[int, ...]) -> tuple[Span, ...]:
    """The parts of which `nested_sizes` gives the sizes."""
    return spans_of(nested_sizes(length, axis_sizes))


def first_part(length: int, mesh: MeshSpec, axes: Sequence[str]) -> int:
    """The first of `nested_sizes`, which none exceeds."""
    for axis in axes:
        length = -(-length // mesh.size(axis))
    return length


class Halo(Struct, frozen=True, forbid_unknown_fields=True):
    """What ranks hold of a dim beside their own part of it: what a window reads, or writes to.

    spans:  per linear index over the dim's axes, in global coordinates; they may overlap and leave gaps. Positions
            below 0 or beyond the dim's end count modulo its length (what a periodic window reads).
    summed: False: where spans overlap all hold the same. True: the value is the sum of what overlaps, and 0 in gaps
            (the gradient of a window's operand, before the ranks have added up theirs).
    """

    spans: tuple[Span, ...]
    summed: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in self.spans)


class Layout(Struct, frozen=True, forbid_unknown_fields=True):
    """For each tensor dim the mesh axes that split it, and the axes with a pending reduction.

    dims:    per dim, the axes splitting it, major to minor. () is not split.
    partial: (axis, op), sorted by axis name; op is one of `REDUCE_OPS`, `ROUTED`, or says a `Choice`: all hold it
             full-size.
    sizes:   per dim, explicit split sizes (one per linear index over the dim's axes), or None for
             the default: nested `torch.chunk`. Build with `Layout.of`, which keeps this normal:
             sizes equal to the default are stored as None, so equal placements compare equal.
    halos:   per dim, what is held beyond a split, or None. Only operands and results of window ops have any.
    """

    dims: Annotated[tuple[tuple[Word, ...], ...], Meta(max_length=_MAX_DIMS)]
    partial: tuple[tuple[Word, ReduceOp], ...] = ()
    sizes: tuple[tuple[Count, ...] | None, ...] = ()
    halos: tuple[Halo | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("sizes", "halos"):
            given = getattr(self, name)
            if not given:
                force_setattr(self, name, (None,) * len(self.dims))
            elif len(given) != len(self.dims):
                raise ValueError(f"a layout of {len(self.dims)} dims has {name} of {len(given)}")
        used = self.axes
        if len(set(used)) < len(used):
            raise ValueError(f"a layout uses a mesh axis twice: {', '.join(used)}")

    @staticmethod
    def replicated(ndim: int) -> Layout:
        return Layout(((),) * ndim)

    @staticmethod
    def of(
        shape: Sequence[int],
        mesh: MeshSpec,
        dims: Sequence[Sequence[str]],
        partial: Sequence[tuple[str, str]] = (),
        sizes: Sequence[Sequence[int] | None] | None = None,
        halos: Sequence[Halo | None] | None = None,
    ) -> Layout:
        """A normalised layout of a tensor of global `shape`; checks that explicit sizes add up. A halo whose spans
        are the parts of a split is that split."""
        normal: list[tuple[int, ...] | None] = []
        kept: list[Halo | None] = []
        for dim, (length, axes) in enumerate(zip(shape, dims, strict=True)):
            given = None if sizes is None else sizes[dim]
            halo = None if halos is None else halos[dim]
            counts = tuple(mesh.size(axis) for axis in axes)
            given, halo = normal_split(length, counts, None if given is None else tuple(given), halo)
            normal.append(given)
            kept.append(halo)
        return Layout(tuple(tuple(axes) for axes in dims), tuple(sorted(partial)), tuple(normal), tuple(kept))

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis this layout uses, split or partial."""
        return tuple(itertools.chain(*self.dims, (axis for axis, _ in self.partial)))

    def dim_of(self, axis: str) -> int | None:
        """The dim that `axis` splits, if any."""
        return next((d for d, axes in enumerate(self.dims) if axis in axes), None)

    @property
    def has_halo(self) -> bool:
        return any(halo is not None for halo in self.halos)

    @property
    def counts_rows(self) -> bool:
        """Whether parts of a dim are given in numbers: halos, or sizes other than torch.chunk's."""
        return self.has_halo or any(sizes is not None for sizes in self.sizes)

    def split_sizes(self, shape: Sequence[int], mesh: MeshSpec, dim: int) -> tuple[int, ...]:
        """Sizes of what is held of `dim`, one per linear index over its axes; (shape[dim],) if not split."""
        halo = self.halos[dim]
        if halo is not None:
            return halo.sizes
        explicit = self.sizes[dim]
        if explicit is not None:
            return explicit
        return nested_sizes(shape[dim], tuple(mesh.size(a) for a in self.dims[dim]))

    def interval(self, shape: Sequence[int], mesh: MeshSpec, dim: int, rank: int) -> tuple[int, int]:
        """Half-open [lo, hi) that `rank` holds of `dim`, in global coordinates."""
        index = mesh.linear_index(rank, self.dims[dim])
        halo, explicit = self.halos[dim], self.sizes[dim]
        if halo is not None:
            return halo.spans[index]
        if explicit is None:
            return nested_spans(shape[dim], tuple(mesh.size(a) for a in self.dims[dim]))[index]
        lo = sum(explicit[:index])
        return lo, lo + explicit[index]

    def local_shape(self, shape: Sequence[int], mesh: MeshSpec, rank: int) -> tuple[int, ...]:
        return _local_shape(self, tuple(shape), mesh, rank)

    def max_local_shape(self, shape: Sequence[int], mesh: MeshSpec) -> tuple[int, ...]:
        """Largest shard of each dim: the shape that prices and memory are counted for."""
        return tuple(self._largest(length, mesh, dim) for dim, length in enumerate(shape))

    def _largest(self, length: int, mesh: MeshSpec, dim: int) -> int:
        halo, explicit = self.halos[dim], self.sizes[dim]
        if halo is not None:
            return max(halo.sizes)
        return first_part(length, mesh, self.dims[dim]) if explicit is None else max(explicit)

    def format(self, shape: Sequence[int], dtype: str) -> str:
        """`f32[8@dp, 128, 512@tp]+x:sum`; sizes in braces where they are not the default."""
        parts: list[str] = []
        for length, axes, sizes, halo in zip(shape, self.dims, self.sizes, self.halos, strict=True):
            split = "".join(f"@{axis}" for axis in axes)
            braces = "" if sizes is None else "{" + ",".join(map(str, sizes)) + "}"
            if halo is not None:
                braces = "{" + ("+" if halo.summed else ",").join(f"{lo}:{hi}" for lo, hi in halo.spans) + "}"
            parts.append(f"{length}{split}{braces}")
        return f"{dtype}[{', '.join(parts)}]" + "".join(f"+{axis}:{op}" for axis, op in self.partial)

    def __str__(self) -> str:
        splits = ", ".join("".join(f"@{a}" for a in axes) or "-" for axes in self.dims)
        return f"[{splits}]" + "".join(f"+{axis}:{op}" for axis, op in self.partial)


@lru_cache(maxsize=4096)
def _local_shape(layout: Layout, shape: tuple[int, ...], mesh: MeshSpec, rank: int) -> tuple[int, ...]:
    """Programs of equal layers ask for the same again and again."""
    spans = (layout.interval(shape, mesh, dim, rank) for dim in range(len(shape)))
    return tuple(hi - lo for lo, hi in spans)


def normal_split(
    length: int, counts: tuple[int, ...], sizes: tuple[int, ...] | None, halo: Halo | None
) -> tuple[tuple[int, ...] | None, Halo | None]:
    """Explicit sizes and halo of a dim of `length`, as `Layout` keeps them. counts: ranks along its axes."""
    if halo is not None and (parts := _partition(halo.spans, length)) is not None:
        sizes, halo = parts, None
    if sizes is not None:
        assert sum(sizes) == length and len(sizes) == math.prod(counts), (sizes, length, counts)
    return None if sizes == nested_sizes(length, counts) else sizes, halo


@lru_cache(maxsize=4096)
def _partition(spans: tuple[Span, ...], length: int) -> tuple[int, ...] | None:
    """Sizes of spans that, in order, make up [0, length); None of others."""
    end = 0
    for lo, hi in spans:
        if lo < hi:
            if lo != end:
                return None
            end = hi
    return tuple(hi - lo for lo, hi in spans) if end == length else None


Unit = tuple[str, ...]
JoinedAxes = tuple[Unit, ...]


def in_units(axes: Sequence[str], joined: JoinedAxes) -> list[Unit]:
    """`axes`, in which joined ones stand together, as units: (a, b, e), ((a, b),) -> [(a, b), (e,)]."""
    if not joined:
        return [(axis,) for axis in axes]
    first = {run[0]: run for run in joined}
    later = {axis for run in joined for axis in run[1:]}
    return [first.get(axis, (axis,)) for axis in axes if axis not in later]


def chained(units: Iterable[Unit]) -> tuple[str, ...]:
    """The axes of units, one after the other."""
    return tuple(itertools.chain.from_iterable(units))


def joined_text(units: Iterable[Unit]) -> str:
    """Those of several axes: "a+b, c+d"."""
    return ", ".join("+".join(unit) for unit in units if len(unit) > 1)


def orders(axes: Sequence[str], joined: JoinedAxes) -> Iterator[tuple[str, ...]]:
    """Every order of `axes` that keeps joined ones together."""
    return map(chained, itertools.permutations(in_units(axes, joined)))


def keeps_together(layout: Layout, one: str, two: str) -> bool:
    """Whether a layout uses two axes alike, the second right after the first where they split a dim."""
    partial = dict(layout.partial)
    if layout.dim_of(one) != layout.dim_of(two) or partial.get(one) != partial.get(two):
        return False
    dim = layout.dim_of(one)
    return dim is None or layout.dims[dim].index(two) == layout.dims[dim].index(one) + 1


def joining_problems(joined: JoinedAxes, mesh: MeshSpec) -> Iterator[str]:
    """Why axes cannot be joined like this on a mesh: each run is of neighbours, in mesh order, and no axis in two."""
    real = mesh.real_axes()
    first = 0
    for run in joined:
        place = real.index(run[0]) if run and run[0] in real else -1
        if len(run) < 2 or place < first or real[place : place + len(run)] != run:
            yield f"joined axes {list(run)} are no neighbours on the mesh, or out of order"
            return
        first = place + len(run)
