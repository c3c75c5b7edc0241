"""A transform over a split dim needs the whole of it: that is gathered, or split along another dim. Complex numbers
travel, on real ranks too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, find_plan, verify
from passes.layout.layout import Halo, Layout
from passes.redistribution.lower_redistribute import emit
from passes.redistribution.redistribute import Redistributor
from tests.profiles import slow_compute
from tests.ranks import RankPool
from tests.redistribution.layouts import link_prices


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
        (layout,) = plan.planned.layouts[record.name].operands
        assert layout.dims[2:] == ((), ())
        assert layout.dims[:2] != ((), ()), "neither batch nor channels are split"
    assert plan.fallbacks == ()
    report = verify(model, plan, (x,))
    assert report.ok, report


class Filter(nn.Module):
    """Every way in which complex numbers meet conjugates and real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x).conj()
        weight = torch.view_as_complex(self.weight)
        mixed = torch.fft.ifft(torch.einsum("bcx,cd->bdx", spectrum, weight.conj()))
        doubled = torch.view_as_real((weight * 2).conj().resolve_conj())
        pairs = torch.view_as_real(spectrum.resolve_conj())
        return mixed.abs().square().mean() + doubled.square().sum() + weight.conj().imag.sum() + pairs.sum()


def test_conjugates() -> None:
    torch.manual_seed(0)
    model, x = Filter().double(), torch.randn(4, 4, 6, dtype=torch.float64)
    mesh = MeshSpec({"a": 2})
    plan = find_plan(model, mesh, (x[:2],), profile=slow_compute(), in_placements=([Shard(0)],))
    assert plan.fallbacks == ()
    report = verify(model, plan, (x,))
    assert report.ok, report


ROWS, COLUMNS, WHOLE, SUMMED = (
    Layout((("a",), ())),
    Layout(((), ("a",))),
    Layout.replicated(2),
    Layout(((), ()), (("a", "sum"),)),
)
HALO = Layout((("a",), ()), halos=(Halo(((0, 3), (1, 5)), summed=False), None))


def sent(rank: int, before: Layout, after: Layout, local: Tensor, group: str, mesh: MeshSpec) -> Tensor:
    plan = Redistributor(mesh, link_prices(mesh)).plan(before, after, (5, 4), local.element_size())
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(local.shape, dtype=local.dtype, device="meta")
    graph.output(emit(graph, x, plan.steps, (5, 4), mesh, rank, {("a",): group}, {}))
    return fx.GraphModule(nn.Module(), graph)(local)


def complex_on_rank(rank: int) -> None:
    """What every kind of collective brings; conjugates that torch has only noted are sent as what they are."""
    mesh, group = MeshSpec({"a": 2}), dist.group.WORLD
    assert group is not None
    for dtype in (torch.complex64, torch.complex128):
        value = torch.complex(torch.arange(20.0).double(), -torch.arange(20.0).double() - 1).view(5, 4)
        value = value.to(dtype)
        rows, columns = value[:3] if rank == 0 else value[3:], value[:, 2 * rank : 2 * rank + 2]
        halo = value[:3] if rank == 0 else value[1:5]
        for before, after, local, wanted in (
            (ROWS, WHOLE, rows, value),
            (ROWS, COLUMNS, rows, columns),
            (COLUMNS, ROWS, columns, rows),
            (SUMMED, WHOLE, value * (2 - 3 * rank), value),
            (SUMMED, ROWS, value * (2 - 3 * rank), rows),
            (ROWS, HALO, rows, halo),
        ):
            for noted in (False, True):
                given = local.conj().resolve_conj().conj() if noted else local.clone()
                assert given.is_conj() == noted
                got = sent(rank, before, after, given, group.group_name, mesh)
                assert torch.equal(got, wanted), (before, after, dtype, got, wanted)


def test_complex_numbers_on_real_ranks(ranks: RankPool) -> None:
    ranks.run(complex_on_rank, world=2)
