"""Layers and products as operators: `autoshard::contract`, `autoshard::ctc_loss`, and `autoshard::circular_pad`, which
pads with what is at the other end.

Torch takes `F.pad(mode="circular")` apart into copies, of which nothing can tell any more that the dim is a circle.
Where the dim is split in space a rank reads its padding from its neighbours with the rest, across the ends too.

    circular_pad(x, pads)              [n, ...] -> [before + n + after, ...]
    circular_pad_backward(grad, pads)  [before + n + after, ...] -> [n, ...]

pads: (before, after) of the last dim first, as `aten::constant_pad_nd` has them, for as many dims as one likes; none is
negative or above the dim's length.

The loss and its gradient are torch's kernels, with results of one shape whatever the lengths are.
log_probs [t, n, c], targets [n, s], both lengths [n]; of a row of targets, what lies beyond its length is not read.
Torch's own op also gives the forward's table, of which the part beyond the lengths is left unwritten; the gradient
computes it again.

Products as an operator: `autoshard::contract`, n-d with every loop named.

    contract(a, b, "b s k, n k -> b s n") -> result

A term per operand, one word per dim. No word repeats within a term, nothing
broadcasts, and a word missing from the result is summed. A 2-d `mm` of flattened operands hides
which rows belong to which batch; this form keeps every dim, so each can be split on its own.

`autoshard::uniform`: random numbers that depend on the place in the global tensor, not on a rank.

Every element is a hash of (seed, stream, linear index in the global tensor). A rank that holds a
shard computes exactly its part of the one global tensor: replicas agree, shards differ, there is
no generator state, and a seed makes a run repeatable on any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from passes.ops.registration import differentiable_operator, differentiated_by, operator

aten = torch.ops.aten


def _padded(ndim: int, pads: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(dim, before, after) of each dim that is padded."""
    for i in range(len(pads) // 2):
        if pads[2 * i] or pads[2 * i + 1]:
            yield ndim - 1 - i, pads[2 * i], pads[2 * i + 1]


def _resized(x: Tensor, pads: Sequence[int], sign: int) -> Tensor:
    shape = list(x.shape)
    for dim, before, after in _padded(x.ndim, pads):
        shape[dim] += sign * (before + after)
    return x.new_empty(shape)


def _pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    whole = x
    for dim, before, after in _padded(x.ndim, pads):
        length = whole.shape[dim]
        ends = aten.slice.Tensor(whole, dim, length - before), aten.slice.Tensor(whole, dim, 0, after)
        whole = torch.cat([ends[0], whole, ends[1]], dim)
    return whole.clone() if whole is x else whole


def _pad_backward(grad: Tensor, pads: Sequence[int]) -> Tensor:
    total = grad
    for dim, before, after in _padded(grad.ndim, pads):
        length = total.shape[dim] - before - after
        own = aten.slice.Tensor(total, dim, before, before + length)
        tail = aten.slice.Tensor(total, dim, 0, before)
        head = aten.slice.Tensor(total, dim, before + length)
        outer = [0, 0] * (grad.ndim - 1 - dim)
        tail = aten.constant_pad_nd.default(tail, [*outer, length - before, 0])
        total = own + tail + aten.constant_pad_nd.default(head, [*outer, 0, length - after])
    return total.clone() if total is grad else total


circular_pad = differentiable_operator(
    "circular_pad(Tensor x, SymInt[] pads) -> Tensor", _pad, lambda x, pads: _resized(x, pads, 1)
)
circular_pad_backward = differentiable_operator(
    "circular_pad_backward(Tensor grad, SymInt[] pads) -> Tensor",
    _pad_backward,
    lambda grad, pads: _resized(grad, pads, -1),
)
differentiated_by(circular_pad, circular_pad_backward, slice(1, 1))
differentiated_by(circular_pad_backward, circular_pad, slice(1, 1))


_PROBLEM = """Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,
    bool zero_infinity"""


def _backward(grad: Tensor, *problem: Any) -> Tensor:
    tensors, options = problem[:4], problem[4:]
    found = aten._ctc_loss.Tensor(*problem)
    return aten._ctc_loss_backward.Tensor(grad, *tensors, *found, *options)


ctc_loss = differentiable_operator(
    f"ctc_loss({_PROBLEM}) -> Tensor",
    lambda *problem: aten._ctc_loss.Tensor(*problem)[0],
    lambda log_probs, *problem: log_probs.new_empty(log_probs.shape[1]),
)
"""[n]: the loss of each sequence, infinite where it is too short for its targets."""
ctc_loss_backward = differentiable_operator(
    f"ctc_loss_backward(Tensor grad, {_PROBLEM}) -> Tensor",
    _backward,
    lambda grad, log_probs, *problem: log_probs.new_empty(log_probs.shape),
)
"""[t, n, c]: the gradient of `ctc_loss` with respect to log_probs."""
differentiated_by(ctc_loss, ctc_loss_backward, slice(0, 4))
ctc_loss.register_autocast("cpu", torch.float32)  # as torch's own is


Word = str
Terms = tuple[tuple[Word, ...], tuple[Word, ...], tuple[Word, ...]]


@lru_cache(maxsize=4096)
def parse_equation(equation: str) -> Terms:
    """`"b k, k n -> b n"` -> (("b", "k"), ("k", "n"), ("b", "n")). ValueError if malformed."""
    operands, arrow, result = equation.partition("->")
    parts = operands.split(",")
    if not arrow or len(parts) != 2:
        raise ValueError(f"contract equation {equation!r} is not of the form 'a b, b c -> a c'")
    terms = (tuple(parts[0].split()), tuple(parts[1].split()), tuple(result.split()))
    for term in terms:
        if len(set(term)) != len(term):
            raise ValueError(f"contract equation {equation!r} repeats a word in {' '.join(term)!r}")
    unknown = set(terms[2]) - set(terms[0]) - set(terms[1])
    if unknown:
        raise ValueError(f"contract equation {equation!r} has {sorted(unknown)} in the result only")
    return terms


def format_equation(a: Sequence[Word], b: Sequence[Word], result: Sequence[Word]) -> str:
    return f"{' '.join(a)}, {' '.join(b)} -> {' '.join(result)}"


def contract_shape(terms: Terms, a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Shape of the result. ValueError where the operands' sizes of one word differ."""
    sizes: dict[Word, int] = {}
    for term, shape in ((terms[0], a), (terms[1], b)):
        if len(term) != len(shape):
            raise ValueError(f"contract: operand of shape {list(shape)} for the term {' '.join(term)!r}")
        for word, size in zip(term, shape, strict=True):
            if sizes.setdefault(word, size) != size:
                raise ValueError(
                    f"contract: {word!r} is {sizes[word]} in one operand and {size} in the other"
                )
    return [sizes[word] for word in terms[2]]


def contract_reference(a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    """The product in plain aten ops: permute and reshape to one mm or bmm, and back.

    The operand whose words come first in the result is the left one, so that a result laid out
    (columns, rows) costs no transposed copy.
    """
    terms = parse_equation(equation)
    (a, a_term), (b, b_term) = _drop_lonely(a, terms, 0), _drop_lonely(b, terms, 1)
    result = terms[2]
    batch = [w for w in result if w in a_term and w in b_term]
    free = [w for w in result if w not in batch]
    if free and free[0] in b_term:
        a, b, a_term, b_term = b, a, b_term, a_term
    summed = [w for w in b_term if w in a_term and w not in batch]
    rows = [w for w in result if w in a_term and w not in batch]
    columns = [w for w in result if w in b_term and w not in batch]
    sizes = {**dict(zip(a_term, a.shape, strict=True)), **dict(zip(b_term, b.shape, strict=True))}

    def flat(x: torch.Tensor, term: Sequence[Word], groups: Sequence[Sequence[Word]]) -> torch.Tensor:
        order = [word for group in groups for word in group]
        turned = x.permute([term.index(w) for w in order])
        if len(order) == len(groups) and all(groups):
            return turned
        return turned.reshape([math.prod(sizes[w] for w in group) for group in groups])

    if batch:
        product = torch.bmm(flat(a, a_term, (batch, rows, summed)), flat(b, b_term, (batch, summed, columns)))
    else:
        product = torch.mm(flat(a, a_term, (rows, summed)), flat(b, b_term, (summed, columns)))
    order = [*batch, *rows, *columns]
    if len(order) != product.ndim or not (rows and columns):
        product = product.reshape([sizes[w] for w in order])
    return product.permute([order.index(w) for w in result])


def _drop_lonely(x: torch.Tensor, terms: Terms, which: int) -> tuple[torch.Tensor, tuple[Word, ...]]:
    """Sum away the words that only this operand has."""
    term, other = terms[which], terms[1 - which]
    lonely = [d for d, word in enumerate(term) if word not in other and word not in terms[2]]
    if not lonely:
        return x, term
    return x.sum(lonely), tuple(word for d, word in enumerate(term) if d not in lonely)


def _contract(a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    contract_shape(parse_equation(equation), a.shape, b.shape)
    return contract_reference(a, b, equation)


def _contract_fake(a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    """An empty result with the strides that `contract_reference` leaves: what views may follow depends
    on them. (A product is contiguous as [batch, rows, columns], whatever its operands were.)"""
    terms = parse_equation(equation)
    shape = contract_shape(terms, a.shape, b.shape)
    if a.dtype != b.dtype or not a.dtype.is_floating_point:
        return contract_reference(a, b, equation)
    batch = [w for w in terms[2] if w in terms[0] and w in terms[1]]
    free = [w for w in terms[2] if w not in batch]
    left = terms[1] if free and free[0] in terms[1] else terms[0]
    order = [*batch, *(w for w in free if w in left), *(w for w in free if w not in left)]
    sizes = dict(zip(terms[2], shape, strict=True))
    return a.new_empty([sizes[w] for w in order]).permute([order.index(w) for w in terms[2]])


operator("contract(Tensor a, Tensor b, str equation) -> Tensor", _contract, _contract_fake)


_WORD = 0xFFFFFFFF
UNIFORM_WORDS = 3
"""int64 of an element that are alive at once while `uniform_reference` runs op by op: in `_mix` what is mixed, it
shifted, and both together."""


def _mix(h: Tensor) -> Tensor:
    """A bijection of 32-bit words held in int64; no product exceeds 2**63.

    Two rounds of xor-shift and multiply ("lowbias32", C. Wellons, hash-prospector).
    """
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & _WORD
    h = ((h ^ (h >> 15)) * 0x735A2D97) & _WORD
    return h ^ (h >> 15)


def _keys(seed: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Two 32-bit words, 0-d, that every element of one stream shares."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    first = _mix(_mix(_mix(low) ^ high) ^ (stream & _WORD))
    # 2**32 / golden ratio separates the two keys made from one seed.
    second = _mix(first ^ 0x9E3779B9 ^ ((stream >> 32) & _WORD))
    return first, second


def _global_index(
    shape: Sequence[int], offset: Sequence[int], global_shape: Sequence[int], device: torch.device
) -> Tensor:
    """int64 `shape`: the row-major linear index, in the global tensor, of every local element."""
    index = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        place = torch.arange(offset[dim], offset[dim] + shape[dim], dtype=torch.int64, device=device)
        index = index + (place * stride).reshape((-1,) + (1,) * (len(shape) - 1 - dim))
        stride *= global_shape[dim]
    return index.expand(list(shape)).reshape(list(shape))


def uniform_reference(
    shape: Sequence[int], offset: Sequence[int], global_shape: Sequence[int], seed: Tensor, stream: int
) -> Tensor:
    """What `autoshard::uniform` computes, in plain ATen ops, so that a compiler can fuse it.

    shape, offset: this rank's block [offset, offset + shape) of a tensor of `global_shape`.
    seed: int64, 0-d. stream: which of the graph's random ops this is.
    Returns float32 `shape` in [0, 1): multiples of 2**-24, so 1.0 never occurs.
    """
    first, second = _keys(seed, stream)
    index = lambda: _global_index(shape, offset, global_shape, seed.device)
    # Each element meets two keys: with one, two streams would be the same numbers in another order. Nothing has a name
    # here: run op by op, no more than three words of an element are alive at once (`UNIFORM_WORDS`).
    if math.prod(global_shape) > _WORD:
        return _unit(_mix(_mix(_mix((index() & _WORD) ^ first) ^ second) ^ (index() >> 32)))
    return _unit(_mix(_mix((index() & _WORD) ^ first) ^ second))


def _unit(h: Tensor) -> Tensor:
    return (h >> 8).to(torch.float32) * 2.0**-24


uniform = differentiable_operator(
    "uniform(SymInt[] shape, SymInt[] offset, SymInt[] global_shape, Tensor seed, int stream) -> Tensor",
    uniform_reference,
    lambda shape, offset, global_shape, seed, stream: torch.empty(
        list(shape), dtype=torch.float32, device=seed.device
    ),
)
"""The block [offset, offset + shape) of stream `stream`; see `uniform_reference`."""
