"""Optimizers, schedules, clipping, accumulation, averages."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.scripts.parts import batch, net, state, step, train
from tests.scripts.script import Make


def sgd_momentum(make: Make) -> Any:
    model = make(net())
    return train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True))


def adam(make: Make) -> Any:
    model = make(net())
    return train(model, torch.optim.Adam(model.parameters(), 0.01, amsgrad=True))


def adamw_fused(make: Make) -> Any:
    model = make(net(), batch()[:1])
    return train(model, torch.optim.AdamW(model.parameters(), 0.01, fused=True))


def adamw_foreach(make: Make) -> Any:
    model = make(net(), batch()[:1])
    return train(model, torch.optim.AdamW(model.parameters(), 0.01, foreach=True))


def adagrad(make: Make) -> Any:
    model = make(net())
    return train(model, torch.optim.Adagrad(model.parameters(), 0.1))


def rmsprop(make: Make) -> Any:
    model = make(net())
    return train(model, torch.optim.RMSprop(model.parameters(), 0.01, momentum=0.5, centered=True))


def adafactor(make: Make) -> Any:
    model = make(net(), batch()[:1])
    return train(model, torch.optim.Adafactor(model.parameters(), 0.01))


def nadam_radam_adadelta(make: Make) -> Any:
    found: list[Any] = []
    for kind in (
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
    ):
        model = make(net())
        found.append(train(model, kind(model.parameters(), lr=0.01), steps=2))
    return found


def lbfgs_with_closure(make: Make) -> Any:
    model = make(net(torch.float64))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, y = batch(dtype=torch.float64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(3)]


def parameter_groups(make: Make) -> Any:
    model = make(net())
    groups = [{"params": model.up.parameters(), "lr": 0.05}, {"params": model.down.parameters()}]
    return train(model, torch.optim.SGD(groups, 0.1))


def weight_decay_split_by_name(make: Make) -> Any:
    model = make(net())
    decay = [p for n, p in model.named_parameters() if p.ndim > 1 and "norm" not in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim > 1 and "norm" not in n)]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return [len(decay), len(rest), train(model, torch.optim.AdamW(groups, 0.01))]


def schedulers(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2])
    return [train(model, optimizer, steps=5, after=both.step), both.get_last_lr()]


def reduce_on_plateau(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    x, y = batch()
    rates: list[float] = []
    for _ in range(3):
        plateau.step(step(model, optimizer, x, y))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def optimizer_made_before_autoshard(make: Make) -> Any:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return train(make(model), optimizer)


def optimizer_made_after_first_call(make: Make) -> Any:
    model = make(net())
    model(batch()[0])
    return train(model, torch.optim.Adam(model.parameters(), 0.01))


def optimizer_swapped(make: Make) -> Any:
    model = make(net())
    first = train(model, torch.optim.Adam(model.parameters(), 0.01), steps=2)
    return [first, train(model, torch.optim.SGD(model.parameters(), 0.1), steps=2)]


def gradient_accumulation(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for number in range(4):
        x, y = batch(number)
        loss = F.mse_loss(model(x), y) / 2
        loss.backward()
        losses.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return [losses, state(model)]


def zero_grad_to_none_and_to_zeros(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    found: list[Any] = []
    for to_none in (True, False):
        F.mse_loss(model(x), y).backward()
        model.zero_grad(set_to_none=to_none)
        found.append([None if p.grad is None else p.grad for p in model.parameters()])
    return found


def clipping_by_norm(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms: list[Any] = []
    for number in range(3):
        x, y = batch(number)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return [norms, state(model)]


def clipping_by_value(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(2):
        x, y = batch(number)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return state(model)


def gradient_norm_by_hand(make: Make) -> Any:
    model = make(net())
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    total = sum(float(p.grad.norm()) ** 2 for p in model.parameters()) ** 0.5
    return [total, {n: float(p.grad.abs().max()) for n, p in model.named_parameters()}]


def averaged_weights(make: Make) -> Any:
    model = make(net())
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    train(model, torch.optim.SGD(model.parameters(), 0.1), after=lambda: ema.update_parameters(model))
    with torch.no_grad():
        return [ema(batch()[0]), state(ema.module)]


def averages_by_hand(make: Make) -> Any:
    model = make(net(), batch()[:1])
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update() -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow[name].mul_(0.9).add_(p, alpha=0.1)

    train(model, torch.optim.SGD(model.parameters(), 0.1), after=update)
    return shadow


def copied_teacher(make: Make) -> Any:
    """BYOL's moving target: a deep copy that follows by `lerp_`."""
    model = make(net())
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for number in range(3):
        x, _ = batch(number)
        with torch.no_grad():
            wanted = target(x + 0.1)
        losses.append(step(model, optimizer, x, wanted))
        with torch.no_grad():
            for theirs, ours in zip(target.parameters(), model.parameters(), strict=True):
                theirs.lerp_(ours, 0.1)
    return [losses, state(target)]


def stochastic_weight_averaging(make: Make) -> Any:
    model = make(net())
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)

    def after() -> None:
        average.update_parameters(model)
        schedule.step()

    train(model, optimizer, after=after)
    torch.optim.swa_utils.update_bn([batch(9)[0]], average)
    return state(average.module)
