"""`OpRule`: which dims of an op's operands and results correspond.

A *factor* is one loop of the op. Every tensor dim is a product of factors, major first: `()` is a
dim of size 1 that no factor touches (a broadcast dim), `("b",)` a plain dim, `("a", "b")` a dim
flattened from two. Sharding an op over a mesh axis is choosing one factor for that axis; the
layouts of all operands and results follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from passes.ir.joint import map_operands, node_values, tensor_operands
from passes.ir.op_traits import named_arguments
from passes.layout.layout import ROUTED, Span
from passes.layout.windows import Window

Dim = tuple[str, ...]


class Ring(Protocol):
    """The ranks that split the factor of `Exchange`. index: this rank's among them; parts: what each has of it. kept:
    operand -> what an op before made of it for the ring, and what this one does."""

    @property
    def index(self) -> int: ...
    @property
    def parts(self) -> tuple[Span, ...]: ...
    @property
    def kept(self) -> dict[fx.Node, fx.Node]: ...

    def exchange(self, flat: fx.Node, sent: Sequence[int], received: Sequence[int]) -> fx.Node:
        """What the ranks send to this one, in their order. sent, received: elements for and from each. All of the ring
        call it, as often as the others and in one order, also those that have nothing to send."""
        ...

    def gathered(self, x: fx.Node) -> fx.Node:
        """[ranks, *x.shape]: what all ranks call it with, of one shape, in their order."""
        ...


class LocalContext(Protocol):
    """What a rule's `localize` sees while one rank's op is emitted into that rank's graph."""

    @property
    def ring(self) -> Ring | None: ...  # of a way whose op exchanges within itself (`OpRule.exchange`)

    node: fx.Node  # the op in the global graph
    args: tuple[Any, ...]  # its args, tensors replaced by this rank's nodes
    kwargs: dict[str, Any]

    def interval(self, factor: str) -> tuple[int, int]:
        """Half-open range of `factor` that this rank computes; (0, size) if it is not split.

        `factor` must be one of the rule's: one of size 1 does not exist.
        """
        ...

    def is_split(self, factor: str) -> bool:
        """Whether any mesh axis splits `factor` (the same on every rank); False for an unknown factor."""
        ...

    def result_shape(self, index: int = 0) -> list[int]:
        """This rank's shape of result `index`."""
        ...

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit one op into this rank's graph."""
        ...


Localize = Callable[[LocalContext], "fx.Node | tuple[fx.Node | None, ...]"]
"""Emits one rank's part of an op. For an op with several results it may return the tuple of their
nodes (None for a result that the op was told not to compute) instead of one node with a tuple value."""


@dataclass(frozen=True)
class Exchange:
    """Of an op that exchanges within itself what ranks have of `factor`, in torch.chunk's parts in mesh order.

    round:    tensors, counted through operands and results, of which every rank has all parts one after the other.
    swapped:  those of which half of a part is exchanged before, or after, and was not by an op before.
    gathered: those of which every rank is told what all have found of their parts, with `width` numbers for one of it.
    """

    factor: str
    round: tuple[int, ...] = ()
    swapped: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    width: int = 1

    def gathered_nbytes(self, ranks: int, nbytes: Callable[[Iterable[int]], int]) -> int:
        """nbytes: of tensors of a rank."""
        return ranks * self.width * nbytes(self.gathered)

    def held_nbytes(self, ranks: int, nbytes: Callable[[Iterable[int]], int]) -> int:
        """At least: a message on its way, or what all found."""
        return nbytes(self.round) + self.gathered_nbytes(ranks, nbytes)


@dataclass(frozen=True)
class OpRule:
    """operands:   per tensor operand (order of `tensor_operands(node)`), per dim, its factors.
    results:    per result, per dim, its factors.
    sizes:      factor -> global size.
    reductions: factor -> "sum" | "max" | "min". Where such a factor is split, a result that lacks
                it is Partial with that op. (A factor may appear in one result and be reduced in
                another, as the batch in a convolution's backward.)
    whole:      factors that may not be split.
    linear:     sets of operand positions: with exactly those operands Partial(sum) over an axis and
                the other operands replicated over it, every result is Partial(sum) over it.
                mm: ({0}, {1}), linear in each alone. add: ({0, 1},), linear in both together.
    windows:    (tensor, dim) -> window, tensors counted through operands and results. There the dim's one factor is
                seen through the window: with results [lo, hi) of the factor on a rank, the op reads
                `window.reads(lo, hi)` of an operand, and leaves a summand of just that of a result.
    chains:     whether several ranks may compute what windows read, and exchange nothing (`passes.strategies.cuts`).
    moved:      factors along which the op computes nothing, but reads elsewhere (a slice, a cat). They may be split;
                the search offers that where it is worth its time (`passes.search.search_terms`).
    work:       factor -> what part of the op's operations each call takes that its results [lo, hi) need; others:
                one call, of as many as they are.
    routed:     operand -> factor of experts, and how the operand is pending where it is split: its rows count on the
                rank of their expert (`ROUTED`, `copies_of`). Results for which `reductions` says so need not have the
                factor in their dims.
    exchange:   what is exchanged within the op, in this way of splitting it.
    unless:     factors that are split instead where they are together as long as the mesh has ranks, and nothing else
                asks for this way (`passes.strategies.strategies.offered_ways`).
    refines:    a factor that another way splits, and whose single parts this one splits further.
    localize:   emits this rank's op; None repeats the op on the local operands.
    others:     the same op split by other factors: its strategies are those of all. Factors of one name are the same.

    A factor in neither a result nor `reductions` must be in `whole`, or that of `exchange`.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    reductions: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    windows: Mapping[tuple[int, int], Window] = field(default_factory=dict)
    chains: bool = True
    moved: frozenset[str] = frozenset()
    work: Mapping[str, Callable[[int, int], Sequence[float]]] = field(default_factory=dict)
    routed: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    exchange: Exchange | None = None
    unless: tuple[str, ...] = ()
    refines: str | None = None
    localize: Localize | None = None
    others: tuple[OpRule, ...] = ()

    def __post_init__(self) -> None:
        for result in self.results:
            for dim in result:
                assert all(f in self.sizes for f in dim), (dim, self.sizes)
        in_results = {f for result in self.results for dim in result for f in dim}
        in_results |= {self.exchange.factor} if self.exchange is not None else set()
        for operand in self.operands:
            for dim in operand:
                for factor in dim:
                    known = factor in in_results or factor in self.reductions or factor in self.whole
                    assert known, f"factor {factor} is neither kept, reduced nor whole"

    @property
    def ways(self) -> tuple[OpRule, ...]:
        """This rule and the others."""
        return (self, *self.others)

    def splitting(self, factors: Iterable[str]) -> OpRule:
        """That of the ways which has all of `factors`."""
        split = tuple(factors)
        return next(way for way in self.ways if all(factor in way.sizes for factor in split))

    def may_overlap(self, factor: str, computed: Collection[int]) -> bool:
        """Whether ranks may compute the same of `factor`: every result has it plain, so nothing is added up twice.

        computed: results that there are; an op returns None for the others.
        """
        return all(
            any(
                dim == (factor,) and (len(self.operands) + r, d) not in self.windows
                for d, dim in enumerate(self.results[r])
            )
            for r in computed
        )

    @property
    def operands_and_results(self) -> tuple[tuple[Dim, ...], ...]:
        """Dims of every tensor, in the order in which windows count them."""
        return (*self.operands, *self.results)

    @property
    def by_expert(self) -> frozenset[str]:
        """Factors of experts."""
        factors = (factor for factor, _ in self.routed.values())
        return frozenset((*factors, *(f for f, op in self.reductions.items() if op == ROUTED)))

    @property
    def chunked(self) -> frozenset[str]:
        """Factors that are split in no other way than torch.chunk's, in mesh order: layouts name experts by their axes
        alone, and what exchanges is a process group."""
        return self.by_expert if self.exchange is None else self.by_expert | {self.exchange.factor}

    @property
    def splittable(self) -> tuple[str, ...]:
        """Factors an axis may choose, in order of first appearance in results, then operands."""
        seen: dict[str, None] = {}
        for tensor in (*self.results, *self.operands):
            for dim in tensor:
                for factor in dim:
                    seen.setdefault(factor)
        seen |= dict.fromkeys(self.by_expert)
        return tuple(f for f in seen if f not in self.whole and self.sizes[f] > 1)

    @property
    def contiguous(self) -> tuple[str, ...]:
        """`splittable` factors whose shards are contiguous in every dim they appear in: its heads."""
        dims = (dim for tensor in self.operands_and_results for dim in tensor if len(dim) > 1)
        inner = {factor for dim in dims for factor in self.large(dim)[1:]}
        return tuple(factor for factor in self.splittable if factor not in inner)

    def large(self, dim: Dim) -> list[str]:
        """The factors of a dim that are of size > 1."""
        return [factor for factor in dim if self.sizes[factor] > 1]

    def head(self, dim: Dim) -> str | None:
        """The first of these, by which the dim is split."""
        return next((factor for factor in dim if self.sizes[factor] > 1), None)


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype of an operand or a result; `position` counts operands, or results."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class OpCall:
    """One op of the graph as a rule builder reads it.

    arguments: by schema name, defaults filled in, tensors replaced by their `TensorInfo`.
    operands:  the tensors in the order of `tensor_operands(node)`.
    results:   one entry per result; None for a result the op was told not to compute.
    """

    target: Callable[..., Any]
    arguments: Mapping[str, Any]
    operands: tuple[TensorInfo, ...]
    results: tuple[TensorInfo | None, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def tensor(self, name: str) -> TensorInfo:
        """The operand passed as argument `name`."""
        value = self.arguments[name]
        assert isinstance(value, TensorInfo), f"{self.target}: argument {name!r} is {value!r}, not a tensor"
        return value

    @property
    def result(self) -> TensorInfo:
        """Result 0."""
        first = self.results[0]
        assert first is not None
        return first

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the operands, then of the results (() for one not computed)."""
        return [t.shape if t is not None else () for t in (*self.operands, *self.results)]


Builder = Callable[[OpCall], OpRule]
"""Makes the rule of one op from its shapes and arguments."""


def describe(node: fx.Node) -> OpCall:
    """Read `node` (its operands and itself carry meta "val", global shapes)."""
    operands = tuple(_info(i, operand.meta["val"]) for i, operand in enumerate(tensor_operands(node)))
    args, kwargs = map_operands(node, operands)
    results = tuple(None if v is None else _info(i, v) for i, v in enumerate(node_values(node)))
    target: Any = node.target
    return OpCall(target, named_arguments(target, args, kwargs), operands, results)


def _info(position: int, value: Any) -> TensorInfo:
    if not isinstance(value, torch.Tensor):  # a number computed in the graph: nothing to split
        return TensorInfo(position, (), torch.float64 if isinstance(value, float) else torch.int64)
    return TensorInfo(position, tuple(value.shape), value.dtype)
