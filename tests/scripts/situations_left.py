"""What a forward leaves behind: counters, buffers, hidden states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.parts import Net, batch, gradients, state, train
from tests.scripts.script import Make


class Logs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log, self.aux, self.numbers = 0, [], None, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(x)
        self.log.append(out.detach().mean())
        self.numbers.append(out.mean().item())
        self.aux = out.square().mean()
        return out


def counters_logs_and_auxiliary_losses(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Logs())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        x, y = batch(number)
        optimizer.zero_grad()
        out = model(x)
        (F.mse_loss(out, y) + 0.1 * model.aux).backward()
        optimizer.step()
    return [model.calls, [value.item() for value in model.log], model.numbers, state(model)]


def batch_norm_statistics(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))
    result = train(model, torch.optim.SGD(model.parameters(), 0.1))
    model.eval()
    with torch.no_grad():
        return [result, model(batch()[0]), dict(model.named_buffers())]


def batch_norm_with_cumulative_average(make: Make) -> Any:
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(16, momentum=None)
    model = make(nn.Sequential(nn.Linear(6, 16, bias=False), norm, nn.ReLU(), nn.Linear(16, 4)))
    return [train(model, torch.optim.SGD(model.parameters(), 0.1)), dict(model.named_buffers())]


class Carries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 16), nn.Linear(16, 4)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.cell(x, self.hidden)
        return self.head(self.hidden)


def hidden_state_carried_in_an_attribute(make: Make) -> Any:
    """Truncated backpropagation through time."""
    torch.manual_seed(1)
    model = make(Carries())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for number in range(4):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        model.hidden = model.hidden.detach() if number != 1 else None
    return [losses, state(model)]


def hidden_state_passed_and_returned(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(nn.GRU(6, 16, batch_first=True))
    hidden, found = torch.zeros(1, 4, 16), []
    for number in range(2):
        x = batch(number, 12)[0].view(4, 3, 6)
        out, hidden = model(x, hidden)
        out.square().mean().backward()
        hidden = hidden.detach()
        found.append(out)
    return [found, gradients(model)]


class MovingTarget(nn.Module):
    """An exponential average of its own weights in buffers, updated in training."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(6, 16)
        self.register_buffer("target", self.online.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.target.mul_(0.9).add_(self.online.weight, alpha=0.1)
        return (self.online(x) - F.linear(x, self.target)).square().mean() + self.online(x).square().mean()


def moving_target_in_buffers(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(MovingTarget())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for number in range(3):
        optimizer.zero_grad()
        loss = model(batch(number)[0])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, state(model)]


def buffer_assigned(make: Make) -> Any:
    torch.manual_seed(1)
    model = MovingTarget()
    make(model)
    first = model(batch()[0])
    model.target = torch.zeros(16, 6)
    second = model(batch()[0])
    model.target.fill_(1.0)
    return [first, second, model(batch()[0])]
