"""Hooks of modules, tensors and parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.scripts.parts import Net, batch, gradients, net, state
from tests.scripts.script import Make, refused


def forward_hook(make: Make) -> Any:
    """Activations kept by a hook, before the first call and after it."""
    model = make(net())
    seen: dict[str, Any] = {}
    handle = model.up.register_forward_hook(lambda m, args, out: seen.__setitem__("up", out.detach()))
    first = [model(batch(0)[0]), seen["up"].clone()]
    handle.remove()
    other = model.down.register_forward_hook(lambda m, args, out: out * 2)
    second = [model(batch(1)[0]), seen["up"].clone()]
    other.remove()
    return [first, second, model(batch(1)[0])]


def forward_pre_hook(make: Make) -> Any:
    model = make(net())
    first = model(batch()[0])
    handle = model.down.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    second = model(batch()[0])
    handle.remove()
    return [first, second, model(batch()[0])]


def hooks_of_the_whole_model(make: Make) -> Any:
    model = make(net())
    shapes: list[Any] = []
    model.register_forward_hook(lambda m, args, out: shapes.append(tuple(out.shape)))
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    return [model(batch()[0]), model(batch()[0]), shapes]


def full_backward_hook(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    model.down.register_full_backward_hook(lambda m, into, out: (into[0] * 2,))
    F.mse_loss(model(x), y).backward()
    return gradients(model)


@refused("a hook leaves something in a hook of down during the backward")
def backward_hook_that_records(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    seen: list[Tensor] = []
    model.down.register_full_backward_hook(lambda m, into, out: seen.append(out[0].detach()))
    for _ in range(2):
        F.mse_loss(model(x), y).backward()
    return [seen, gradients(model)]


class Hooked(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        return self.down(h)


def tensor_hook_in_the_forward(make: Make) -> Any:
    torch.manual_seed(1)
    model = make(Hooked())
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    return gradients(model)


class Retained(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.up(x))
        self.hidden.retain_grad()
        return self.down(self.hidden)


@refused("appears to not have been used in the graph")
def gradient_of_an_activation(make: Make) -> Any:
    """Grad-CAM: an activation kept in an attribute, with `retain_grad`."""
    torch.manual_seed(1)
    model = make(Retained())
    x, y = batch()
    out = model(x)
    (wanted,) = torch.autograd.grad(F.mse_loss(out, y), [model.hidden], retain_graph=True)
    return [model.hidden, wanted]


def parameter_hooks(make: Make) -> Any:
    model = net()
    early = model.up.weight.register_hook(lambda gradient: gradient * 2)
    make(model)
    found: list[Any] = []
    x, y = batch()
    for _ in range(2):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        found.append({n: g.clone() for n, g in gradients(model).items()})
        early.remove()
    model.down.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    return [found, gradients(model)]


def optimizer_in_the_backward(make: Make) -> Any:
    """One optimizer a parameter, stepped by `register_post_accumulate_grad_hook`."""
    model = make(net(), batch()[:1])
    steppers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        steppers[p].step()
        steppers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for number in range(2):
        x, y = batch(number)
        F.mse_loss(model(x), y).backward()
    return state(model)
