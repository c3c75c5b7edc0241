"""The names by which users speak of sizes, and which dims of a call's tensors each is of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cost_model.errors import ShardingError, reject
from passes.ir.torch_sizes import SizeSymbols, SymbolicShapes, marked_dims

SIZE_NAMES = ("batch", "sequence", "height", "width")

Dim = tuple[int, int]
"""(position of a tensor among the call's, dim of it)."""
Dims = list[Dim]
Shapes = Sequence[tuple[int, ...]]
"""Global shapes of a call's tensors."""


def check_size_names(names: Iterable[object], argument: str) -> None:
    """ShardingError for a name of no size."""
    for name in names:
        if name not in SIZE_NAMES:
            raise reject(f"a name in {argument}", name, ", ".join(map(repr, SIZE_NAMES)))


def named_dims(shapes: Sequence[Sequence[int]]) -> dict[str, Dims]:
    """By name, for the sizes that a call with tensors of these (global) shapes has.

    batch: dim 0 of the first tensor that has dims, and of those as long there. What the first tensor is says the rest:
    height, width: the last two dims of one with 4 dims or more, an image. sequence: dim 1 of one with 2 or 3, tokens or
    features. Another tensor has them in the same place, if it is as long there; or else, as a mask, wherever it is as
    long. A dim is of one name only."""
    ranked = {place: shape for place, shape in enumerate(shapes) if shape}
    if not ranked:
        return {}
    shape = next(iter(ranked.values()))
    batch = [(tensor, 0) for tensor, other in ranked.items() if other[0] == shape[0]]
    found: dict[str, Dims] = {"batch": batch}
    for name, dim in _DIMS.get(min(len(shape), 4), {}).items():
        found[name] = []
        for tensor, other in ranked.items():
            taken = {d for known in found.values() for t, d in known if t == tensor}
            alike = [d for d, size in enumerate(other) if size == shape[dim] and d not in taken]
            own = dim % len(other) if len(other) > 1 else 0
            # A mask of rows and columns has no batch, and is as long in both.
            kept = own in alike and (dim < 0 or 0 in taken)
            found[name] += [(tensor, d) for d in ([own] if kept else alike)]
    return found


_DIMS: Mapping[int, Mapping[str, int]] = {
    2: {"sequence": 1},
    3: {"sequence": 1},
    4: {"height": -2, "width": -1},
}
"""By how many dims a call's first tensor has, its names besides the batch."""


def resized_shapes(
    shapes: Sequence[tuple[int, ...]], sizes: Mapping[str, int]
) -> tuple[tuple[int, ...], ...]:
    """A call's shapes with these sizes, by name, in place of its own. ShardingError for one that it does not have."""
    check_size_names(sizes, "sizes")
    known = named_dims(shapes)
    found = [list(shape) for shape in shapes]
    for name, size in sizes.items():
        if name not in known:
            said = ", ".join(map(str, shapes))
            raise ShardingError(
                f"sizes name {name!r}, and no tensor of the call has it: their shapes are {said}\n"
                f"  try: {' or '.join(map(repr, known)) or 'a call with tensors'}"
            )
        if type(size) is not int or size < 0:
            raise reject(f"the size of {name!r}", size, "a number of at least 0")
        for tensor, dim in known[name]:
            found[tensor][dim] = size
    return tuple(map(tuple, found))


def named_sizes(shapes: Shapes, others: Shapes) -> dict[str, int]:
    """By name, the sizes of `others`; {} where not only these are other than in `shapes`, of the same tensors."""
    if [len(shape) for shape in shapes] != [len(other) for other in others]:
        return {}
    sizes = {name: others[tensor][dim] for name, ((tensor, dim), *_) in named_dims(shapes).items()}
    return sizes if resized_shapes(list(map(tuple, shapes)), sizes) == tuple(map(tuple, others)) else {}


def size_named(shapes: Sequence[tuple[int, ...]], name: str) -> int:
    """What a call's size of that name is. ShardingError as of `resized_shapes`."""
    resized_shapes(shapes, {name: 0})
    ((tensor, dim), *_) = named_dims(shapes)[name]
    return shapes[tensor][dim]


def dynamic_dims(names: Sequence[str], tensors: Sequence[Tensor], shapes: Shapes, first: bool) -> set[Dim]:
    """Dims that the user says are sizes: by their names, or by marks. first: of the first kind of call, where it is a
    ShardingError if no tensor has a size of that name."""
    known = named_dims(shapes)
    for name in names if first else ():
        if name not in known:
            raise ShardingError(
                f"dynamic names {name!r}, and no tensor of the call has it: their shapes are "
                f"{', '.join(map(str, shapes))}\n  try: {' or '.join(map(repr, known)) or 'no names'}, or "
                "torch._dynamo.mark_dynamic(tensor, dim)"
            )
    marked = {(tensor, dim) for tensor, t in enumerate(tensors) for dim in marked_dims(t)}
    return marked | {dim for name in names for dim in known.get(name, ())}


@dataclass(frozen=True)
class SizeNames:
    """Which dims of a call's tensors are one size: those that were alike in two calls. places: of each tensor, per dim
    which size it is, or the number that it always was."""

    places: tuple[tuple[tuple[str, int], ...], ...]
    count: int

    @staticmethod
    def of(one: Shapes, two: Shapes) -> SizeNames:
        """Dims of 0 or 1 are no sizes: what is done with these is something else. One that was so in the first call is
        a size in the second: a cache begins with one token."""
        known: dict[tuple[int, int], int] = {}
        place = lambda pair: ("size", known.setdefault(pair, len(known))) if pair[1] > 1 else ("is", pair[1])
        places = [tuple(map(place, zip(a, b, strict=True))) for a, b in zip(one, two, strict=True)]
        return SizeNames(tuple(places), len(known))

    @staticmethod
    def given(shapes: Shapes, dynamic: Collection[Dim]) -> SizeNames:
        """dynamic: which dims are sizes, (tensor, dim) each; those alike are one."""
        known: dict[int, int] = {}

        def place(tensor: int, dim: int, number: int) -> tuple[str, int]:
            if (tensor, dim) not in dynamic or number < 2:
                return "is", number
            return "size", known.setdefault(number, len(known))

        places = [tuple(place(t, d, n) for d, n in enumerate(shape)) for t, shape in enumerate(shapes)]
        return SizeNames(tuple(places), len(known))

    def values(self, shapes: Shapes) -> tuple[int, ...] | None:
        """None where dims differ that were alike."""
        found: dict[int, int] = {}
        for shape, places in zip(shapes, self.places, strict=True):
            for number, (kind, index) in zip(shape, places, strict=True):
                if number != (index if kind == "is" else found.setdefault(index, number)):
                    return None
        return tuple(found[index] for index in range(self.count))

    def symbolic(self, values: Sequence[int]) -> SymbolicShapes:
        symbols = SizeSymbols(values)
        size = lambda place: symbols.sizes[place[1]] if place[0] == "size" else place[1]
        return SymbolicShapes(symbols, [tuple(map(size, places)) for places in self.places])
