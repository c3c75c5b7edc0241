"""Whether ranks update alike: how often optimizers have stepped, and with what numbers in their groups."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from passes.ir.torch_dtensor import local_of

__all__ = ["Updated", "Updates", "unlike"]

Numbers = dict[str, float]
"""Of an optimizer: its learning rates and what else of its groups is a number."""


@dataclass(frozen=True)
class Updated:
    """steps: of all optimizers so far. numbers: of each that is there, by the order of their first steps."""

    steps: int = 0
    numbers: Mapping[int, Numbers] = field(default_factory=dict)


class Updates:
    """Those of this process's optimizers that have parameters of parallel models. A step costs about a microsecond."""

    def __init__(self) -> None:
        self.steps = 0
        self._seen = 0
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def watch(self) -> None:
        """Count from now on. torch's hook stays: one that is removed while the main thread is in a step ends that."""
        mine = weakref.ref(self)

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            updates = mine()
            if updates is not None and _is_parallel(optimizer):
                updates._count(optimizer)

        register_optimizer_step_post_hook(stepped)

    def told(self) -> Updated:
        """As it is now."""
        return Updated(self.steps, {number: _numbers_of(o) for o, number in list(self._numbers.items())})

    def _count(self, optimizer: Optimizer) -> None:
        self.steps += 1
        if optimizer not in self._numbers:
            self._numbers[optimizer] = self._seen
            self._seen += 1


def unlike(ranks: Mapping[int, Updated]) -> str | None:
    """How the ranks' updates differ, as an error's text; None if they do not."""
    (first, mine), *others = ranks.items()
    for rank, theirs in others:
        if theirs.steps != mine.steps:
            return (
                f"the ranks update differently: rank {rank} has made {theirs.steps} steps of optimizers, "
                f"rank {first} {mine.steps}\n"
                "  try: optimizer.step() on every rank or on none, where a step is skipped, too"
            )
        for number in mine.numbers.keys() & theirs.numbers.keys():
            name = _other(mine.numbers[number], theirs.numbers[number])
            if name is not None:
                one, other = mine.numbers[number][name], theirs.numbers[number][name]
                return (
                    f"the ranks update differently: {name} of optimizer {number} is {other} on rank {rank}, "
                    f"{one} on rank {first}\n"
                    "  try: the same numbers for the optimizer, and the same steps of its scheduler, on every rank"
                )
    return None


def _other(mine: Numbers, theirs: Numbers) -> str | None:
    both = (name for name in mine if name in theirs)
    return next((n for n in both if not math.isclose(mine[n], theirs[n], rel_tol=1e-6)), None)


def _is_parallel(optimizer: Optimizer) -> bool:
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"][:1])


def _numbers_of(optimizer: Optimizer) -> Numbers:
    """One on a GPU is left out: reading it would wait for the GPU."""
    found: Numbers = {}
    for place, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            several = isinstance(value, tuple | list) and name != "params"
            for at, one in enumerate(value if several else [value]):
                if isinstance(one, Tensor) and one.numel() == 1 and one.device.type == "cpu":
                    one = local_of(one).item()
                if isinstance(one, int | float):
                    found[f"{name}{f'[{at}]' if several else ''} of group {place}"] = float(one)
    return found
