"""Attention reads keys and values of grouped heads as they are, and not written out for each head of queries.

Masks by which queries see the keys of their own document: numbers of documents, a query and a key each.

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

import passes.ops.attention_op  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::attention)
from passes.canonicalize.normalize_arguments import NO_DUPLICATES, ONE_SPELLING
from passes.ir.graph_pass import OpPass, call_like, emit_at, ints_at, replace, shape_of, tensor_at
from passes.ir.joint import ancestors, node_value
from passes.ir.op_traits import draws, is_pointwise, is_use
from passes.ir.torch_sizes import SizesLost, computed, sizes_in

aten = torch.ops.aten

_KEYS = {
    torch.ops.autoshard.attention.default: 1,
    torch.ops.autoshard.attention_backward.default: 2,
}
"""Attention -> the position of its keys. Values come next."""


class GroupHeads(OpPass):
    """Take an expansion of keys and values over the heads of a group, and the sum of their gradients, into attention.

        %e: f32[2, 4, 7, 64, 16] = aten.expand(%k, [2, 4, 7, 64, 16])       // of [2, 4, 1, 64, 16]
        %w: f32[2, 28, 64, 16] = aten.reshape(%e, [2, 28, 64, 16])          // %x of values likewise
        %o = autoshard.attention(%q, %w, %x, ...)
        ->
        %k1: f32[2, 4, 64, 16] = aten.reshape(%k, [2, 4, 64, 16])
        %o = autoshard.attention(%q, %k1, %v1, ...)

    So what moves, and what is kept for the backward, are the heads that there are.
    """

    requires = (ONE_SPELLING,)
    breaks = (NO_DUPLICATES,)

    def rewrite(self, node: fx.Node) -> None:
        if node.target in _KEYS:
            _group(node)


def _group(node: fx.Node) -> None:
    position = _KEYS[node.target]  # type: ignore[index]
    keys, values = (tensor_at(node, position + i) for i in (0, 1))
    sources = _expanded(keys), _expanded(values)
    if sources[0] is None or sources[1] is None or shape_of(sources[0])[:3] != shape_of(sources[1])[:3]:
        return
    results = {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]
    grads = [results[i] for i in (1, 2) if position == 2 and i in results and results[i].users]
    sums = [_sum_of(grad, shape_of(sources[0])) for grad in grads]
    if None in sums:
        return
    args = list(node.args)
    args[position : position + 2] = [_flat(node, source) for source in sources if source is not None]
    new = call_like(node, *args)
    node.replace_all_uses_with(new)
    for index, result in results.items():
        result.meta["val"] = new.meta["val"][index]
    for total, grad in zip(sums, grads, strict=True):
        assert total is not None
        _replace_sum(total, grad)


def _expanded(operand: fx.Node) -> fx.Node | None:
    """[b, g, 1, t, d], if `operand` is that, expanded and with groups flattened: [b, g * r, t, d]."""
    expand = operand.args[0] if operand.target is aten.reshape.default else None
    if not isinstance(expand, fx.Node) or expand.target is not aten.expand.default:
        return None
    source = tensor_at(expand)
    before, wide, after = shape_of(source), shape_of(expand), shape_of(operand)
    if len(before) != 5 or len(after) != 4 or before != (*wide[:2], 1, *wide[3:]):
        return None
    return source if after == (wide[0], wide[1] * wide[2], *wide[3:]) else None


def _sum_of(grad: fx.Node, before: tuple[int, ...]) -> fx.Node | None:
    """The sum over the heads of a group, if that is all that reads `grad`. before: [b, g, 1, ...]."""
    reader, *others = grad.users
    if others or reader.target is not aten.reshape.default or len(reader.users) != 1:
        return None
    (total,) = reader.users
    split = shape_of(reader)
    if len(split) != 5 or split[:2] != before[:2] or total.target is not aten.sum.dim_IntList:
        return None
    same = total.meta["val"].dtype == reader.meta["val"].dtype
    return total if same and ints_at(total, 1) == [2] else None


def _flat(node: fx.Node, source: fx.Node) -> fx.Node:
    """[b, g, t, d] of [b, g, 1, t, d]; what is only reshaped into that is read before."""
    b, g, _, t, d = shape_of(source)
    origin = tensor_at(source) if source.target is aten.reshape.default else source
    return _reshaped(node, origin, (b, g, t, d))


def _replace_sum(total: fx.Node, grad: fx.Node) -> None:
    for reader in list(total.users):
        if reader.target is aten.reshape.default:
            reader.replace_input_with(total, grad)
    if total.users:
        replace(total, _reshaped(total, grad, shape_of(total)))


def _reshaped(point: fx.Node, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    if shape_of(x) == shape:
        return x
    return emit_at(point, x, aten.reshape.default, (x, list(shape)), {})


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
