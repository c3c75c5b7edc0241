"""Products as operators: `autoshard::contract`, n-d with every loop named, and `autoshard::grouped_mm`.

    contract(a, b, "b s k, n k -> b s n") -> result

A term per operand, one word per dim. No word repeats within a term, nothing
broadcasts, and a word missing from the result is summed. A 2-d `mm` of flattened operands hides
which rows belong to which batch; this form keeps every dim, so each can be split on its own.

    grouped_mm(a, b, offs, first, count) -> result

One matrix product for each group of a jagged dim, as mixtures of experts have them.
`offs` (int32 or int64, rising) are the ends of all groups along a dim of length L: group g is [offs[g-1], offs[g]),
offs[-1] meaning 0, and ends outside [0, L] are taken to be 0 or L. The op computes groups first .. first + count:

    rows:     a [L, k],        b [count, k, n]  ->  [L, n]         rows of other groups, and of none, are 0
    columns:  a [count, m, k], b [k, L]         ->  [m, L]         the same of columns
    summed:   a [m, L],        b [L, n]         ->  [count, m, n]  groups without members are 0

so a rank may hold some of the groups, or a part of the dim (offs less where its part begins). The gradients are
grouped products too. torch's own `aten::_grouped_mm` leaves what is in no group undefined, takes all groups, and its
fakes take bfloat16 alone; on CUDA it is what runs, where its operands' dtype and layout allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from passes.ops.registration import differentiable_operator, operator

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
        shape = [math.prod(sizes[w] for w in group) for group in groups]
        return x.permute([term.index(w) for w in order]).reshape(shape)

    if batch:
        product = torch.bmm(flat(a, a_term, (batch, rows, summed)), flat(b, b_term, (batch, summed, columns)))
    else:
        product = torch.mm(flat(a, a_term, (rows, summed)), flat(b, b_term, (summed, columns)))
    order = [*batch, *rows, *columns]
    return product.reshape([sizes[w] for w in order]).permute([order.index(w) for w in result])


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


Kind = Literal["rows", "columns", "summed"]

_ALIGN = 16
"""Bytes: rows, or columns, of torch's kernel begin at multiples of it (`check_valid_strides`)."""


def kind_of(a_dims: int, b_dims: int) -> Kind:
    """By the number of dims of both operands."""
    kinds: dict[tuple[int, int], Kind] = {(2, 3): "rows", (3, 2): "columns", (2, 2): "summed"}
    return kinds[a_dims, b_dims]


def jagged_length(a: Tensor, b: Tensor) -> int:
    """L: the length of the dim that the groups divide."""
    return int({"rows": a.shape[0], "columns": b.shape[-1], "summed": a.shape[-1]}[kind_of(a.ndim, b.ndim)])


def _shape(a: Tensor, b: Tensor, count: int) -> list[int]:
    plain = [a.shape[-2], b.shape[-1]]
    return [count, *plain] if a.ndim == b.ndim == 2 else plain


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    """Reads `offs` on the host, except where torch's fused product runs."""
    return _fused(a, b, offs, first, count) if is_fused(a, b) else _by_group(a, b, offs, first, count)


grouped_mm = differentiable_operator(
    "grouped_mm(Tensor a, Tensor b, Tensor offs, int first, int count) -> Tensor",
    _grouped_mm,
    lambda a, b, offs, first, count: a.new_empty(_shape(a, b, count)),
)
"""See the module."""


def grouped_mm_reference(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    """The op as ATen ops where torch's fused product can run, else the op itself: a loop over groups whose sizes are
    values is no graph."""
    return _fused(a, b, offs, first, count) if is_fused(a, b) else grouped_mm(a, b, offs, first, count)


def is_fused(a: Tensor, b: Tensor) -> bool:
    """Whether torch's kernel takes these: bfloat16 on CUDA, nothing empty, every group beginning at an aligned address.

    Groups begin at any row, so the jagged dim must be the outer one in memory, with rows of whole 16-byte vectors. Of
    `columns` it is the inner one of the result: not fused. (No model has it; it is the gradient of `summed`.)
    """
    if a.device.type != "cuda" or torch.version.hip is not None or not a.dtype == b.dtype == torch.bfloat16:
        return False
    kind, step = kind_of(a.ndim, b.ndim), _ALIGN // a.element_size()
    if kind == "columns" or not (a.numel() and b.numel()):
        return False
    if kind == "summed":
        return a.shape[0] % step == 0 and b.shape[1] % step == 0
    return a.shape[1] % step == 0 and (
        _by_rows(b) or _by_rows(b.transpose(-1, -2)) or b.shape[-1] % step == 0
    )


def _by_rows(x: Tensor) -> bool:
    """Row-major in its last two dims, with rows and `x` beginning at aligned addresses (`check_valid_strides`)."""
    step = _ALIGN // x.element_size()
    outer, inner = x.stride()[-2:]
    whole = x.storage_offset() % step == 0 and (x.ndim == 2 or x.stride(0) % step == 0)
    return whole and inner == 1 and outer >= max(1, x.shape[-1]) and outer % step == 0


def _in_rows(x: Tensor, order: Tensor | None = None) -> Tensor:
    """`x`, its rows in that order, row-major; a copy only where it is not."""
    x = x if order is None else x.index_select(0, order)
    return x if _by_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _fused(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    """By torch's kernel, whose groups begin at 0: what lies before them is turned behind them and back."""
    rows, length = b.ndim == 3, jagged_length(a, b)
    ends = offs.clamp(0, length)
    places = torch.arange(length, device=a.device)
    mine, begin, turned = ends.narrow(0, first, count), None, None
    if first:
        begin = ends.narrow(0, first - 1, 1)
        mine, turned = mine - begin, (places + begin) % length
    product, groups = torch.ops.aten._grouped_mm.default, mine.to(torch.int32)
    if not rows:
        return _packed(product(_in_rows(a.t(), turned).t(), _in_rows(b, turned), groups))
    b = b if _by_rows(b.transpose(-1, -2)) else _in_rows(b)
    result = product(_in_rows(a, turned), b, groups)
    inside = places < mine.narrow(0, count - 1, 1)
    result = torch.where(inside.unsqueeze(-1), result, 0.0)
    return _packed(result if begin is None else result.index_select(0, (places - begin) % length))


def _packed(x: Tensor) -> Tensor:
    """torch's kernel pads rows to whole vectors."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _by_group(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    kind, length = kind_of(a.ndim, b.ndim), jagged_length(a, b)
    ends = [0, *offs.clamp(0, length).tolist()]
    result = a.new_zeros(_shape(a, b, count))
    for group in range(count):
        begin, end = ends[first + group], ends[first + group + 1]
        if begin >= end:
            continue
        match kind:
            case "rows":
                result[begin:end] = a[begin:end] @ b[group]
            case "columns":
                result[:, begin:end] = a[group] @ b[:, begin:end]
            case "summed":
                result[group] = a[:, begin:end] @ b[begin:end]
    return result


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offs, first, count = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, offs)
    ctx.first, ctx.count = first, count


def _gradient(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    """dA = dC B^T and dB = A^T dC, group by group: of rows, rows and summed; of columns, summed and columns; of
    summed, columns and rows."""
    if grad is None:
        return (None,) * 5
    a, b, offs = ctx.saved_tensors
    wants_a, wants_b, *_ = ctx.needs_input_grad
    groups = (offs, ctx.first, ctx.count)
    of_a = grouped_mm(grad, b.transpose(-1, -2), *groups) if wants_a else None
    of_b = grouped_mm(a.transpose(-1, -2), grad, *groups) if wants_b else None
    return of_a, of_b, None, None, None


grouped_mm.register_autograd(_gradient, setup_context=_setup_context)
