"""Small networks whose inputs come split in rows: the ops between their convolutions are split too, and are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autoshard import MeshSpec, Plan, find_plan, verify
from tests.profiles import slow_compute

RANKS = 3


class Between(nn.Module):
    """A convolution, `op`, and another convolution of what it gives, of as many dims of space as the input has."""

    def __init__(self, op: Callable[[Tensor], Tensor], space: int, channels: int = 4) -> None:
        super().__init__()
        make = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[space]
        self.op, self.one, self.two = op, make(2, 4, 3, padding=1), make(channels, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.op(self.one(x).tanh())).square().mean()


def local_patches(x: Tensor) -> Tensor:
    """Every 3 x 3 patch weighted by its own mean, and put back."""
    columns = F.unfold(x, 3, padding=1)
    return F.fold(columns * columns.mean(1, keepdim=True), x.shape[2:], 3, padding=1)


def windows(x: Tensor) -> Tensor:
    """The mean of every second window of 5 rows, by `Tensor.unfold`."""
    return x.unfold(2, 5, 2).mean(-1)


def in_one_dim(x: Tensor) -> Tensor:
    """What torch has for one dim are its ops for two, on one row."""
    x = F.max_pool1d(F.avg_pool1d(x, 4, 2, 1), 3, 1, 1)
    return F.adaptive_max_pool1d(F.adaptive_avg_pool1d(x, 25), 17)


def powers(x: Tensor) -> Tensor:
    return F.adaptive_max_pool2d(F.lp_pool2d(x.abs(), 3, 3, 2, ceil_mode=True), (17, 7))


def deep(x: Tensor) -> Tensor:
    return F.adaptive_max_pool3d(F.adaptive_avg_pool3d(F.lp_pool3d(x.abs(), 3, 2), (11, 2, 4)), (8, 3, 2))


def resized(x: Tensor) -> Tensor:
    x = F.interpolate(x, scale_factor=1.3, mode="bilinear")
    x = F.interpolate(x, size=(80, 14), mode="nearest-exact")
    x = F.interpolate(x, size=(71, 15), mode="bicubic", align_corners=True)
    return F.interpolate(x, size=(31, 13), mode="bicubic", antialias=True)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], str]] = {
    "one dim": (
        in_one_dim,
        (33,),
        "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_max_pool2d",
    ),
    "powers": (powers, (25, 22), "avg_pool2d adaptive_max_pool2d"),
    "three dims": (deep, (9, 4, 6), "avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d"),
    "resized": (
        resized,
        (25, 12),
        "upsample_bilinear2d _upsample_nearest_exact2d upsample_bicubic2d _upsample_bicubic2d_aa",
    ),
    "patches": (local_patches, (15, 12), "im2col col2im"),
    "windows": (windows, (15, 12), "unfold"),
}
"""name -> ops one after the other, one rank's rows and the other dims, and what is captured."""


def split_in_space(plan: Plan, op: str) -> dict[str, bool]:
    """Of every captured `op`, forward and backward, whether one of its operands is split in space."""
    found: dict[str, bool] = {}
    for name, layouts in plan.planned.layouts.items():
        if name.rstrip("_0123456789").removesuffix("_backward") == op:
            found[name] = any(any(layout.dims[2:]) for layout in layouts.operands)
    return found


@pytest.mark.parametrize("name", CASES)
def test_simulated(name: str) -> None:
    op, rows, captured = CASES[name]
    torch.manual_seed(0)
    model = Between(op, len(rows)).double()
    own = torch.randn(1, 2, *rows, dtype=torch.float64)
    plan = find_plan(model, MeshSpec({"a": RANKS}), (own,), profile=slow_compute(), in_placements=[Shard(2)])
    for op_name in captured.split():
        found = split_in_space(plan, op_name)
        assert len(found) > 1 and all(found.values()), (op_name, found)
    report = verify(model, plan, (torch.randn(1, 2, RANKS * rows[0], *rows[1:], dtype=torch.float64),))
    assert report.ok, report


def test_global_average_pooling() -> None:
    """To one value a channel it is a sum over rows, wherever they are, of which the ranks add up theirs."""
    model = Between(lambda x: F.adaptive_avg_pool2d(x, 1), 2).double()
    own = torch.randn(1, 2, 25, 22, dtype=torch.float64)
    plan = find_plan(model, MeshSpec({"a": RANKS}), (own,), profile=slow_compute(), in_placements=[Shard(2)])
    total = plan.planned.layouts["sum_1"]
    assert total.operands[0].dims[2] == ("a",) and total.results[0].partial == (("a", "sum"),)
    assert verify(model, plan, (torch.randn(1, 2, 75, 22, dtype=torch.float64),)).ok
