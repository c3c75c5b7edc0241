"""torch.optim's updates of one element at a time, run on shards: the same values, for what plain tensors cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from importlib import import_module
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from passes.ir.torch_dtensor import dtensor_from, local_of, sharding_of

__all__ = ["ELEMENTWISE", "update_shards"]

ELEMENTWISE = (
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
)
"""Modules of torch.optim, each with a public function of its name that updates parameters, every element by itself.
Not among them: what needs a norm or a product of whole parameters (Adafactor, LBFGS, Muon)."""


def update_shards() -> None:
    """From now on, in this process: the updates of `ELEMENTWISE` run on the shards of DTensors.

    An optimizer, its state (DTensors where the parameter is one), hooks, closures and schedulers stay as they are:
    only what it calls to compute changes. torch takes every op of an update through DTensor's dispatch, which
    costs more than the update of a small model.
    """
    for name in ELEMENTWISE:
        module = import_module(f"torch.optim.{name}")
        function = getattr(module, name)
        if not hasattr(function, "whole"):
            setattr(module, name, _on_shards(function))


def _on_shards(function: Callable[..., None]) -> Callable[..., None]:
    """function: (lists of tensors, parallel to the parameters, which come first; options by name)."""

    @wraps(function)
    def update(*lists: Any, **options: Any) -> None:
        if torch.compiler.is_compiling() or not _divides(lists, options):
            return function(*lists, **options)
        shards = [[local_of(v) if isinstance(v, DTensor) else v for v in values] for values in lists]
        given = [list(values) for values in shards]
        function(*shards, **options)
        for values, before, after in zip(lists, given, shards, strict=True):
            if not all(map(is_, before, after)):
                _take_new(values, before, after, lists[0])
        # As an op on the DTensor would: what autograd saved of it is stale.
        increment_version([p for p in lists[0] if isinstance(p, DTensor)])
        return None

    update.whole = function  # type: ignore[attr-defined]
    return update


def _divides(lists: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether some parameter is a DTensor, and all that belongs to each is cut as it is."""
    if not lists or not all(isinstance(values, list) for values in lists):
        return False
    parameters = lists[0]
    if not any(isinstance(p, DTensor) for p in parameters):
        return False
    if options.get("differentiable") or any(isinstance(value, DTensor) for value in options.values()):
        return False
    shardings = [sharding_of(p) if isinstance(p, DTensor) else None for p in parameters]
    # An empty list is of a variant that is off.
    lengths = {len(values) for values in lists if values}
    return lengths == {len(parameters)} and all(all(map(_cut_alike, shardings, values)) for values in lists)


def _cut_alike(ours: Any, value: Tensor | None) -> bool:
    """Whether the shard of `value` belongs to that of a parameter with the sharding `ours`, None if it is plain.
    A step count is the same everywhere."""
    if not isinstance(value, DTensor):
        return ours is None or value is None or value.ndim == 0
    theirs = sharding_of(value)
    if ours is theirs:
        return True
    if ours is None or ours.mesh != theirs.mesh:
        return False
    if ours.shape == theirs.shape:
        return ours.placements == theirs.placements
    return theirs.ndim == 0 and all(p.is_replicate() for p in theirs.placements)


def _take_new(
    values: list[Tensor | None],
    before: Iterable[Tensor | None],
    after: Iterable[Tensor | None],
    parameters: Sequence[Tensor],
) -> None:
    """State that the update made (a first momentum) belongs in the caller's list, as a DTensor."""
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        if new is not old:
            sharding = sharding_of(parameters[place])
            whole = new is None or sharding is None
            values[place] = new if whole else dtensor_from(new, sharding)  # type: ignore[arg-type]
