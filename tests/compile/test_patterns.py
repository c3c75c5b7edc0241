"""Patterns found in a graph: what is the same, what may stand there instead, who else reads it."""

from __future__ import annotations

import torch
from torch import fx

from passes.compile.join_linears import Pattern, is_read_elsewhere, matches, op

aten = torch.ops.aten
add, mul, total = op(aten.add.Tensor), op(aten.mul.Tensor), op(aten.sum.dim_IntList)
X, Y, DIM = Pattern(), Pattern(), Pattern()


def graph_of(*calls: tuple[object, ...]) -> list[fx.Node]:
    """Two placeholders, then calls; numbers after a target that are below 0 count nodes, -1 the first."""
    graph = fx.Graph()
    nodes = [graph.placeholder("a"), graph.placeholder("b")]
    for target, *args in calls:
        given = [nodes[-1 - n] if isinstance(n, int) and n < 0 else n for n in args]
        nodes.append(graph.call_function(target, tuple(given)))  # type: ignore[arg-type]
    return nodes


def test_a_pattern_met_twice_is_one_node() -> None:
    a, _, square, product = graph_of((aten.mul.Tensor, -1, -1), (aten.mul.Tensor, -1, -2))
    assert next(matches(mul(X, X), square, {}))[X] is a
    assert not list(matches(mul(X, X), product, {}))
    assert not list(matches(mul(X, X), a, {}))


def test_operands_of_sums_and_products_change_places() -> None:
    a, b, square, result = graph_of((aten.mul.Tensor, -1, -1), (aten.add.Tensor, -2, -3))
    found = next(matches(add(mul(X, Pattern()), Y), result, {Y: b}))
    assert (found[X], found[Y]) == (a, b) and square in found.values()
    assert not list(matches(add(mul(X, Pattern()), Y), result, {Y: a}))


def test_lists_hold_patterns_and_numbers_are_equal() -> None:
    a, _, rows, columns = graph_of(
        (aten.sum.dim_IntList, -1, [1], True), (aten.sum.dim_IntList, -1, [0], True)
    )
    (found,) = matches(total(X, [DIM], True), rows, {})
    assert (found[X], found[DIM]) == (a, 1)
    assert not list(matches(total(X, [DIM], True), columns, found))
    assert not list(matches(total(X, [DIM, DIM], True), rows, {}))


def test_what_may_be_there_instead_comes_second() -> None:
    _, _, product, result = graph_of((aten.mul.Tensor, -1, -2), (aten.add.Tensor, -3, -1))
    inner = mul(X, Pattern()) | Y
    found = list(matches(add(inner, Pattern()), result, {}))
    assert found[0][inner] is product and Y not in found[0]
    assert found[-1][inner] is found[-1][Y]


def test_who_else_reads_what_was_found() -> None:
    _, _, product, result, _ = graph_of(
        (aten.mul.Tensor, -1, -2), (aten.add.Tensor, -3, -1), (aten.add.Tensor, -3, -2)
    )
    inner = mul(X, Pattern())
    found = next(matches(add(inner, Y), result, {}))
    assert found[inner] is product
    assert is_read_elsewhere([inner], found)
    assert not is_read_elsewhere([inner], {inner: result})
