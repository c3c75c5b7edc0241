from __future__ import annotations

import operator

import torch

from passes.canonicalize.gradients import SplitConvolutionBackward
from passes.canonicalize.normalize_arguments import NormalizeArguments
from passes.ir.graph_pass import copy_joint, run_passes
from tests.canonicalize.graphs import assert_same, prepared, ramp

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(x, w, b, padding=1)


def test_input_gradient_apart_from_the_others() -> None:
    inputs = [ramp(2, 3, 5, 4), ramp(4, 3, 3, 3), ramp(4)]
    before = run_passes(copy_joint(prepared(convolve, *inputs, grads=True)), [NormalizeArguments()])
    after = copy_joint(SplitConvolutionBackward()(copy_joint(before)))
    masks = [n.args[-1] for n in after.graph.nodes if n.target is CONVOLUTION_BACKWARD]
    assert masks == [[True, False, False], [False, True, True]]
    items = [n for n in after.graph.nodes if n.target is operator.getitem]
    assert all(item.meta["phase"] == "backward" for item in items)
    assert_same(before, after, inputs)


def test_one_of_them_alone_stays() -> None:
    inputs = [ramp(2, 3, 5), ramp(4, 3, 3)]
    frozen = lambda x, w: torch.nn.functional.conv1d(x, w.detach())
    before = run_passes(copy_joint(prepared(frozen, *inputs, grads=True)), [NormalizeArguments()])
    after = copy_joint(SplitConvolutionBackward()(copy_joint(before)))
    masks = [n.args[-1] for n in after.graph.nodes if n.target is CONVOLUTION_BACKWARD]
    assert masks == [[True, False, False]]
