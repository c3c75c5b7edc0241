"""Split sizes that inputs have, followed through ops; expected by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard.plan.judged import prices_of
from autoshard.planning import canonical_capture
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.layout.layout import Layout
from passes.search.find import Sought, find_assignment
from passes.search.search_terms import boundary_of
from passes.strategies.cuts import Cuts, find_cuts, ops_of
from tests.profiles import dear_start

MESH = MeshSpec({"a": 3})
ROWS = (5, 7, 4)


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def joint_of(function: Callable[[Tensor], Tensor], *shape: int) -> JointGraph:
    return canonical_capture(Of(function), (torch.randn(shape, requires_grad=True),), {}).joint


def split(*shape: int) -> Layout:
    """Of the last dim, in `ROWS`."""
    lead = len(shape) - 1
    return Layout.of(shape, MESH, [*((),) * lead, ("a",)], sizes=[*(None,) * lead, ROWS])


@pytest.mark.parametrize(
    ("function", "length", "sizes"),
    [
        # Result o of stride 2 is about position 2 o: 0 to 2 lie in the first part, 3 to 5 in the second.
        (lambda x: F.conv1d(x, torch.ones(1, 1, 3), stride=2, padding=1), 8, (3, 3, 2)),
        (lambda x: F.conv1d(x, torch.ones(1, 1, 3)), 14, (4, 7, 3)),  # the border is lost on both sides
        (lambda x: F.pad(x, (2, 3)) + 1.0, 21, (7, 7, 7)),
        (lambda x: F.interpolate(x, scale_factor=2.0), 32, (10, 14, 8)),
        (lambda x: x.transpose(1, 2).expand(2, 16, 3).reshape(2, 48), 48, (15, 21, 12)),
    ],
    ids=["stride", "no padding", "pad", "resize", "flatten"],
)
def test_sizes_are_followed(
    function: Callable[[Tensor], Tensor], length: int, sizes: tuple[int, ...]
) -> None:
    joint = joint_of(function, 1, 1, 16)
    cuts = find_cuts(joint, MESH, {0: (split(1, 1, 16),)}, list(ops_of(joint)))
    assert sizes in cuts.sizes[length, ("a",)]


def test_options_are_chunks_units_and_known_sizes() -> None:
    cuts = Cuts({12: frozenset({4, 5})}, {(12, ("a",)): ((6, 6, 0),)})
    found = cuts.options(12, ("a",), MESH)
    assert found == [
        None,
        ((0, 6), (6, 12), (12, 12)),
    ]  # in units of 4 they are chunk's; 5 does not divide 12
    two = MeshSpec({"a": 3, "b": 2})
    spans = ((0, 3), (3, 6), (6, 9), (9, 12), (12, 12), (12, 12))
    assert spans in cuts.options(12, ("a", "b"), two)


def test_uneven_inputs_are_used_as_they_are() -> None:
    """Where moving is expensive."""
    joint = joint_of(lambda x: F.conv1d(x, torch.ones(1, 1, 3), padding=1).tanh(), 1, 1, 16)
    ends = boundary_of(joint, parameters={}, inputs={0: split(1, 1, 16)}, outputs={0: split(1, 1, 16)})
    assignment = find_assignment(Sought(joint, prices_of(dear_start(0.1), MESH), ends)).assignment
    assert [assignment[name].results[0].sizes[2] for name in ("convolution", "tanh")] == [ROWS, ROWS]
