"""Run one op under a rule as ranks would, and compare with the whole op.

Independent of the rules and of the partitioner: it reads an `OpRule` and nothing else. Every mesh
axis gets one choice, a factor or a linear set; every rank's shards are cut from the global operands,
its part of the op is emitted and run, and the parts are put together again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from passes.ir.joint import map_operands, tensor_operands
from passes.layout.layout import Span, nested_sizes
from passes.rules.core.rule import Dim, OpRule

Coordinate = tuple[int, ...]

REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}
"""Of values stacked along dim 0."""


@dataclass(frozen=True)
class Choice:
    """What one mesh axis does: splits `factor`, or carries partial sums of the operands in `linear`."""

    factor: str | None = None
    linear: frozenset[int] = frozenset()


def call_node(
    op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> fx.Node:
    """A node of a graph of its own that calls `op`, metas "val" set from the real tensors and result."""
    graph = fx.Graph()

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = leaf
        return node

    node_args, node_kwargs = pytree.tree_map(placeholder, (tuple(args), dict(kwargs or {})))
    node = graph.call_function(op, node_args, node_kwargs)
    node.meta["val"] = op(*args, **(kwargs or {}))
    return node


def choices(rule: OpRule, axes: int) -> Iterator[tuple[Choice, ...]]:
    """Every combination of one choice per axis, "nothing" included.

    A factor may be split only where it is the first of size above 1 in every dim it is part of.
    """
    options = [Choice(), *(Choice(factor=f) for f in rule.contiguous)]
    options += [Choice(linear=members) for members in rule.linear]
    return itertools.product(options, repeat=axes)


@dataclass(frozen=True)
class Trial:
    """One op (`node` as made by `call_node`), its rule, the sizes of the mesh axes, a choice for each.

    sizes: factor -> its split sizes, one per linear index over the axes that split it; torch's if not given.
    atol: rtol if None.
    """

    node: fx.Node
    rule: OpRule
    mesh: tuple[int, ...]
    chosen: tuple[Choice, ...]
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    rtol: float = 1e-9
    atol: float | None = None
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def mismatch(self) -> str | None:
        """None if all ranks together give what the whole op gives, else what differs and where."""
        wholes = [operand.meta["val"] for operand in tensor_operands(self.node)]
        summands = [self._summands(i, whole) for i, whole in enumerate(wholes)]
        ranks = list(itertools.product(*(range(size) for size in self.mesh)))
        found = {
            rank: self._run(rank, [self._shard(i, rank, s) for i, s in enumerate(summands)]) for rank in ranks
        }
        expected = self.node.meta["val"]
        expected = expected if isinstance(expected, (tuple, list)) else (expected,)
        for index, whole in enumerate(expected):
            if whole is None:
                continue
            for rank in ranks:
                problem = self._compare(index, whole, rank, found)
                if problem is not None:
                    return f"result {index} on rank {rank}: {problem}"
        return None

    def interval(self, factor: str, rank: Coordinate) -> tuple[int, int]:
        axes = self._axes(factor)
        sizes = self.sizes.get(factor) if axes else None
        if sizes is None:
            sizes = nested_sizes(self.rule.sizes[factor], tuple(self.mesh[a] for a in axes))
        position = 0
        for axis in axes:
            position = position * self.mesh[axis] + rank[axis]
        start = sum(sizes[:position])
        return start, start + sizes[position]

    def _axes(self, factor: str) -> list[int]:
        return [a for a, choice in enumerate(self.chosen) if choice.factor == factor]

    def _spans(self, tensor: int, shape: Sequence[int], rank: Coordinate) -> tuple[Span, ...]:
        """What `rank` has of a tensor, counted through operands and results; modulo the dims' lengths."""
        spans: list[Span] = []
        dims = self.rule.operands_and_results[tensor]
        for d, (dim, length) in enumerate(zip(dims, shape, strict=True)):
            large = self.rule.large(dim)
            window = self.rule.windows.get((tensor, d))
            if window is not None and self._axes(dim[0]):
                spans.append(window.reads(*self.interval(dim[0], rank)))
            elif window is not None:
                spans.append((0, length))
            elif large:
                low, high = self.interval(large[0], rank)
                inner = math.prod(self.rule.sizes[f] for f in large[1:])
                spans.append((low * inner, high * inner))
            else:
                spans.append((0, length))
        return tuple(spans)

    def _summands(self, index: int, whole: torch.Tensor) -> dict[Coordinate, torch.Tensor]:
        """Random parts that add up to `whole`, by coordinate along the axes where it is partial."""
        axes = self.partial_axes(index)
        keys = list(itertools.product(*(range(self.mesh[a]) for a in axes)))
        parts = {key: _random_like(whole, self.generator) for key in keys[:-1]}
        parts[keys[-1]] = whole - sum(parts.values()) if parts else whole
        return parts

    def partial_axes(self, operand: int) -> list[int]:
        return [a for a, choice in enumerate(self.chosen) if operand in choice.linear]

    def _shard(
        self, index: int, rank: Coordinate, summands: Mapping[Coordinate, torch.Tensor]
    ) -> torch.Tensor:
        """What `rank` holds of an operand. A shard may lie in memory in any order of its dims (a
        collective over an inner dim leaves it so), so on every other rank it does."""
        value = summands[tuple(rank[a] for a in self.partial_axes(index))]
        part = taken(value, self._spans(index, value.shape, rank))
        order = list(reversed(range(part.ndim)))
        return part.permute(order).contiguous().permute(order) if sum(rank) % 2 else part.contiguous()

    def _run(self, rank: Coordinate, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        graph = fx.Graph()
        locals_ = [graph.placeholder(f"x{i}") for i in range(len(operands))]
        for node, operand in zip(locals_, operands, strict=True):
            node.meta["val"] = operand
        args, kwargs = map_operands(self.node, locals_)
        context = _Context(self, rank, graph, self.node, args, kwargs)
        if self.rule.localize is None:
            emitted: Any = context.call(self.node.target, *args, **kwargs)  # type: ignore[arg-type]
        else:
            emitted = self.rule.localize(context)
        value = _values(emitted)
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)

    def _compare(
        self, index: int, whole: torch.Tensor, rank: Coordinate, found: Mapping[Coordinate, Sequence[Any]]
    ) -> str | None:
        dims, tensor = self.rule.results[index], len(self.rule.operands) + index
        want = taken(whole, self._spans(tensor, whole.shape, rank))
        got = found[rank][index]
        if not isinstance(got, torch.Tensor):
            return f"no tensor, but {got!r}"
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{got.dtype}{list(got.shape)} where {want.dtype}{list(want.shape)} should be"
        pending = self.pending(dims)
        summed = [d for t, d in self.rule.windows if t == tensor and self._axes(dims[d][0])]
        if summed:
            return self._compare_summands(index, whole, rank, found, summed)
        if "sum" in pending.values() and want.dtype == torch.bool:
            return "a pending sum of bools"
        total = _reduced([found[r][index] for r in self._group(rank, list(pending))], set(pending.values()))
        return self._difference(total.to(want.dtype), want)

    def _compare_summands(
        self,
        index: int,
        whole: torch.Tensor,
        rank: Coordinate,
        found: Mapping[Coordinate, Sequence[Any]],
        summed: Sequence[int],
    ) -> str | None:
        """Add up what the ranks found of a result seen through windows, each part in its place."""
        dims, tensor = self.rule.results[index], len(self.rule.operands) + index

        def only(spans: Sequence[Span], wanted: bool) -> list[Span]:
            """The spans of the summed dims, or of the others; all of the rest."""
            lengths = whole.shape
            return [s if (d in summed) == wanted else (0, lengths[d]) for d, s in enumerate(spans)]

        want = taken(whole, only(self._spans(tensor, whole.shape, rank), False))
        total = torch.zeros_like(want)
        axes = [axis for d in summed for axis in self._axes(dims[d][0])]
        for r in self._group(rank, [*axes, *self.pending(dims)]):
            part, spans = found[r][index], only(self._spans(tensor, whole.shape, r), True)
            total = total + spread(part, summed, spans, want.shape)
        return self._difference(total, want)

    def _difference(self, total: torch.Tensor, want: torch.Tensor) -> str | None:
        atol = self.rtol if self.atol is None else self.atol
        wrong = ~torch.isclose(total, want, rtol=self.rtol, atol=atol, equal_nan=True)
        if not wrong.any():
            return None
        at = tuple(int(i) for i in wrong.nonzero()[0])
        return (
            f"{int(wrong.sum())} of {want.numel()} values differ, the first at {list(at)}: "
            f"{total[at].item()} where {want[at].item()} should be"
        )

    def pending(self, dims: Sequence[Dim]) -> dict[int, str]:
        """axis -> reduction that a result with these dims waits for."""
        kept = {f for dim in dims for f in dim}
        pending: dict[int, str] = {}
        for axis, choice in enumerate(self.chosen):
            if choice.linear:
                pending[axis] = "sum"
            elif choice.factor is not None and choice.factor in self.rule.reductions.keys() - kept:
                pending[axis] = self.rule.reductions[choice.factor]
        return pending

    def _group(self, rank: Coordinate, axes: Sequence[int]) -> list[Coordinate]:
        spans = [range(size) if a in axes else [rank[a]] for a, size in enumerate(self.mesh)]
        return list(itertools.product(*spans))


def _reduced(parts: Sequence[torch.Tensor], ops: set[str]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    assert len(ops) == 1, "a result waits for two different reductions"
    return REDUCTIONS[ops.pop()](torch.stack(list(parts)))


def _random_like(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        found = torch.randn(value.shape, generator=generator, dtype=value.dtype, device="cpu")
    else:
        found = torch.randint(-9, 9, value.shape, generator=generator, device="cpu")
    return found.to(value.device, value.dtype)


@dataclass
class _Context:
    """The `LocalContext` of one rank of a trial."""

    trial: Trial
    rank: Coordinate
    graph: fx.Graph
    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ring: None = None

    def interval(self, factor: str) -> tuple[int, int]:
        return self.trial.interval(factor, self.rank)

    def is_split(self, factor: str) -> bool:
        return any(choice.factor == factor for choice in self.trial.chosen)

    def result_shape(self, index: int = 0) -> list[int]:
        value = self.node.meta["val"]
        shape = (value[index] if isinstance(value, (tuple, list)) else value).shape
        spans = self.trial._spans(len(self.trial.rule.operands) + index, shape, self.rank)
        return [hi - lo for lo, hi in spans]

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = target(*_values(args), **_values(kwargs))
        return node


def _values(given: Any) -> Any:
    return map_arg(given, lambda node: node.meta["val"])


def _places(span: Span, length: int) -> torch.Tensor:
    return torch.arange(*span) % length


def taken(whole: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """What lies at `spans`, one per dim."""
    for dim, span in enumerate(spans):
        if span != (0, whole.shape[dim]):
            whole = whole.index_select(dim, _places(span, whole.shape[dim]))
    return whole


def spread(
    part: torch.Tensor, dims: Collection[int], spans: Sequence[Span], shape: Sequence[int]
) -> torch.Tensor:
    """`part`, whose `dims` lie at their spans of a tensor of `shape`, in zeros of it: positions that meet add up."""
    for dim in dims:
        sizes = [*part.shape]
        sizes[dim] = shape[dim]
        part = part.new_zeros(sizes).index_add(dim, _places(spans[dim], shape[dim]), part)
    return part
