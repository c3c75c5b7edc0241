"""Packed sequences: torch's values and gradients for any lengths, by a graph of one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from autoshard import MeshSpec, find_plan, verify
from cost_model.errors import CaptureError
from passes.capture import capture
from tests.capture.running import check

Rest = Callable[[Any, Tensor, Tensor], Any]
SORTED, MIXED = torch.tensor([3, 3, 2, 1]), torch.tensor([2, 2, 1, 2])


class Packing(nn.Module):
    """Any function of (module, x [4, 3, 3], lengths [4])."""

    def __init__(self, layer: nn.Module, rest: Rest) -> None:
        super().__init__()
        self.layer, self.rest = layer, rest

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.rest(self, x, lengths)


def padded(m: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output, state = m.layer(packed)
    y, n = pad_packed_sequence(output, batch_first=True, padding_value=0.5, total_length=4)
    return y, n, state


def as_long_as_the_longest(m: Any, x: Tensor, lengths: Tensor) -> Any:
    """The first steps are not padded; states are given."""
    start = x[:, :2, :1].permute(1, 0, 2).expand(2, 4, 2)
    output, state = m.layer(pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False), start)
    return pad_packed_sequence(output)[0], state


def labelled(m: Any, x: Tensor, lengths: Tensor) -> Any:
    """A loss of the packed data itself."""
    labels = pack_padded_sequence(x[..., 0] > 0, lengths, batch_first=True)
    output, _ = m.layer(pack_padded_sequence(x, lengths, batch_first=True))
    again = PackedSequence(output.data * 2, output.batch_sizes)
    return F.cross_entropy(again.data, labels.data.long()) + pad_packed_sequence(again)[0].sum()


CASES: dict[str, tuple[nn.Module, Rest, Tensor]] = {
    "lstm": (nn.LSTM(3, 2, 2, bidirectional=True), padded, MIXED),
    "projected": (nn.LSTM(3, 4, bias=False, proj_size=2), labelled, SORTED),
    "gru": (nn.GRU(3, 2, bidirectional=True), as_long_as_the_longest, MIXED),
    "rnn": (nn.RNN(3, 2, nonlinearity="relu"), labelled, SORTED),
    "tanh": (nn.RNN(3, 2), padded, SORTED),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_torchs(case: str) -> None:
    torch.manual_seed(0)
    layer, rest, lengths = CASES[case]
    check(Packing(layer, rest).double(), torch.randn(4, 3, 3).double(), lengths, rtol=1e-12, atol=1e-12)


def test_data_that_leave_are_counted() -> None:
    check(
        Packing(nn.LSTM(3, 2), lambda m, x, n: pack_padded_sequence(x, n, True).data),
        torch.randn(4, 3, 3),
        SORTED,
    )


@pytest.mark.slow
def test_plans_split_the_sequences() -> None:
    model, given = (
        Packing(nn.RNN(3, 2), labelled).double(),
        (torch.randn(4, 2, 3).double(), SORTED.clamp(max=2)),
    )
    plan = find_plan(model, MeshSpec({"x": 2}), given, profile="cpu", refine="off", backend="eager")
    assert verify(model, plan, given).ok and not plan.fallbacks


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        (
            lambda m, x, n: x * pack_padded_sequence(x.mT, n, True).batch_sizes.sum(),
            "the lengths that it was packed by",
        ),
        (lambda m, x, n: pack_padded_sequence(x, n - 1).data.sum(), "lengths.clamp(min=1)"),
        (lambda m, x, n: m.layer(PackedSequence(x[0], n))[0].data, "call pack_padded_sequence in forward"),
    ],
)
def test_what_is_not_known_is_an_error_at_the_line(rest: Rest, text: str) -> None:
    with pytest.raises(CaptureError, match=r"\n  try: ") as caught:
        capture(Packing(nn.LSTM(3, 2), rest), (torch.randn(4, 3, 3), SORTED), {})
    assert text in str(caught.value) and "test_packed.py" in str(caught.value)
