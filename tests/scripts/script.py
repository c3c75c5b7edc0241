"""A situation: an ordinary training script, run by one process and by two ranks that hold a parallel model.

    def momentum(make: Make) -> Any:
        model = make(net())
        return train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))

`make` is the identity in the first run and `autoshard` in the second; what the script returns must be the same.
"""

from __future__ import annotations

import inspect
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.api.programs import device_mesh, parallel

__all__ = [
    "Make",
    "Outcome",
    "Script",
    "alone",
    "plain",
    "refusal_of",
    "refused",
    "scripts_in",
    "stopped",
    "stops",
    "together",
]

AXES = (("x", 2),)


@dataclass
class Make:
    """`make(model)` is the model, parallel if there is a mesh. mesh: None in the run of one process."""

    mesh: DeviceMesh | None = None
    made: list[nn.Module] = field(default_factory=list)

    def __call__(self, model: Any, example_inputs: Any = None, **options: Any) -> Any:
        if self.mesh is None:
            return model
        self.made.append(parallel(model, AXES, example_inputs, **options))
        return model

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_rank()

    @property
    def ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    def folder(self) -> str:
        """A new folder that all ranks share."""
        found = [tempfile.mkdtemp(prefix="scripts-")]
        if self.mesh is not None:
            dist.broadcast_object_list(found, src=0)
        return str(found[0])

    def collectives(self) -> int:
        plans = [getattr(model, "autoshard_plan", None) for model in self.made]
        return sum(len(plan.collectives) for plan in plans if plan is not None)


Script = Callable[[Make], Any]


@dataclass(frozen=True)
class Outcome:
    """value: what the script returned, tensors whole; error: what it raised, and text with the traceback.

    collectives: of the first plans of its models.
    """

    value: Any = None
    error: str = ""
    text: str = ""
    collectives: int = 0


def refused(error: str) -> Callable[[Script], Script]:
    """Marks a script that one process runs and a parallel model refuses, with `error` in what all ranks raise."""

    def mark(script: Script) -> Script:
        script.refusal = error  # type: ignore[attr-defined]
        return script

    return mark


def stopped(error: str) -> Callable[[Script], Script]:
    """Marks a script after which nothing parallel goes on, on any rank: all say `error` and are cut off."""

    def mark(script: Script) -> Script:
        script.stops = True  # type: ignore[attr-defined]
        return refused(error)(script)

    return mark


def stops(script: Script) -> bool:
    return getattr(script, "stops", False)


def refusal_of(script: Script) -> str:
    return getattr(script, "refusal", "")


def scripts_in(module: ModuleType) -> dict[str, Script]:
    """By name, in the module's order."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and _takes_make(value)
    }


def _takes_make(function: Callable[..., Any]) -> bool:
    return list(inspect.signature(function).parameters) == ["make"]


def alone(script: Script) -> Any:
    """What one process gets."""
    return _run(script, Make()).value


def together(rank: int, script: Script) -> Outcome:
    """The outcome of the script on this rank."""
    try:
        return _run(script, Make(device_mesh(AXES)))
    except Exception as error:
        return Outcome(error=_said(error), text=traceback.format_exc())


def _run(script: Script, make: Make) -> Outcome:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and transformers; they are not what is tested
        value = script(make)
    return Outcome(pytree.tree_map(plain, value), collectives=make.collectives())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def plain(value: Any) -> Any:
    """Whole, and free of the graph."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value
