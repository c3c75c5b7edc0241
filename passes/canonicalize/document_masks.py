"""Masks by which queries see the keys of their own document: numbers of documents, a query and a key each.

A mask is taken apart where conditions are joined by `and`. One compares a number of each query with one of each key;
what is computed from constants says that attention is causal. So does what compares the places within documents, as
Transformers' masks of packed sequences do: whether it says just that is tried on numbers, since models write it in
many ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from passes.ir.graph_pass import emit_at, shape_of
from passes.ir.joint import ancestors, node_value
from passes.ir.op_traits import draws, is_pointwise, is_use
from passes.ir.torch_sizes import SizesLost, computed, sizes_in

aten = torch.ops.aten

_JOINING = (aten.bitwise_and.Tensor, aten.logical_and.default)
_TRIED = 2**22
"""Pairs of queries and keys, in each of three blocks of queries."""


@dataclass(frozen=True)
class Documents:
    """of_queries, of_keys: [..., s, 1] and [..., 1, t] of the graph."""

    of_queries: fx.Node
    of_keys: fx.Node
    is_causal: bool

    def numbers(self, point: fx.Node) -> tuple[fx.Node, fx.Node]:
        """As attention takes them, [b or 1, 1, s, 1] and [b or 1, 1, t, 1], before `point`."""

        def rows(x: fx.Node) -> fx.Node:
            batch, length = math.prod(shape_of(x)[:-2]), max(shape_of(x)[-2:])
            return emit_at(point, x, aten.reshape.default, (x, [batch, 1, length, 1]), {})

        return rows(self.of_queries), rows(self.of_keys)


def documents_of(
    graph: fx.Graph, mask: fx.Node, window_of: Callable[[fx.Graph, fx.Node], int | None]
) -> Documents | None:
    """None for a mask that says anything else. window_of: 0 of a causal mask that is computed from constants."""
    if mask.meta["val"].dtype != torch.bool or mask.meta["val"].ndim != 4:
        return None
    terms = [term for term in _terms(mask) if not _is_true(term)]
    constant = [term for term in terms if all(map(is_constant, ancestors([term])))]
    equal = [t for t in terms if t not in constant and t.target is aten.eq.Tensor]
    if len(equal) != 1:
        return None
    if sizes_in([tuple(node_value(mask).shape)]):
        raise SizesLost("of which documents queries and keys are is told by numbers")
    sides = _sides(equal[0], shape_of(mask))
    if sides is None or any(node_value(t).ndim < 2 or window_of(graph, t) != 0 for t in constant):
        return None
    others = [term for term in terms if term not in (*constant, *equal)]
    if not all(_is_causality(graph, sides, term) for term in others):
        return None
    return Documents(*sides, is_causal=bool(constant or others))


def is_constant(node: fx.Node) -> bool:
    return node.op == "call_function" and not draws(node)


def _is_true(node: fx.Node) -> bool:
    return node.target is aten.full.default and bool(node.args[1])


def _terms(node: fx.Node) -> Iterator[fx.Node]:
    """What `and` joins, through views that add and drop dims of 1."""
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and (is_use(node) or is_same_in_order(node, source)):
        yield from _terms(source)
    elif node.target in _JOINING:
        for operand in node.all_input_nodes:
            yield from _terms(operand)
    else:
        yield node


def is_same_in_order(node: fx.Node, source: fx.Node) -> bool:
    """Whether it is `source` with dims of 1 added or dropped."""
    if node.target is not aten.reshape.default:
        return False
    before, after = ([n for n in shape_of(x) if n != 1] for x in (source, node))
    return before == after


def _sides(equal: fx.Node, scores: tuple[int, ...]) -> tuple[fx.Node, fx.Node] | None:
    """Of queries and of keys, if one is a number a query, the other a number a key. scores: the mask's shape."""
    batch, heads, queries, keys = scores
    sides = [x for x in equal.args if isinstance(x, fx.Node) and len(shape_of(x)) > 1]
    if len(sides) != 2 or heads != 1 or min(queries, keys) < 2:
        return None
    for one, other in (sides, reversed(sides)):
        lengths = shape_of(one)[-2:], shape_of(other)[-2:]
        rows = [math.prod(shape_of(x)[:-2]) for x in (one, other)]
        if lengths == ((queries, 1), (1, keys)) and all(n in (1, batch) for n in rows):
            return one, other
    return None


def _is_causality(graph: fx.Graph, sides: tuple[fx.Node, fx.Node], term: fx.Node) -> bool:
    """Whether `term`, which compares numbers of queries and keys that are made of the same input as those of documents,
    hides of a query's document just the keys behind it, whatever the input is."""
    operands = term.all_input_nodes
    made = ancestors([*sides, *operands])
    given = [node for node in made if node.op == "placeholder"]
    if (
        len(given) != 1
        or given[0].meta["val"].dtype not in (torch.int64, torch.int32)
        or not is_pointwise(term)
    ):
        return False
    if any(draws(node) for node in made):
        return False
    ordered = [node for node in graph.nodes if node in made and node is not given[0]]
    return all(
        _agrees(term, sides, computed(ordered, {given[0]: sample}))
        for sample in _samples(node_value(given[0]))
    )


def _samples(like: Tensor) -> Iterator[Tensor]:
    """Of places: in order, in documents of any lengths, all the same, backwards, and anything."""
    generator = torch.Generator().manual_seed(0)
    length = like.shape[-1]
    places = torch.arange(length)
    begins = torch.rand(length, generator=generator) < 4 / length
    first = torch.where(begins, places, 0).cummax(0).values
    random = [torch.randint(0, most, (length,), generator=generator) for most in (2, 4, length)]
    for sample in (places, places - first, first, places.flip(0), *random):
        yield sample.to(like.dtype).expand(like.shape).contiguous()


def _first(x: Tensor) -> Tensor:
    """Of the samples of a batch, which are tried alike."""
    return x[:1] if x.ndim > 2 else x


def _agrees(term: fx.Node, sides: tuple[fx.Node, fx.Node], values: dict[fx.Node, Tensor]) -> bool:
    of_queries, of_keys = (values[side] for side in sides)
    queries, keys = of_queries.shape[-2], of_keys.shape[-1]
    count = max(1, min(queries, _TRIED // keys))
    for begin in sorted({0, (queries - count) // 2, queries - count}):
        cut = lambda x, begin=begin: (
            x.narrow(-2, begin, count) if x.ndim > 1 and x.shape[-2] == queries else x
        )
        args = fx.map_arg(term.args, lambda node, cut=cut: _first(cut(values[node])))
        same = _first(cut(of_queries) == of_keys)
        causal = torch.ones(count, keys, dtype=torch.bool).tril(begin)
        if not torch.equal(same & term.target(*args), same & causal):  # type: ignore[operator]
            return False
    return True
