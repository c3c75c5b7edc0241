"""Parameters go to other layouts between two steps, in place, and with them their gradients and optimizers' states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from autoshard.runtime.optimizers import ELEMENTWISE, live_optimizers
from autoshard.runtime.parameters import Place
from passes.ir.torch_dtensor import take_place_of


@dataclass(frozen=True)
class _Held:
    """A tensor that is cut as its parameter is. what: "parameter", "gradient", or the kind of optimizer and the name of
    its state."""

    name: str
    what: str
    tensor: DTensor


class Holdings:
    """All that is cut as the parameters of a model are, as it is now. The objects stay when they move: whoever holds a
    parameter, a list of them or an optimizer has the moved ones.

    described: the same on all ranks, if all hold the same; None: some optimizer may keep tensors of another kind of
    the parameters' shards, which would not move along."""

    def __init__(self, model: nn.Module) -> None:
        theirs = {id(p): name for name, p in model.named_parameters()}
        self._names: dict[str, list[str]] = {}
        """All names of a parameter, by its first."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(theirs[id(parameter)], []).append(name)
        optimizers = [
            o
            for o in live_optimizers()
            if any(id(p) in theirs for group in getattr(o, "param_groups", ()) for p in group["params"])
        ]
        self._held = [*_of_parameters(model), *_of_optimizers(optimizers, theirs)]
        places = [(one.name, one.what, tuple(map(str, one.tensor.placements))) for one in self._held]
        known = all(type(o).__module__ in _KNOWN for o in optimizers)
        once = len({(name, what) for name, what, _ in places}) == len(places)
        self.described: object = sorted(places) if known and once else None

    @torch.no_grad()
    def move(self, places: Mapping[str, Place]) -> None:
        """To the places of their names. All ranks together, where `described` is the same on all."""
        for one in sorted(self._held, key=lambda one: (one.name, one.what)):
            mesh, now = one.tensor.device_mesh, one.tensor.placements
            named = (places[name].placements for name in self._names[one.name] if name in places)
            wanted = next(named, (Replicate(),) * mesh.ndim)
            if tuple(now) != wanted:
                value: Any = one.tensor.detach()
                take_place_of(one.tensor, value.redistribute(mesh, wanted))


_KNOWN = {f"torch.optim.{name}" for name in ELEMENTWISE}


def _of_parameters(model: nn.Module) -> Iterator[_Held]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield _Held(name, "parameter", parameter)
            if isinstance(parameter.grad, DTensor):
                yield _Held(name, "gradient", parameter.grad)


def _of_optimizers(optimizers: list[torch.optim.Optimizer], names: Mapping[int, str]) -> Iterator[_Held]:
    for optimizer in optimizers:
        for parameter, states in optimizer.state.items():
            for name, value in states.items():
                if id(parameter) in names and _is_alike(value, parameter):
                    yield _Held(names[id(parameter)], f"{type(optimizer).__name__} {name}", value)


def _is_alike(value: object, parameter: Tensor) -> bool:
    if not isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return False
    return value.shape == parameter.shape and value.placements == parameter.placements
