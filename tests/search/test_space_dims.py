"""Where splitting an op along what it moves is offered: where a window can be split with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ir.joint import JointGraph
from passes.rules.core.rule_registry import rule_for
from passes.search.search_terms import factors_along, out_of_space
from passes.strategies.cuts import ops_of
from tests.canonicalize.graphs import Function, prepared


def offered(joint: JointGraph) -> dict[str, set[str]]:
    """Op -> factors along which it moves data that are left to it, of all its nodes together."""
    kept = out_of_space(list(ops_of(joint)))
    found: dict[str, set[str]] = {}
    for node in joint.graph.nodes:
        if node.op == "call_function" and rule_for(node).moved:
            name = str(node.target).split(".")[1]
            found.setdefault(name, set()).update(rule_for(node).moved - kept.get(node, frozenset()))
    return found


def graph(function: Function, *shapes: tuple[int, ...]) -> JointGraph:
    return prepared(function, *(torch.randn(shape) for shape in shapes), grads=True)


def test_rotary_halves_are_not_offered() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * torch.cat([-x[..., 4:], x[..., :4]], -1)).softmax(-1)

    assert offered(graph(function, (2, 3, 8))) == {"slice": set(), "cat": set()} | {"constant_pad_nd": set()}


def test_what_meets_a_convolution_is_offered_its_space_and_not_its_channels() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv2d(torch.cat([x, x.sin()], 1), w, padding=1)[:, :2].relu()
        return y[..., :7, :].flip(-1)

    found = offered(graph(function, (2, 2, 8, 9), (3, 4, 3, 3)))
    assert found["slice"] == {"d2"} and found["flip"] == {"d3"} and found["cat"] == set()


def test_dims_that_a_view_has_made_anew_are_followed() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv2d(x, w).flatten(2).transpose(1, 2).relu()  # [n, h w, c]: cut by rows
        return y.unflatten(1, (5, 6)).roll((1, 2), (1, 3))

    assert offered(graph(function, (2, 2, 7, 8), (4, 2, 3, 3)))["roll"] == {"d1"}


def test_factors_along_a_batch_are_those_of_its_dim_through_views_and_sums() -> None:
    """x: [b, s, c]. Tokens are one dim, batch first; the gradient of what all tokens read is summed along it."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x.flatten(0, 1) * w).sin().unflatten(0, (4, 6)).sum(1)

    joint = graph(function, (4, 6, 8), (8,))
    ops = list(ops_of(joint))
    along = factors_along(ops, [(joint.placeholders[0], 0)])
    shapes = {node: tuple(node.meta["val"].shape) for node, _ in ops}
    split = {node for node, rule in ops for dim in rule.results[0][:1] if along[node].intersection(dim[:1])}
    assert split == {node for node, shape in shapes.items() if shape[0] in (4, 24)} and len(split) > 6
    (summed,) = (along[node] for node in along.keys() - split if "sum" in str(node.target))
    assert len(summed) == 1
