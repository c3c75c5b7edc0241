"""Inputs that do not lie in memory as their shape says: what is written through a view of them, and what is a view."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, find_plan, verify
from autoshard.global_call import counts_as_in_order, global_call
from autoshard.verification.simulated_step import ALL_SIZES
from cost_model.errors import CaptureError
from passes.canonicalize import canonicalize
from passes.capture import capture, flatten_call
from passes.capture.decomposed_places import laid, lies_as
from passes.plan.describe import graph_hash
from tests.capture.running import check, run_eager, run_graph, tensors_of
from tests.profiles import slow_compute
from tests.verification.noted_runs import noted_runs


class _Written(nn.Module):
    """Adds to what `flatten` gives: a view of what lies in order, a copy of what does not."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.dims = first, last

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(*self.dims)
        rows.add_(1)
        return (x * self.scale).sum() + (2 * rows).sum()


_LAID: dict[str, Callable[[], Tensor]] = {
    "in order": lambda: torch.arange(24.0).reshape(2, 3, 4),
    "turned": lambda: torch.arange(24.0).reshape(4, 3, 2).permute(2, 1, 0),
    "half turned": lambda: torch.arange(24.0).reshape(2, 4, 3).transpose(1, 2),
    "columns left out": lambda: torch.arange(30.0).reshape(2, 3, 5)[..., :4],
    "rows left out": lambda: torch.arange(40.0).reshape(2, 5, 4)[:, :3],
    "every other": lambda: torch.arange(48.0).reshape(2, 3, 8)[..., ::2],
}


@pytest.mark.parametrize("dims", [(0, -1), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("how", _LAID)
def test_writes_through_a_view_reach_the_input_and_those_in_a_copy_do_not(
    how: str, dims: tuple[int, int]
) -> None:
    model, make = _Written(*dims), _LAID[how]
    captured = capture(model, (make(),), {})
    tangents = [torch.ones(()), *[None] * (captured.call.output_count - 1)]
    wanted = run_eager(captured, model, ((make(),), {}), tangents)
    found = run_graph(captured, tensors_of(model), [make()], tangents)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=str(name))


def test_ranks_compute_what_one_process_does_of_a_turned_input() -> None:
    model = _Written(0, -1)
    x = torch.arange(32.0).reshape(4, 8).t()
    plan = find_plan(model, MeshSpec({"dp": 2}, device_type="cpu"), (x,), profile="cpu")
    assert verify(model, plan, (x,)).ok
    # As 1 is added to a copy: the sum of x, and twice that of x + 1.
    assert model(x).item() == pytest.approx(496 + 2 * (496 + 32))


class _Normed(nn.Module):
    """Norms of a turned tensor are in order: their views are views."""

    def __init__(self, norm: nn.Module, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.read = norm, read

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.read(y).sum() + (y * y).sum()


_READ: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda y: y.view(-1).exp(),
    "view of bytes": lambda y: y.view(torch.complex128).imag,
    "written": lambda y: y.flatten(1).mul_(2),
}


@pytest.mark.parametrize("read", _READ)
def test_layer_norms_of_a_turned_input_are_in_order(read: str) -> None:
    check(_Normed(nn.LayerNorm(6).double(), _READ[read]), _turned())


@pytest.mark.parametrize("trains", [True, False])
def test_batch_norms_of_a_turned_input_are_in_order(trains: bool) -> None:
    check(_Normed(nn.BatchNorm1d(5).double().train(trains), _READ["written"]), _turned())


def _turned() -> Tensor:
    return torch.randn(6, 5, 4, dtype=torch.float64).transpose(0, -1)


def test_batch_norms_keep_channels_last() -> None:
    """So that `flatten` makes a copy, which is all that doubles."""
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    check(_Normed(nn.BatchNorm2d(5).double(), _READ["written"]), x)


class _Strided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.as_strided((3, 4), (1, 3))


def test_memory_of_a_turned_input_is_read_where_it_is() -> None:
    check(_Strided(), torch.arange(12.0).reshape(4, 3).t())


def test_memory_between_the_rows_of_an_input_is_not_read() -> None:
    with pytest.raises(CaptureError, match="not the tensor's own"):
        capture(_Strided(), (torch.zeros(3, 8)[:, :4],), {})


def test_calls_are_of_one_kind_where_their_tensors_lie_alike() -> None:
    key = lambda x: flatten_call((x,), {})[1]
    assert key(torch.zeros(4, 3)) == key(torch.ones(4, 3))
    assert key(torch.zeros(4, 3)) != key(torch.zeros(3, 4).t())
    assert key(torch.zeros(4, 3)[:, :2]) != key(torch.zeros(4, 2))
    # However long the rest is: the last token of a text that grows.
    assert key(torch.zeros(4, 7)[:, -1:]) == key(torch.zeros(4, 8)[:, -1:]) != key(torch.zeros(4, 1))


@pytest.mark.parametrize("how", [{"in_placements": [[Shard(1)], None]}, {"batch_axes": ("dp",)}], ids=str)
def test_parts_of_tensors_count_as_contiguous(how: dict[str, Any]) -> None:
    """A rank with an empty or a whole part would else have another kind of call than those with slices."""
    given = {"in_placements": None, **how}
    x, y = torch.zeros(3, 8)[:, :4], torch.arange(6.0).reshape(2, 3).t()
    whole = global_call((x, y), {}, MeshSpec({"dp": 2}, device_type="cpu"), **given)
    assert all(tensor.is_contiguous() for tensor in whole.args)
    key = flatten_call((x, y), {})[1]
    assert counts_as_in_order(key, given["in_placements"], given.get("batch_axes", ()))
    assert key.in_order == flatten_call((x.contiguous(), y.contiguous()), {})[1] != key
    assert not counts_as_in_order(key, None, ())


def test_what_nothing_is_written_to_has_the_same_graph_however_it_lies() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    )
    x = torch.zeros(2, 3, 6, 6)
    others = (x.to(memory_format=torch.channels_last), torch.zeros(2, 3, 6, 7)[..., :6])
    hashes = {graph_hash(canonicalize(capture(model, (one,), {}).joint)) for one in (x, *others)}
    assert len(hashes) == 1


def _drawn(draw: random.Random) -> Tensor:
    """A view of some of a tensor: dims turned, parts left out, one repeated."""
    x = torch.empty([draw.choice([1, 2, 3, 5]) * 2 for _ in range(draw.randint(1, 4))])
    for _ in range(draw.randint(0, 3)):
        dim = draw.randrange(x.ndim)
        match draw.choice(["turn", "cut", "step", "repeat"]):
            case "turn":
                x = x.transpose(dim, draw.randrange(x.ndim))
            case "cut":
                x = x.narrow(dim, 0, max(2, x.shape[dim] - 1))
            case "step" if x.shape[dim] > 3:
                x = x[(slice(None),) * dim + (slice(None, None, 2),)]
            case _:
                x = x.narrow(dim, 0, 1).expand([4 if d == dim else -1 for d in range(x.ndim)])
    return x


@pytest.mark.parametrize("seed", range(0, 300, 50))
def test_a_tensor_laid_so_has_the_same_views(seed: int) -> None:
    for case in range(seed, seed + 50):
        x = _drawn(random.Random(case))
        lies = lies_as(x)
        assert not isinstance(lies, tuple) and lies_as(laid(x.shape, lies)) == lies
        # Of other sizes too: twice as large in every dim.
        for factor in (1, 2):
            y = laid([size * factor for size in x.shape], lies)
            assert list(y.shape) == [size * factor for size in x.shape]
            for first, last in itertools.combinations_with_replacement(range(x.ndim), 2):
                is_view = [t.flatten(first, last).data_ptr() == t.data_ptr() for t in (x, y)]
                assert is_view[0] == is_view[1], (case, factor, first, last)


@pytest.mark.parametrize("how", ["turned", "cut"])
def test_a_program_for_all_sizes_is_made_of_a_call_that_lies_so(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """`flatten` of [b, s] is no view there, so the sum is of x as it was, at every size."""
    by = noted_runs(monkeypatch)
    x = torch.randn(6, 4).t() if how == "turned" else torch.randn(4, 7)[:, :6]
    model = _Written(0, -1)
    plan = find_plan(model, MeshSpec({"dp": 2}), (x,), profile=slow_compute())
    report = verify(model, plan, (x,), sizes=[{"batch": 8}, {"batch": 12}, {"batch": 10}])
    assert report.ok and ALL_SIZES in by


def test_a_plan_of_parts_is_verified_by_inputs_that_lie_in_any_order() -> None:
    """Parts count as contiguous: the whole inputs, one of them a row repeated, are taken so as well."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(1, 3, batch_first=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.gru(y)[0].square().mean() + x.sum()

    model, x = Steps().double(), torch.randn(4, 2).double()
    y = torch.randn(1, 1, 1).double().expand(3, 1, 1)
    mesh = MeshSpec({"dp": 2})
    plan = find_plan(model, mesh, (x[:2], y), in_placements=([Shard(0)], None), profile="cpu")
    report = verify(model, plan, (x, y))
    assert report.ok and report.max_error < 1e-12
