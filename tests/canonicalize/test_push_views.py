from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from passes.canonicalize.permutes import AbsorbPermutes, FusePermutes, MatmulToContract
from passes.canonicalize.push_views import PushViews
from passes.ir.graph_pass import GraphPass, run_passes
from passes.ir.joint import JointGraph
from tests.canonicalize.graphs import Function, applied, assert_valid, ops, prepared, ramp, text


@dataclass(frozen=True)
class PushViewsThroughProducts(GraphPass):
    def __call__(self, joint: JointGraph) -> JointGraph:
        return run_passes(joint, [MatmulToContract(), FusePermutes(), AbsorbPermutes(), PushViews()])


def test_view_mm_view_is_a_product_of_its_own_dims() -> None:
    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.view(6, 4) @ w.t()).view(2, 3, 5)

    after = applied(PushViewsThroughProducts(), linear, ramp(2, 3, 4), ramp(5, 4), grads=True)
    assert text(after) == [
        "contract(x0, x1, m0 m1 k, n k -> m0 m1 n) -> [2, 3, 5]",
        "contract(tangent_0, x0, k0 k1 m, k0 k1 n -> m n) -> [5, 4]",
        "contract(tangent_0, x1, m0 m1 k, k n -> m0 m1 n) -> [2, 3, 4]",
    ]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.view(6, 4).exp().view(2, 3, 4), ["exp(x0) -> [2, 3, 4]"]),
        (lambda x: x.view(6, 4).sum(1).view(2, 3), ["sum(x0, [2], False) -> [2, 3]"]),
        (lambda x: x.view(6, 4).amax(1, True).view(2, 3, 1), ["amax(x0, [2], True) -> [2, 3, 1]"]),
        (lambda x: x.view(6, 4).sum(0), ["sum(x0, [0, 1], False) -> [4]"]),
        (lambda x: x.view(6, 4).sum(), ["sum(x0) -> []"]),
        (lambda x: x.view(6, 4).t().reshape(4, 2, 3), ["permute(x0, [2, 0, 1]) -> [4, 2, 3]"]),
        (lambda x: x.view(6, 4)[:, 1:].reshape(2, 3, 3), ["slice(x0, 2, 1, 4, 1) -> [2, 3, 3]"]),
        (lambda x: x.view(6, 4)[:, 1].view(2, 3), ["select(x0, 2, 1) -> [2, 3]"]),
        (lambda x: x.view(6, 4).cumsum(1).view(2, 3, 4), ["cumsum(x0, 2) -> [2, 3, 4]"]),
        (
            lambda x: torch.cat([x.view(6, 4), x.view(6, 4)], 1).view(2, 3, 8),
            ["cat([x0, x0], 2) -> [2, 3, 8]"],
        ),
        (
            lambda x: F.pad(x.view(6, 4), [1, 2]).view(2, 3, 7),
            ["constant_pad_nd(x0, [1, 2], 0.0) -> [2, 3, 7]"],
        ),
        (
            lambda x: x.view(6, 4).unsqueeze(0).expand(5, 6, 4).reshape(5, 2, 3, 4),
            ["reshape(x0, [1, 2, 3, 4]) -> [1, 2, 3, 4]", "expand(reshape, [5, 2, 3, 4]) -> [5, 2, 3, 4]"],
        ),
        (lambda x: x.view(24).view(6, 4).view(2, 12).view(2, 3, 4).exp(), ["exp(x0) -> [2, 3, 4]"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_an_op_computes_on_the_finer_dims(function: Function, expected: list[str]) -> None:
    assert text(applied(PushViews(), function, ramp(2, 3, 4)))[: len(expected)] == expected


def test_gather_and_comparison_along_tokens() -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        rows, index = x.view(6, 4), i.view(-1)
        picked = rows.gather(1, index.unsqueeze(1)).squeeze(1)
        return torch.where(index != 2, picked, 0.0).sum()

    index = torch.arange(6).view(2, 3) % 4
    after = applied(PushViews(), function, ramp(2, 3, 4), index)
    assert text(after)[:3] == [
        "reshape(x1, [2, 3, 1]) -> [2, 3, 1]",
        "gather(x0, 2, reshape) -> [2, 3, 1]",
        "reshape(gather, [2, 3]) -> [2, 3]",
    ]
    assert text(after)[-1] == "sum(where) -> []"


def test_embedding_of_flat_tokens() -> None:
    index = torch.arange(6).view(2, 3) % 4
    after = applied(
        PushViews(), lambda w, i: F.embedding(i.view(-1), w).view(2, 3, 5), ramp(4, 5), index, grads=True
    )
    assert text(after) == [
        "embedding(x0, x1) -> [2, 3, 5]",
        "embedding_dense_backward(tangent_0, x1, 4, -1, False) -> [4, 5]",
    ]


def test_split_of_flat_tokens() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = x.view(6, 4).split_with_sizes([1, 3], 1)
        return (a * b).view(2, 3, 3)

    after = applied(PushViews(), function, ramp(2, 3, 4))
    assert "reshape" not in ops(after)


def test_tokens_win_against_a_flat_partner() -> None:
    after = applied(PushViews(), lambda x, y: (x.view(6, 4) * y).view(2, 3, 4), ramp(2, 3, 4), ramp(6, 4))
    assert text(after) == ["reshape(x1, [2, 3, 4]) -> [2, 3, 4]", "mul(x0, reshape) -> [2, 3, 4]"]


def test_heads_lose_against_a_flat_partner() -> None:
    after = applied(PushViews(), lambda x, y: x.view(2, 12).exp() * y, ramp(2, 3, 4), ramp(2, 12))
    assert text(after) == [
        "exp(x0) -> [2, 3, 4]",
        "reshape(exp, [2, 12]) -> [2, 12]",
        "mul(reshape, x1) -> [2, 12]",
    ]


def test_a_constant_is_made_in_the_finer_shape() -> None:
    after = applied(PushViews(), lambda x: torch.cat([x.view(6, 4), torch.ones(6, 1)], 1), ramp(2, 3, 4))
    assert "full([2, 3, 1], 1) -> [2, 3, 1]" in text(after)


def test_an_op_without_a_rule_gets_the_reshape() -> None:
    after = applied(PushViews(), lambda x: x.view(6, 4).sort(0)[0], ramp(2, 3, 4))
    assert text(after)[:2] == ["reshape(x0, [6, 4]) -> [6, 4]", "sort(reshape, 0) -> ..."]


def test_a_dim_is_split_as_far_as_both_shapes_go() -> None:
    after = applied(PushViews(), lambda x: x.view(4, 6).exp(), ramp(2, 12))
    assert text(after) == [
        "reshape(x0, [2, 2, 6]) -> [2, 2, 6]",
        "exp(reshape) -> [2, 2, 6]",
        "reshape(exp, [4, 6]) -> [4, 6]",
    ]


def test_shapes_that_cut_across_each_other_are_reshaped() -> None:
    after = applied(PushViews(), lambda x: x.view(8, 3) * 2, ramp(6, 4))
    assert text(after) == ["reshape(x0, [8, 3]) -> [8, 3]", "mul(reshape, 2) -> [8, 3]"]


def test_a_returned_view_is_reshaped_in_its_own_phase() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp().view(6, 4)

    after = applied(PushViews(), function, ramp(2, 3, 4), grads=True)
    phases = {n.name: n.meta["phase"] for n in after.graph.nodes if n.op == "call_function"}
    assert phases["reshape"] == "forward"


def test_a_forward_result_is_not_a_reshape_made_for_the_backward() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp().view(6, 4)
        return y, y.sort(0)[0]

    before = prepared(function, ramp(2, 3, 4))
    for node in before.graph.nodes:
        if node.op == "call_function" and node.target not in (
            torch.ops.aten.exp.default,
            torch.ops.aten.reshape.default,
        ):
            node.meta["phase"] = "backward"
    after = PushViews()(before)
    assert_valid(after)
    first, second = (result for result in after.results if result is not None)
    assert (first.meta["phase"], second.meta["phase"]) == ("forward", "backward")


def test_a_size_of_zero_is_left_alone() -> None:
    applied(PushViews(), lambda x: x.view(0, 4).exp().view(0, 2, 2), ramp(2, 0, 4))
