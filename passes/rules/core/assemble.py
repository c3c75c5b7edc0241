"""From factor names per dim and concrete shapes to an `OpRule`; rules of pointwise ops, whose operands broadcast."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from cost_model.errors import ShardingError
from passes.layout.windows import Window
from passes.rules.core.rule import Builder, Dim, Exchange, Localize, OpCall, OpRule, TensorInfo

Dims = Sequence[Dim]


def dims(names: str | Iterable[str]) -> tuple[Dim, ...]:
    """One plain dim per word: "b m k" -> (("b",), ("m",), ("k",))."""
    words = names.split() if isinstance(names, str) else names
    return tuple((word,) for word in words)


def assemble(
    shapes: Sequence[Sequence[int]],
    operands: Sequence[Dims],
    results: Sequence[Dims],
    *,
    sizes: Mapping[str, int] | None = None,
    reductions: Mapping[str, str] | None = None,
    whole: Iterable[str] = (),
    linear: Iterable[frozenset[int]] = (),
    windows: Mapping[tuple[int, int], Window] | None = None,
    localize: Localize | None = None,
    exchange: Exchange | None = None,
) -> OpRule:
    """The rule of one op.

    shapes: of the operands, then of the results. Sizes of factors are solved from them, except
    those given in `sizes`. A factor of size 1 disappears; an operand dim of size 1 whose factor is
    larger elsewhere is a broadcast, and has no factor either. A dim in `windows` says nothing of its factor's size.

    Raises ShardingError if two dims disagree about a factor, or a product cannot be solved.
    """
    given = [*operands, *results]
    windows = windows or {}
    plain = [
        [() if (t, d) in windows else dim for d, dim in enumerate(tensor)] for t, tensor in enumerate(given)
    ]
    solved = _solve(plain, shapes, dict(sizes or {}))
    cleaned = [_clean(d, shape, solved) for d, shape in zip(plain, shapes, strict=True)]
    for t, d in windows:
        seen = tuple(f for f in given[t][d] if solved[f] != 1)
        cleaned[t] = (*cleaned[t][:d], seen, *cleaned[t][d + 1 :])
    present = {factor for tensor in cleaned for dim in tensor for factor in dim}
    return OpRule(
        operands=tuple(cleaned[: len(operands)]),
        results=tuple(cleaned[len(operands) :]),
        sizes={factor: size for factor, size in solved.items() if factor in present},
        reductions={f: op for f, op in (reductions or {}).items() if f in present},
        whole=frozenset(f for f in whole if f in present),
        linear=tuple(dict.fromkeys(linear)),
        windows={place: window for place, window in windows.items() if cleaned[place[0]][place[1]]},
        localize=localize,
        exchange=exchange,
    )


def whole_rule(
    shapes: Sequence[Sequence[int]], n_operands: int, linear: Iterable[frozenset[int]] = ()
) -> OpRule:
    """Nothing can be split."""
    nothing = [((),) * len(shape) for shape in shapes]
    return OpRule(tuple(nothing[:n_operands]), tuple(nothing[n_operands:]), sizes={}, linear=tuple(linear))


def _solve(tensors: Sequence[Dims], shapes: Sequence[Sequence[int]], sizes: dict[str, int]) -> dict[str, int]:
    """Sizes of all factors: plain dims first, then products with one unknown until none is left."""
    entries = [
        (dim, length)
        for tensor, shape in zip(tensors, shapes, strict=True)
        for dim, length in zip(tensor, shape, strict=True)
        if dim
    ]
    for dim, length in entries:
        if len(dim) == 1:
            _agree(sizes, dim[0], length)
    pending = [entry for entry in entries if len(entry[0]) > 1]
    while pending:
        later = [entry for entry in pending if not _solve_product(*entry, sizes)]
        if len(later) == len(pending):
            unknown = [f for dim, _ in later for f in dim if f not in sizes]
            raise ShardingError(f"the shapes do not determine the size of factor {unknown[0]!r}")
        pending = later
    return sizes


def _agree(sizes: dict[str, int], factor: str, length: int) -> None:
    """Record `length`; 1 beside a larger size is a broadcast."""
    known = sizes.get(factor, 1)
    if known != 1 and length not in (1, known):
        raise ShardingError(f"factor {factor!r} has size {known} in one dim and {length} in another")
    sizes[factor] = max(known, length)


def _solve_product(dim: Dim, length: int, sizes: dict[str, int]) -> bool:
    """Whether all factors of `dim` are known now. A product of length 1 may be a broadcast."""
    unknown = [f for f in dim if f not in sizes]
    if len(unknown) > 1:
        return False
    known = math.prod(sizes[f] for f in dim if f in sizes)
    if unknown and length % known == 0:
        sizes[unknown[0]] = length // known
    elif unknown or length not in (1, known):
        raise ShardingError(f"a dim of size {length} cannot be the product ({' '.join(dim)}), of {known}")
    return True


def _clean(tensor: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[Dim, ...]:
    return tuple(
        () if length == 1 else tuple(f for f in dim if sizes[f] != 1)
        for dim, length in zip(tensor, shape, strict=True)
    )


def pointwise(*linear: str) -> Builder:
    """..., ... -> ...

    linear: groups of argument names, "self other" for linear in both together; see `linear_sets`.
    """

    def build(call: OpCall) -> OpRule:
        ndim = call.result.ndim
        return assemble(
            call.shapes,
            [broadcast_dims(operand.ndim, ndim) for operand in call.operands],
            [broadcast_dims(ndim)] * len(call.results),
            linear=linear_sets(call, *linear),
        )

    return build


def broadcast_dims(ndim: int, result_ndim: int | None = None) -> tuple[Dim, ...]:
    """Dims of a tensor of `ndim`, aligned at the right with a result whose dims are d0, d1, ... (None: its own)."""
    end = ndim if result_ndim is None else result_ndim
    return tuple((f"d{i}",) for i in range(end - ndim, end))


def linear_sets(call: OpCall, *groups: str) -> tuple[frozenset[int], ...]:
    """Operand positions of each group of argument names in which this call is linear.

    A group must be all tensors: x + 1 is not linear, for every rank would add the 1; a number that
    is 0, or an argument left out, does no harm. An argument that is a list counts with all of its
    tensors. No sums of bools, and no linearity where the result cannot hold what is summed (a float
    cast to an integer, or to 8 bits, is rounded in every part).
    """
    found: list[frozenset[int]] = []
    for group in groups:
        members: list[TensorInfo] = []
        legal = True
        for name in group.split():
            value = call[name]
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, TensorInfo):
                    members.append(item)
                else:
                    legal = legal and (item is None or item == 0)
        if legal and members and _additive(members, call.results):
            found.append(frozenset(m.position for m in members))
    return tuple(found)


def _additive(members: Sequence[TensorInfo], results: Sequence[TensorInfo | None]) -> bool:
    lowest = min(_kind(r.dtype) for r in results if r is not None)
    return all(0 < _kind(m.dtype) <= lowest for m in members)


def _kind(dtype: torch.dtype) -> int:
    """bool 0, integer 1, float 2, complex 3. Floats of 8 bits count as integers."""
    if dtype == torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point and dtype.itemsize > 1 else 1
