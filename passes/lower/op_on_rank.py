"""What is emitted on one rank: an op as its rule sees it, what a redistribution brings, and what that is for.

And the interior of an op, computed while a halo travels:

    %x.1: f32[1, 8, 36, 64] = halo_exchange[sp](%x)             // 32 rows, and 2 of each neighbour
    %y:   f32[1, 8, 32, 64] = convolution(%x.1, %w)
    ->
    %i: f32[1, 8, 28, 64] = convolution(%x, %w)                 // needs what is here: runs while the halo travels
    %a: f32[1, 8, 2, 64]  = convolution(%x.1[first rows], %w)
    %b: f32[1, 8, 2, 64]  = convolution(%x.1[last rows], %w)
    %y: f32[1, 8, 32, 64] = cat(%a, %i, %b)

Any op whose results have the windows' factor, by its own rule: the rule is asked for three parts of the results
instead of all of them. Legal for whatever the rule may split; worth it where the seconds hidden are more than those of
putting the parts together and of the launches. Which ops is decided on the global graph, from prices
(`passes.plan.decide`); how many rows are interior is each rank's own affair, as no collective depends on it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, map_operands, node_value, result_index, tensor_operands
from passes.ir.op_traits import is_use
from passes.ir.torch_compat import last_node
from passes.layout.layout import Assignment, FactorSplit, NodeLayouts, Span
from passes.plan.planned_graph import Transfer
from passes.redistribution.emit_steps import Emitter
from passes.redistribution.steps import HaloExchange, Step
from passes.rules.core.rule import LocalContext, OpRule
from passes.rules.core.rule_registry import rules_of

Emit = Callable[[fx.Node, Callable[..., Any], Sequence[Any], dict[str, Any]], fx.Node]
"""Emits an op on behalf of a node of the global graph."""


@dataclass
class RankRing:
    """`Ring` of passes/rules/core/rule.py. steps: exchanges so far."""

    emitter: Emitter
    group: str
    index: int
    parts: tuple[Span, ...]
    kept: dict[fx.Node, fx.Node] = field(default_factory=dict)
    steps: int = 0

    def exchange(self, flat: fx.Node, sent: Sequence[int], received: Sequence[int]) -> fx.Node:
        emit = replace(self.emitter, meta={**self.emitter.meta, "step": self.steps})
        self.steps += 1
        target = torch.ops._c10d_functional.all_to_all_single.default
        return emit.collective(target, flat, [sum(received)], list(received), list(sent), self.group)

    def gathered(self, x: fx.Node) -> fx.Node:
        target = torch.ops._c10d_functional.all_gather_into_tensor.default
        rows = self.emitter.call(torch.ops.aten.unsqueeze.default, x, 0)
        shape = [len(self.parts), *node_value(x).shape]
        return self.emitter.collective(target, rows, shape, len(self.parts), self.group)


@dataclass
class OpOnRank:
    """`LocalContext` of passes/rules/core/rule.py."""

    emit: Emit
    mesh: MeshSpec
    rank: int
    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rule: OpRule
    layouts: NodeLayouts
    ring: RankRing | None = None

    def _split(self, factor: str) -> FactorSplit | None:
        return next((s for s in self.layouts.splits if s.factor == factor), None)

    def is_split(self, factor: str) -> bool:
        return self._split(factor) is not None

    def interval(self, factor: str) -> tuple[int, int]:
        split, length = self._split(factor), self.rule.sizes[factor]
        if split is None:
            return 0, length
        return split.parts(length, self.mesh)[self.mesh.linear_index(self.rank, split.axes)]

    def result_shape(self, index: int = 0) -> list[int]:
        shape = node_value(self.node, index).shape
        return list(self.layouts.results[index].local_shape(shape, self.mesh, self.rank))

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.emit(self.node, target, args, kwargs)


def in_ring(context: OpOnRank, held: Collection[fx.Node], kept: dict[str, dict[fx.Node, fx.Node]]) -> Any:
    """What the op's rule emits. held: operands that it reads as they are held, which all ranks know; kept: by group,
    what rings before made of such, which this one adds to."""
    ring, localize = context.ring, context.rule.localize
    assert ring is not None and localize is not None
    known = kept.setdefault(ring.group, {})
    ring.kept.update({node: known[node] for node in held if node in known})
    result = localize(context)
    known.update({node: made for node, made in ring.kept.items() if node in held})
    return result


@dataclass(frozen=True)
class Arrival:
    """A redistribution as emitted. own: what was moved, of these spans; first: the first node of the move; number: of
    the transfer."""

    own: fx.Node
    spans: Sequence[Span]
    first: fx.Node
    number: int

    @property
    def _received(self) -> list[fx.Node]:
        """The wait and all that is made of what has arrived."""
        found: dict[fx.Node, None] = {}
        node = self.first
        while node.op == "call_function" and node.meta.get("transfer") == self.number:
            after_wait = node.target is torch.ops._c10d_functional.wait_tensor.default
            if after_wait or any(n in found for n in node.all_input_nodes):
                found[node] = None
            node = node.next
        return list(found)

    @property
    def unread(self) -> bool:
        """Whether nothing emitted so far reads what arrives."""
        received = self._received
        return all(user in received for node in received for user in node.users)

    def put_off(self, graph: fx.Graph) -> None:
        """Let what arrives come after all that is emitted so far."""
        for node in self._received:
            last_node(graph).append(node)


@dataclass(frozen=True)
class Served:
    """What a collective is for, as a profiler shows it.

    parameters: placeholder -> the parameter's name in the model. ends: per operand of the output node
    the parameter of which it is the gradient, else None.
    """

    parameters: Mapping[fx.Node, str]
    ends: Sequence[str | None]

    @staticmethod
    def of(joint: JointGraph) -> Served:
        parameters = {node: spec.name for node, spec in joint.given if spec.kind == "param"}
        graded = set(parameters.values())
        return Served(
            parameters,
            [
                end.name if end.kind == "grad" and end.name in graded else None
                for end, result in joint.returned
                if result is not None
            ],
        )

    def name(self, operand: fx.Node, reader: fx.Node, position: int) -> str:
        """The parameter moved, or whose gradient is moved, or else the module that needs the value."""
        parameter = self.ends[position] if reader.op == "output" else self._behind(operand)
        module = reader.meta.get("module") or operand.meta.get("module")
        return str(parameter or module or operand.name)

    def _behind(self, node: fx.Node) -> str | None:
        while node.op == "call_function" and len(tensor_operands(node)) == 1:
            node = tensor_operands(node)[0]
        return self.parameters.get(node)


aten = torch.ops.aten

Own = Mapping[int, tuple[fx.Node, Span]]
"""Operand seen through a window -> (what this rank holds of it before the exchange, its span)."""


@dataclass(frozen=True)
class PossibleInterior:
    """An op that may be computed in parts. exchanges: the transfers that bring the halos it reads, each a single
    exchange: what it has before is its part of the value itself."""

    node: fx.Node
    rule: OpRule
    factor: str
    exchanges: tuple[Transfer, ...]


def possible_interiors(
    joint: JointGraph, assignment: Assignment, steps: Mapping[Transfer, Sequence[Step]]
) -> Iterator[PossibleInterior]:
    """Every op for which an interior is legal."""
    for node, every in rules_of(joint).items():
        layouts = assignment[node.name]
        rule = every.splitting(split.factor for split in layouts.splits)
        if not rule.windows or not any(layout.has_halo for layout in layouts.operands):
            continue
        factor = _factor(node, rule, assignment)
        if factor is None:
            continue
        exchanges = [_exchange(node, t, assignment, steps) for t in _windowed(rule, factor)]
        if all(exchange is not None for exchange in exchanges):
            yield PossibleInterior(node, rule, factor, tuple(e for e in exchanges if e is not None))


def exchange_before(node: fx.Node, position: int, assignment: Assignment) -> tuple[fx.Node, int] | None:
    """(reader, its operand) of the transfer that makes what operand `position` of `node` reads: its own, or that of
    the `use` it reads. None if there is none."""
    source = tensor_operands(node)[position]
    for reader, operand in ((node, position), (source, 0)):
        if reader is source and not is_use(source):
            return None
        producer, index = result_index(tensor_operands(reader)[operand])
        if assignment[producer.name].results[index] != assignment[reader.name].operands[operand]:
            return reader, operand
    return None


def _factor(node: fx.Node, rule: OpRule, assignment: Assignment) -> str | None:
    """The one factor that windows see and axes split, if results can be put together along it."""
    split = {s.factor for s in assignment[node.name].splits}
    seen = {rule.operands_and_results[t][d][0] for t, d in rule.windows if rule.operands_and_results[t][d]}
    (factor, *others) = [f for f in rule.splittable if f in split & seen] or [None]
    if factor is None or others or not rule.may_overlap(factor, range(len(rule.results))):
        return None
    plain = all(dim == (factor,) for dims in rule.operands_and_results for dim in dims if factor in dim)
    return factor if plain else None


def _exchange(
    node: fx.Node, position: int, assignment: Assignment, steps: Mapping[Transfer, Sequence[Step]]
) -> Transfer | None:
    """The transfer of an operand; None if it is anything but one exchange of halos."""
    found = exchange_before(node, position, assignment)
    if found is None:
        return None
    reader, operand = found
    taken = steps[reader.name, operand]
    alone = len(taken) == 1 and isinstance(taken[0], HaloExchange)
    reads_that = assignment[node.name].operands[position] == assignment[reader.name].operands[operand]
    return (reader.name, operand) if alone and reads_that else None


def _windowed(rule: OpRule, factor: str) -> list[int]:
    """Operands that see `factor` through a window."""
    places = [(t, d) for t, d in rule.windows if t < len(rule.operands)]
    return sorted({t for t, d in places if rule.operands[t][d] == (factor,)})


def interior_of(rule: OpRule, factor: str, results: Span, own: Mapping[int, Span]) -> Span | None:
    """The results whose windows lie in what the rank has of every operand; None if there are none, or all are."""
    windows = [(rule.windows[t, d], own[t]) for t, d in rule.windows if t in own and rule.operands[t][d]]

    def here(lo: int, hi: int) -> bool:
        spans = ((window.reads(lo, hi), span) for window, span in windows)
        return all(read[0] >= read[1] or (span[0] <= read[0] and read[1] <= span[1]) for read, span in spans)

    lo, hi = results
    while lo < hi and not here(lo, lo + 1):
        lo += 1
    while lo < hi and not here(hi - 1, hi):
        hi -= 1
    return (lo, hi) if lo < hi and (lo, hi) != results and here(lo, hi) else None


@dataclass
class _Part:
    """The `LocalContext` of some of a rank's results."""

    whole: LocalContext
    rule: OpRule
    factor: str
    span: Span
    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ring: None = None

    def interval(self, factor: str) -> Span:
        return self.span if factor == self.factor else self.whole.interval(factor)

    def is_split(self, factor: str) -> bool:
        return self.whole.is_split(factor)

    def result_shape(self, index: int = 0) -> list[int]:
        shape = self.whole.result_shape(index)
        shape[_dim(self.rule, self.factor, index)] = self.span[1] - self.span[0]
        return shape

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.whole.call(target, *args, **kwargs)


def in_parts(
    ctx: LocalContext,
    rule: OpRule,
    factor: str,
    operands: Sequence[fx.Node],
    own: Own,
    inner: Span,
    arrive: Callable[[], None],
) -> fx.Node | tuple[fx.Node | None, ...]:
    """Emit the interior, then `arrive()`, then what is before and behind it; all of it put together.

    operands: as the whole op reads them, halos included. arrive: what must come after the interior.
    """
    lo, hi = ctx.interval(factor)
    whole = {t: (operands[t], _read(rule, factor, t, (lo, hi))) for t in own}
    middle = _emit(ctx, rule, factor, operands, own, inner)
    arrive()
    parts = [
        middle if span == inner else _emit(ctx, rule, factor, operands, whole, span)
        for span in ((lo, inner[0]), inner, (inner[1], hi))
        if span[0] < span[1]
    ]
    results = [
        None if column[0] is None else ctx.call(aten.cat.default, list(column), _dim(rule, factor, i))
        for i, column in enumerate(zip(*parts, strict=True))
    ]
    return tuple(results) if isinstance(ctx.node.meta["val"], (tuple, list)) else results[0]  # type: ignore[return-value]


def _emit(
    ctx: LocalContext, rule: OpRule, factor: str, operands: Sequence[fx.Node], held: Own, span: Span
) -> list[fx.Node | None]:
    """Results `span`, of operands of which `held` is at hand."""
    first = ctx.interval(factor)[0]
    local = list(operands)
    for t, dims in enumerate(rule.operands):
        for d, dim in enumerate(dims):
            if factor not in dim:
                continue
            x, (start, _) = held[t] if t in held else (operands[t], (first, 0))
            lo, hi = _read(rule, factor, t, span) if t in held else span
            local[t] = _sliced(ctx, x, d, (lo - start, hi - start) if lo < hi else (0, 0))
    args, kwargs = map_operands(ctx.node, local)
    part = _Part(ctx, rule, factor, span, ctx.node, args, kwargs)
    assert rule.localize is not None
    made = rule.localize(part)
    if isinstance(made, tuple):
        return list(made)
    several = isinstance(made.meta["val"], (tuple, list))
    return [ctx.call(operator.getitem, made, i) for i in range(len(rule.results))] if several else [made]


def _sliced(ctx: LocalContext, x: fx.Node, dim: int, span: Span) -> fx.Node:
    whole = span == (0, x.meta["val"].shape[dim])
    return x if whole else ctx.call(aten.slice.Tensor, x, dim, *span)


def _read(rule: OpRule, factor: str, operand: int, span: Span) -> Span:
    """What results `span` read of the operand that sees `factor` through a window."""
    (dim,) = (d for t, d in rule.windows if t == operand and rule.operands[t][d] == (factor,))
    return rule.windows[operand, dim].reads(*span)


def _dim(rule: OpRule, factor: str, result: int) -> int:
    return rule.results[result].index((factor,))
