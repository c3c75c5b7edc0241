"""Pieces of a batch whose samples read each other: an op of which pieces would run other ops runs whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoshard.planning import canonical_capture
from passes.ir.graph_properties import BrokenGraphError
from passes.ir.joint import JointGraph, repeats
from passes.ir.op_traits import is_product
from passes.micro_batches import run_times
from passes.micro_batches.cut_batch import Uncut, cut_batch, when_cut
from passes.micro_batches.time_axis import TIME
from passes.simulate.reference import graph_values, reference_inputs
from tests.micro_batches.whole_step import step_in_pieces

Change = Callable[[torch.Tensor], torch.Tensor]


class Neighbours(nn.Module):
    """change: of the batch, [b, 4]."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean() + self.change(x).sin().mul(self.linear.bias).mean()


CHANGES: dict[str, Change] = {
    "padded": lambda x: functional.pad(x, (0, 0, 1, 0), value=0.3),
    "padded at both ends": lambda x: functional.pad(x, (0, 0, 1, 1), value=0.3),
    "reflected": lambda x: functional.pad(x.t(), (1, 1), mode="reflect").t(),
    "one row": lambda x: x[1],
}


def captured(change: Change, batch: int) -> tuple[JointGraph, list[torch.Tensor]]:
    torch.manual_seed(0)
    model, x = Neighbours(change).double(), torch.randn(batch, 4, dtype=torch.float64)
    joint = canonical_capture(model, (x,), {}).joint
    return joint, reference_inputs(joint, model, [x], seed=1)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_numbers_of_the_whole_batch(change: Change) -> None:
    joint, values = captured(change, 6)
    first = cut_batch(joint, 2)
    given = [value for value, spec in zip(values, joint.inputs, strict=True) if spec in first.inputs]
    found = step_in_pieces([first, *first.others], given)
    wanted, _ = graph_values(joint, values)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)


def test_windows_of_pieces_of_one_size_are_the_same() -> None:
    """Of 4 samples padded at both ends the pieces would be [0, a, b] and [c, d, 0]: one plan could not be of both."""
    plain, times = when_cut(captured(CHANGES["padded at both ends"], 4)[0], 2)
    (pad,) = (n for n in plain.graph.nodes if n.target is torch.ops.aten.constant_pad_nd.default)
    assert times.of[pad.name] != "piece" or times.layouts[pad.name].results[0].dim_of(TIME) == 1


class Fewer(nn.Module):
    """A product of what `change` makes of the batch."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.change(x)).square().mean()


def products_in_pieces(change: Change, batch: int, count: int) -> int:
    model, x = Fewer(change), torch.randn(batch, 4, requires_grad=True)
    first = cut_batch(canonical_capture(model, (x,), {}).joint, count)
    return sum(is_product(n) and repeats(n) == count for n in first.graph.nodes)


def test_sizes_of_pieces_along_a_window_are_the_same() -> None:
    """Of 4 averages one piece of 3 has 2: another that had a single one would read it through no window."""
    assert products_in_pieces(lambda x: functional.adaptive_avg_pool1d(x.t(), 4).t(), 8, 3) == 3


def test_products_are_in_pieces_whatever_else_is_whole_for_it() -> None:
    """The gradient of `topk` is written whole: more bytes than the products' results."""
    assert products_in_pieces(lambda x: x.topk(4, 0)[0], 40, 2) == 3


def test_a_product_that_pieces_would_run_otherwise_is_named() -> None:
    """Later samples look at more of them."""
    attention = lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    with pytest.raises(Uncut, match=r"attention \(\S+\) needs the whole batch at once\n  try"):
        cut_batch(captured(attention, 4)[0], 2)


def test_pieces_that_run_other_ops_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_times, "run_alike", lambda *_: True)
    with pytest.raises(
        BrokenGraphError, match=r"piece 1 of a batch runs other ops than the first, from \w+ on\n  try"
    ):
        cut_batch(captured(CHANGES["padded"], 6)[0], 2)
