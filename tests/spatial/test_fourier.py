"""A transform over a split dim needs the whole of it: gathered, right, and said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, find_plan, verify
from tests.profiles import slow_compute


class FourierLayer(nn.Module):
    """Of a Fourier neural operator: weights for the lowest frequencies, beside a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 4, 4, 2))
        self.local = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft2(x)[..., :4, :4]
        mixed = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(self.weight))
        far = torch.fft.irfft2(nn.functional.pad(mixed, (0, 2, 0, 8)), s=x.shape[-2:])
        return (far + self.local(x)).tanh().square().mean()


@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 2, "b": 2}], ids=str)
def test_transformed_dims_are_gathered(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = FourierLayer().double(), torch.randn(2, 3, 12, 11, dtype=torch.float64)
    mesh = MeshSpec(axes)
    placements = [Shard(2), *[Shard(0)] * (len(axes) - 1)]
    shard = x[: 2 // axes.get("b", 1), :, : 12 // axes["a"]]
    plan = find_plan(model, mesh, (shard,), profile=slow_compute(), in_placements=(placements,))
    found = [record for record in plan.records if "_fft_" in record.op]
    assert len(found) == 3  # there, back, and the gradient of going back
    for record in found:
        (layout,) = plan.assignment[record.name].operands
        assert layout.dims[2:] == ((), ())
    report = verify(model, plan, (x,))
    assert report.ok, report
    (why,) = [line for line in plan.explain().splitlines() if line.startswith("ops without a rule")]
    assert "inputs gathered" in why and "aten._fft_r2c.default" in why
