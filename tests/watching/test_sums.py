"""Which inputs count as the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from autoshard.watching.check_calls import Sampler, tolerance_of
from autoshard.watching.sums import Pace, as_sums, difference


def compared(tensors: list[Tensor], parts: list[str] | None = None) -> str | None:
    """The ranks' tensors, each its rank's only input."""
    parts = parts or [""] * len(tensors)
    return difference(
        {
            rank: as_sums(
                (("input", "x", part, tolerance_of(tensor.dtype)),), Sampler(4096).sums([tensor], 1)
            )
            for rank, (tensor, part) in enumerate(zip(tensors, parts, strict=True))
        }
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_another_batch_is_found(dtype: torch.dtype) -> None:
    one, other = (torch.randn(64, 100).mul(3).clamp(min=0).to(dtype) for _ in range(2))
    assert compared([one, one.clone(), one.clone()]) is None
    found = compared([one, one, other])
    assert found is not None
    assert found.startswith("input x is not the same on rank 2 as on rank 0")
    assert "data_loader" in found
    assert "in_placements" in found


def test_the_same_samples_in_another_order_are_found() -> None:
    batch = torch.randn(64, 100)
    assert compared([batch, batch.flip(0)]) is not None


def test_one_sample_of_many_is_found() -> None:
    batch = torch.randint(0, 50_000, (256, 128))
    other = batch.clone()
    other[77] = torch.randint(0, 50_000, (128,))
    assert compared([batch, other]) is not None


def test_other_lengths_of_other_tensors_change_nothing() -> None:
    """What ranks have alike is compared, whatever their parts of other tensors are."""
    alike, sampler = torch.randn(300), Sampler(64)
    for mine, theirs in ((5, 4), (0, 9), (200, 100)):
        one, other = (sampler.sums([torch.randn(n), alike], 7)[1] for n in (mine, theirs))
        assert torch.equal(one, other)


def test_a_view_is_sampled_as_its_copy() -> None:
    matrix = torch.randn(300, 7)
    assert torch.equal(Sampler(64).sums([matrix.t()], 3), Sampler(64).sums([matrix.t().contiguous()], 3))


def test_rounding_is_no_difference() -> None:
    batch = torch.randn(64, 100)
    assert compared([batch, batch * (1 + 1e-7)]) is None
    assert compared([torch.tensor([float("nan"), 1.0])] * 2) is None
    assert compared([torch.zeros(0, 3)] * 2) is None


def test_only_equal_parts_are_compared() -> None:
    one, other = torch.randn(4, 4), torch.randn(4, 4)
    assert compared([one, other, one, other], ["0 of dim 0", "1 of dim 0"] * 2) is None
    found = compared([one, other, one, one], ["0 of dim 0", "1 of dim 0"] * 2)
    assert found is not None
    assert found.startswith("the part 1 of dim 0 of input x is not the same on rank 3 as on rank 1")


def compared_calls(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> list[int]:
    """The calls that are due, each of which takes so long."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    pace, found = Pace(), list[int]()
    for number, step in enumerate(seconds, 1):
        if pace.due():
            found.append(number)
        now += step
    return found


def test_calls_are_compared_within_50_or_10_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = compared_calls(monkeypatch, [1.0] * 200)
    assert slow == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192]
    quick = compared_calls(monkeypatch, [0.001] * 40_000)
    assert max(b - a for a, b in pairwise(quick)) == 4096 and len(quick) < 25
    # Steps that become slow are compared as often as if they had been.
    changing = compared_calls(monkeypatch, [0.001] * 10_000 + [1.0] * 200)
    assert max(b - a for a, b in pairwise(changing) if b > 10_050) == 32


def test_ranks_of_other_speeds_compare_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    one = compared_calls(monkeypatch, [0.0090] * 8000)
    other = compared_calls(monkeypatch, [0.0101] * 8000)
    both = sorted({*one} & {*other})
    assert max(b - a for a, b in pairwise(both)) <= 512
