"""By what rate an op is priced, against a table written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autoshard.planning import canonical_capture
from passes.ir.joint import node_value, tensor_operands
from passes.ir.op_work import arithmetic_kind


def convolutions(model: nn.Module, channels: int) -> list[fx.Node]:
    """Of the forward and of both gradients."""
    x = torch.randn(1, channels, 8, requires_grad=True)
    joint = canonical_capture(model, (x,), {}).joint
    return [
        node for node in joint.graph.nodes if "convolution" in str(node.target) and node.op == "call_function"
    ]


@pytest.mark.parametrize(
    ("conv", "kind"),
    [
        (nn.Conv1d(32, 16, 3), "convolution"),
        (nn.Conv1d(3, 64, 3), "narrow_convolution"),  # a network's first
        (nn.Conv1d(64, 3, 3), "narrow_convolution"),
        (nn.Conv1d(32, 32, 3, groups=32), "narrow_convolution"),
        (nn.Conv1d(32, 64, 3, groups=2), "convolution"),
        (nn.ConvTranspose1d(32, 8, 3), "narrow_convolution"),
        (nn.ConvTranspose1d(32, 16, 3), "convolution"),
    ],
)
def test_whole_convolutions(conv: nn.Conv1d, kind: str) -> None:
    found = convolutions(conv, conv.in_channels)
    assert len(found) == 3
    for node in found:
        assert arithmetic_kind(node, lambda i, n=node: node_value(tensor_operands(n)[i]).shape) == kind


def test_a_part_of_the_channels_may_be_few() -> None:
    """32 channels over 4 ranks: 8 on each."""
    forward, *_ = convolutions(nn.Conv1d(32, 32, 3), 32)
    assert arithmetic_kind(forward, [(1, 32, 8), (32, 32, 3)].__getitem__) == "convolution"
    assert arithmetic_kind(forward, [(1, 32, 8), (8, 32, 3)].__getitem__) == "narrow_convolution"


def test_other_ops() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2, 2)
    for target, kind in ((torch.ops.aten.mm.default, "matmul"), (torch.ops.aten.mul.Tensor, None)):
        node = graph.call_function(target, (x, x))
        node.meta["val"] = torch.ones(2, 2)
        assert arithmetic_kind(node, lambda _: ()) == kind
