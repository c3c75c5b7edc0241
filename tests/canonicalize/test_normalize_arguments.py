from __future__ import annotations

import pytest
import torch

from passes.canonicalize.normalize_arguments import NormalizeArguments
from passes.ir.graph_pass import copy_joint
from tests.canonicalize.graphs import Function, assert_same, assert_valid, joint_of, ramp, text


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.view(-1, 2), "reshape(x0, [12, 2]) -> [12, 2]"),
        (lambda x: x.unsqueeze(-1), "reshape(x0, [2, 3, 4, 1]) -> [2, 3, 4, 1]"),
        (lambda x: x.transpose(-1, 0), "permute(x0, [2, 1, 0]) -> [4, 3, 2]"),
        (lambda x: x.permute(-1, 0, 1), "permute(x0, [2, 0, 1]) -> [4, 2, 3]"),
        (lambda x: x.expand(5, -1, -1, -1), "expand(x0, [5, 2, 3, 4]) -> [5, 2, 3, 4]"),
        (lambda x: x[:, 1:], "slice(x0, 1, 1, 3, 1) -> [2, 2, 4]"),
        (lambda x: x[..., -1], "select(x0, 2, 3) -> [2, 3]"),
        (lambda x: x.sum(-1, keepdim=True), "sum(x0, [2], True) -> [2, 3, 1]"),
        (lambda x: x.amax(), "amax(x0, [0, 1, 2], False) -> []"),
        (lambda x: torch.cat([x, x], -2), "cat([x0, x0], 1) -> [2, 6, 4]"),
        (lambda x: x.cumsum(-1), "cumsum(x0, 2) -> [2, 3, 4]"),
    ],
)
def test_normalize_arguments(function: Function, expected: str) -> None:
    x = ramp(2, 3, 4)
    before = joint_of(function, x, grads=False)
    after = copy_joint(NormalizeArguments()(copy_joint(before)))
    assert expected in text(after)
    assert_valid(after)
    assert_same(before, after, [x])


def test_the_name_of_a_pass_is_its_class_in_kebab_case() -> None:
    assert NormalizeArguments().name == "normalize-arguments"
