"""Dtypes: autocast, scalers, half and double precision, complex numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.parts import Net, batch, gradients, net, state, train
from tests.scripts.script import Make


def autocast_around_the_call(make: Make) -> Any:
    """Losses in bfloat16 agree to its rounding alone: they are compared as such."""
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[Tensor] = []
    for number in range(3):
        x, y = batch(number)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
            loss = F.mse_loss(out.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().to(torch.bfloat16))
    return [out.dtype, losses]


class CastsItself(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def autocast_inside_the_model(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(CastsItself())
    x, y = batch()
    out = model(x)
    F.mse_loss(out.float(), y).backward()
    return [out, {n: p.grad.to(torch.bfloat16) for n, p in model.named_parameters()}]


def autocast_on_and_off(make: Make) -> Any:
    model = make(net())
    x, _ = batch()
    found: list[Any] = []
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(model(x))
    return [found, [value.dtype for value in found]]


def gradient_scaler(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number in range(3):
        x, y = batch(number)
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), state(model)]


def gradient_scaler_skips_infinite_gradients(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(2):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * (float("inf") if number == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), state(model)]


def float64(make: Make) -> Any:
    model = make(net(torch.float64))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x, y = batch(dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return state(model)


def bfloat16_parameters(make: Make) -> Any:
    model = make(net(torch.bfloat16))
    x, y = batch(dtype=torch.bfloat16)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return [loss, gradients(model)]


def bfloat16_before_autoshard(make: Make) -> Any:
    model = make(net().to(torch.bfloat16))
    return model(batch(dtype=torch.bfloat16)[0])


def double_after_the_first_call(make: Make) -> Any:
    model = make(net())
    model(batch()[0])
    model.double()
    x, y = batch(dtype=torch.float64)
    F.mse_loss(model(x), y).backward()
    return [gradients(model), {n: p.dtype for n, p in model.named_parameters()}]


def to_dtype_after_autoshard(make: Make) -> Any:
    """Before the first call: the parameters are plain yet."""
    model = make(net()).to(torch.float64)
    x, y = batch(dtype=torch.float64)
    F.mse_loss(model(x), y).backward()
    return gradients(model)


def half_after_the_first_call(make: Make) -> Any:
    model = make(net())
    model(batch()[0])
    model.half()
    with torch.no_grad():
        return [model(batch(dtype=torch.float16)[0]), {n: p.dtype for n, p in model.named_parameters()}]


def to_device(make: Make) -> Any:
    model = make(net())
    model = model.to("cpu")
    model(batch()[0])
    model = model.cpu().to(torch.device("cpu"))
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 9, dtype=torch.complex64))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16)).square().mean()


def complex_numbers(make: Make) -> Any:
    model = make(Spectral())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 4, 16)
    losses: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, state(model)]


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)).double())


def layers_of_different_dtypes(make: Make) -> Any:
    model = make(MixedDtypes())
    x, y = batch()
    F.mse_loss(model(x), y.double()).backward()
    return gradients(model)
