"""Deep copies of a parallel model, averages of its weights, saved state dicts, hooks of parameters."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from autoshard.runtime.session import Session
from cost_model.errors import ShardingError
from tests.api.programs import Axes, assert_close, data, full, normed, parallel, trained
from tests.ranks import RankPool

LINE: Axes = (("x", 2),)
Found = dict[str, Any]


def averaged(axes: Axes | None, early: bool) -> Found:
    """An exponential average made before the first call (early) or after it, and evaluated."""
    model = normed()
    if axes is not None:
        parallel(model, axes, None if early else (data()[0],))
    if early:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    else:  # buffers too: the foreach function takes no list of both kinds of tensor
        average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        trained(model, optimizer, 1)
        average.update_parameters(model)
    average.eval()
    with torch.no_grad():
        output = average(data()[0])
    return {"state": full(average.state_dict()), "output": full(output)}


def copied(axes: Axes | None) -> Found:
    """A copy of a trained model is trained on; the original stays where it is, and goes on after."""
    model = normed()
    if axes is not None:
        parallel(model, axes)
    losses = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    twin = copy.deepcopy(model)
    losses += trained(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), 2)
    before = full(model.state_dict())
    losses += trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    if axes is not None:
        mine, other = Session.of(model), Session.of(twin)
        assert mine is not None and other is not None and mine is not other
        assert other.model is twin and twin.autoshard_plan.collectives
        assert any(p.placements[0].is_shard() for p in twin.parameters() if isinstance(p, DTensor))
    return {"losses": losses, "before": before, "twin": full(twin.state_dict())}


def saved(axes: Axes | None) -> Found:
    """A state dict through torch.save and torch.load (weights only), taken back after a change."""
    model = normed()
    if axes is not None:
        parallel(model, axes, (data()[0],))
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    return {"losses": trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)}


def hooked(axes: Axes | None) -> Found:
    """Hooks from before `autoshard`: one that doubles, one that is removed after the first step, one after."""
    model = normed()
    seen: list[tuple[int, ...]] = []
    mask = torch.ones(16, 10).triu()
    removed = model.up.weight.register_hook(lambda g: g * 2)
    model.up.weight.register_hook(lambda g: g * mask)
    model.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.shape)))
    if axes is not None:
        parallel(model, axes)
    gradients: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        x, y = data()
        F.mse_loss(model(x), y).backward()
        gradients.append(full(model.up.weight.grad))
        removed.remove()
    return {"gradients": gradients, "seen": seen}


def called_directly(axes: Axes | None) -> Found:
    """A layer, and a block of two, outside the model's forward; then the model again."""
    model = nn.Sequential(nn.Sequential(nn.Linear(10, 16), nn.ReLU()), nn.Linear(16, 5))
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).sin().view_as(parameter) + n)
    x = data()[0].requires_grad_()
    if axes is not None:
        parallel(model, axes, (x,))
    outputs = [model[0](x), model[1](torch.ones(2, 16))]
    sum(output.square().sum() for output in outputs).backward()
    gradients = [full(p.grad) for p in model.parameters()]
    with pytest.raises(RuntimeError):
        model[0](torch.ones(2, 7))
    outputs += [model(x)]
    assert all(type(output) is Tensor for output in outputs)
    return {"outputs": [full(o) for o in outputs], "gradients": gradients, "x": full(x.grad)}


def everything(rank: int, axes: Axes | None) -> dict[str, Found]:
    return {
        "late": averaged(axes, early=False),
        "early": averaged(axes, early=True),
        "copied": copied(axes),
        "saved": saved(axes),
        "hooked": hooked(axes),
        "directly": called_directly(axes),
    }


def test_as_one_process(ranks: RankPool) -> None:
    wanted = everything(0, None)
    assert_close(wanted["hooked"]["gradients"][0], 2 * wanted["hooked"]["gradients"][1])
    for got in ranks.run(everything, LINE, world=2):
        assert_close(got, wanted)


def pickled(rank: int) -> str:
    model: nn.Module = parallel(normed(), (("x", 1),), (data()[0],))
    with pytest.raises(ShardingError) as raised:
        pickle.dumps(model)
    return str(raised.value)


def test_a_whole_model_is_not_pickled(ranks: RankPool) -> None:
    (text,) = ranks.run(pickled, world=1)
    assert text == (
        "a model that autoshard made parallel cannot be pickled whole: it belongs to a mesh of processes\n"
        "  try: its state_dict(), see docs/checkpoints.md; copy.deepcopy(model) for a copy in this process"
    )
