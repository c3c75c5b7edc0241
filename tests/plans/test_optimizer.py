"""The optimizer in a plan's memory and time: named, or as one of torch's is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoshard import MeshSpec, ShardingError, find_plan
from autoshard.arguments import optimizer_name
from cost_model.memory import OPTIMIZERS
from tests.profiles import slow_compute

WIDTH = 64


def peak(optimizer: object, dtype: torch.dtype = torch.float32) -> int:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(dtype)
    x = torch.randn(1, WIDTH, dtype=dtype)
    mesh = MeshSpec({"dp": 1})
    return find_plan(model, mesh, (x,), profile=slow_compute(), optimizer=optimizer).peak_memory  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [
        ("sgd", 0),
        ("momentum", 4),
        ("adam", 8),
        ("adamw", 8),
        ("adamw, amsgrad", 12),
        ("adamw, fp32 master", 12),
        ("sgd, fp32 master", 4),
    ],
)
def test_its_states_are_counted(optimizer: str, nbytes: int) -> None:
    assert peak(optimizer) - peak("sgd") == nbytes * WIDTH * WIDTH


def test_master_copies_are_float32_beside_bfloat16() -> None:
    states = peak("adamw, fp32 master", torch.bfloat16) - peak("sgd", torch.bfloat16)
    assert states == 12 * WIDTH * WIDTH
    assert peak("adamw", torch.bfloat16) - peak("sgd", torch.bfloat16) == 4 * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "sgd"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum"),
        (lambda p: torch.optim.Adam(p), "adam"),
        (lambda p: torch.optim.AdamW(p), "adamw"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "adam, amsgrad"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "adamw, amsgrad"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), "adamw"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), "adamw, amsgrad"),
    ],
)
def test_one_of_torchs(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], name: str) -> None:
    optimizer = make([nn.Parameter(torch.zeros(2))])
    assert optimizer_name(optimizer) == name
    assert peak(optimizer) == peak(name)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_as_many_states_as_torch_makes(kind: type[torch.optim.Adam], amsgrad: bool) -> None:
    weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    optimizer = kind([weight], amsgrad=amsgrad)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    made = sum(value.numel() for value in optimizer.state[weight].values() if value.numel() > 1)
    assert OPTIMIZERS[optimizer_name(optimizer)].states * weight.numel() == made


def test_anything_else_is_an_error() -> None:
    with pytest.raises(ShardingError, match=r"optimizer is 'adagrad'.*\n.*'adamw'"):
        peak("adagrad")
