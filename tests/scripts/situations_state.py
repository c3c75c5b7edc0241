"""Checkpoints, copies, weights from elsewhere."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.utils import _pytree as pytree

import autoshard
from tests.scripts.parts import batch, net, state, step, train
from tests.scripts.script import Make, plain, refused


def resume_from_state_dicts(make: Make) -> Any:
    """`torch.save` of both state dicts into memory, a new model, `load_state_dict`."""
    model = make(net())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    first = train(model, optimizer, steps=2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    again = make(type(model)(), batch()[:1])
    optimizer = torch.optim.Adam(again.parameters(), 0.01)
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return [first, train(again, optimizer, steps=2)]


def resume_from_distributed_checkpoint(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    first, folder = train(model, optimizer, steps=2), make.folder()
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=folder)
    again = make(type(model)(), batch()[:1])
    optimizer = torch.optim.Adam(again.parameters(), 0.01)
    model_state, optimizer_state = get_state_dict(again, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return [first, train(again, optimizer, steps=2)]


def dropout_goes_on_after_resuming(make: Make) -> Any:
    """The numbers are those of the run that was not stopped."""
    model = net()
    model.drop.p = 0.5
    make(model)
    x, _ = batch()
    model(x)
    saved = _random_state(make, model)
    wanted = model(x).detach()
    _load_random_state(make, model, saved)
    return [bool(torch.equal(wanted, model(x).detach())), bool(torch.equal(wanted, model(x).detach()))]


def _random_state(make: Make, model: nn.Module) -> Any:
    return (
        torch.get_rng_state()
        if make.mesh is None
        else copy.deepcopy(autoshard.random_state(model).state_dict())
    )


def _load_random_state(make: Make, model: nn.Module, saved: Any) -> None:
    if make.mesh is None:
        torch.set_rng_state(saved)
    else:
        autoshard.random_state(model).load_state_dict(saved)


def whole_weights_in_one_file(make: Make) -> Any:
    model = make(net())
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    trained = pytree.tree_map(plain, state(model))  # on every rank: whole tensors take all of them
    if not weights:  # rank 0 has them
        return trained
    fresh = net()
    fresh.load_state_dict(weights)
    return state(fresh)


def pretrained_weights_loaded_later(make: Make) -> Any:
    """`load_state_dict` of whole tensors after the first call."""
    model = make(net())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    torch.manual_seed(4)
    pretrained = {name: torch.randn(tuple(value.shape)) for name, value in weights.items()}
    model.load_state_dict(pretrained)
    return [state(model), model(batch()[0])]


def missing_and_unexpected_keys(make: Make) -> Any:
    model = make(net())
    model(batch()[0])
    weights = {"up.weight": torch.ones(16, 6), "other": torch.ones(2)}
    found = model.load_state_dict(weights, strict=False)
    return [sorted(found.missing_keys), found.unexpected_keys, model.up.weight]


def deep_copy(make: Make) -> Any:
    model = make(net())
    train(model, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    best = copy.deepcopy(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    return [
        best(batch()[0]),
        model(batch()[0]),
        train(best, torch.optim.SGD(best.parameters(), 0.1), steps=1),
    ]


def best_weights_kept(make: Make) -> Any:
    model = make(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    best: dict[str, Any] = {}
    for number in range(3):
        loss = step(model, optimizer, *batch(number))
        if not best or loss < best["loss"]:
            best = {"loss": loss, "state": copy.deepcopy(model.state_dict())}
    model.load_state_dict(best["state"])
    return [best["loss"], state(model)]


@refused("a model that autoshard made parallel cannot be pickled whole")
def whole_model_pickled(make: Make) -> Any:
    model = make(net())
    model(batch()[0])
    torch.save(model, io.BytesIO())
