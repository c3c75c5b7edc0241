"""Whether an op works on every row by itself, as its rule says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from passes.ir.joint import tensor_operands
from passes.rules.core.rule import Dim, OpRule
from passes.rules.core.rule_registry import rule_for

Rows = tuple[int, ...]
"""The dims of a tensor that count its rows."""


def is_by_rows(node: fx.Node, shape: Sequence[int]) -> bool:
    """Whether an op works on every row by itself, where rows are the first dims, of `shape`."""
    if node.op != "call_function":
        return False
    first = tuple(range(len(shape)))
    rows = {n: first for n in node.all_input_nodes if has_rows(n, shape)}
    found = rows_through(node, rows) if rows else None
    return found is not None and all(dims == first for dims in found)


def has_rows(node: fx.Node, shape: Sequence[int]) -> bool:
    """Whether the first dims are of `shape`. Numbers are compared before symbols, of which it would be a question."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.ndim < len(shape):
        return False
    pairs = sorted(
        zip(value.shape, shape, strict=False), key=lambda pair: sum(type(n) is not int for n in pair)
    )
    return all(a == b for a, b in pairs)


def rows_through(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> tuple[Rows | None, ...] | None:
    """Per result the dims of the rows, None where the op has reduced them; None for an op whose results would not be
    the same rows in another order, given its operands in that order.

    rows: values -> their dims of the rows, in the same order for all. Operands that are not in it have no rows.
    """
    rule, operands = rule_for(node), tensor_operands(node)
    given = {i: rows[operand] for i, operand in enumerate(operands) if operand in rows}
    kinds = {tuple(rule.operands[i][d] for d in dims) for i, dims in given.items()}
    if len(kinds) != 1 or rule.others or not all(len(dim) <= 1 for dim in (*kinds,)[0]):
        return None
    dims = kinds.pop()
    factors = {factor for dim in dims for factor in dim}
    if len(factors) != sum(map(len, dims)) or factors & rule.whole or _combined(rule, factors):
        return None
    for i in range(len(operands)):
        if i not in given and factors & {f for dim in rule.operands[i] for f in dim}:
            return None
    first = next(iter(given.values()))
    results = tuple(_found(dims, first, result) for result in rule.results)
    lost = any(found is None and any(dims) and not factors <= rule.reductions.keys() for found in results)
    return None if lost or any(found == () for found in results) else results


def _combined(rule: OpRule, factors: set[str]) -> bool:
    """Whether rows are seen through a window, or flattened with something else."""
    tensors = enumerate(rule.operands_and_results)
    return any(
        factors & set(dim) and (len(dim) > 1 or (t, d) in rule.windows)
        for t, tensor in tensors
        for d, dim in enumerate(tensor)
    )


def _found(dims: tuple[Dim, ...], first: Rows, result: tuple[Dim, ...]) -> Rows | None:
    """Where a result has the rows: a dim of size 1, which is no factor, where the operand had it. None: nowhere; ():
    some of them."""
    if any(dims) and not any(dim and dim in result for dim in dims):
        return None
    places = [
        result.index(dim)
        if dim and dim in result
        else place
        if not dim and result[place : place + 1] == ((),)
        else -1
        for dim, place in zip(dims, first, strict=True)
    ]
    return () if -1 in places else tuple(places)
