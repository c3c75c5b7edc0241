"""What scripts change in a model after they made it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.parts import Net, batch, net, state, step, train
from tests.scripts.script import Make


def frozen_layers(make: Make) -> Any:
    model = net()
    model.up.requires_grad_(False)
    make(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return train(model, torch.optim.AdamW(trained, 0.01))


def unfreezing_later(make: Make) -> Any:
    model = make(net())
    model.up.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    first = train(model, optimizer, steps=2)
    model.up.requires_grad_(True)
    optimizer.add_param_group({"params": model.up.parameters(), "lr": 0.01})
    return [first, train(model, optimizer, steps=2)]


def layers_in_eval_mode(make: Make) -> Any:
    """A frozen backbone whose batch norm keeps its statistics."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    make(model).train()
    model[1].eval()
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


class Tempered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.weights = 1.0, {"a": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature * self.weights["a"]


def attributes_changed(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Tempered())
    x, _ = batch()
    found = [model(x)]
    model.temperature = 4.0
    found.append(model(x))
    model.weights["a"] = 0.5
    found.append(model(x))
    model.temperature = 1.0
    return [*found, model(x)]


def dropout_rate_changed(make: Make) -> Any:
    model = make(net())
    x, _ = batch()
    first = model(x)
    model.drop.p = 1.0
    second = model(x)
    model.eval()
    return [first, second, model(x)]


def dropout_under_a_seed(make: Make) -> Any:
    """The same seed repeats a run; another gives another. The numbers are not those of one process."""
    found: list[Tensor] = []
    for seed in (3, 3, 4):
        model = net()
        model.drop.p = 0.5
        make(model)
        torch.manual_seed(seed)
        found.append(torch.stack([model(batch()[0]).detach() for _ in range(2)]))
    again, other, twice = (found[0] - found[1]), (found[0] - found[2]), (found[0][0] - found[0][1])
    return [bool(again.abs().max() == 0), bool(other.abs().max() > 0), bool(twice.abs().max() > 0)]


def layer_replaced(make: Make) -> Any:
    """A new head for another task after some training."""
    model = make(net())
    first = train(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)
    torch.manual_seed(7)
    model.down = nn.Linear(16, 4)
    return [first, train(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)]


def layer_appended(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
    first = train(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)
    model.append(nn.Linear(4, 4))
    second = model(batch()[0])
    return [first, second, train(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 16), nn.Linear(16, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def tied_weights(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Tied())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    tokens = torch.arange(24).view(4, 6) % 12
    losses: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, model.head.weight is model.embed.weight, len(list(model.parameters())), state(model)]


def parameters_edited_without_gradient(make: Make) -> Any:
    model = make(net())
    train(model, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5).add_(0.01)
        model.up.weight.clamp_(-0.1, 0.1)
        model.up.bias.copy_(torch.arange(16.0))
        model.down.bias.data.zero_()
    return [model(batch()[0]), state(model)]


def part_of_a_parameter_assigned(make: Make) -> Any:
    model = make(net())
    model(batch()[0])
    with torch.no_grad():
        model.down.weight[0] = 0.0
    return state(model)


def weights_initialized_after_autoshard(make: Make) -> Any:
    """Before the first call: the parameters are plain yet."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    model = make(net())
    torch.manual_seed(5)
    model.apply(init)
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


def weights_set_after_the_first_call(make: Make) -> Any:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)
            nn.init.zeros_(module.bias)

    model = make(net())
    model(batch()[0])
    model.apply(init)
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


def parameter_replaced(make: Make) -> Any:
    model = make(net())
    first = step(model, torch.optim.SGD(model.parameters(), 0.1), *batch())
    model.down.bias = nn.Parameter(torch.ones(4))
    return [first, train(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)]
