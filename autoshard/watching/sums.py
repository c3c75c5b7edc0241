"""Whether ranks have the same where they should: a few figures of inputs and replicas, compared behind the step."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoshard.watching.telling import Board
from passes.ir.torch_dtensor import local_of

Numbers = dict[str, float]
"""An optimizer's learning rates, and what else of its groups is a number."""


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
            name = _unlike_number(mine.numbers[number], theirs.numbers[number])
            if name is not None:
                one, other = mine.numbers[number][name], theirs.numbers[number][name]
                return (
                    f"the ranks update differently: {name} of optimizer {number} is {other} on rank {rank}, "
                    f"{one} on rank {first}\n"
                    "  try: the same numbers for the optimizer, and the same steps of its scheduler, on every rank"
                )
    return None


def _unlike_number(mine: Numbers, theirs: Numbers) -> str | None:
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


Kind = Literal["input", "parameter", "buffer"]
Figure = tuple[Kind, str, str, float]
"""What a tensor is, its name, which part of the global tensor it is ("" for all of it), and the tolerance."""


@dataclass(frozen=True)
class Sum:
    """kind, name, part: of a tensor. weighted, absolute: sums of sampled values."""

    kind: Kind
    name: str
    part: str
    tolerance: float
    weighted: tuple[float, ...]
    absolute: float


class Pace:
    """Which calls are compared, of all kinds: 1, 2, 4, ... 32, then every 32 or, if they are quick, every 64, 128, ...:
    what takes up to `PAUSE_SECONDS`.

    Each rank chooses by its own clock, and what all have chosen is compared.
    """

    OFTEN, PAUSE_SECONDS = 32, 5.0

    def __init__(self) -> None:
        self.calls = 0
        self._every = self.OFTEN
        self._last = 0, time.monotonic()

    def due(self) -> bool:
        """Whether the next call is compared."""
        self.calls += 1
        (number, then), now = self._last, time.monotonic()
        if self.calls < self.OFTEN:
            return self.calls & (self.calls - 1) == 0
        if now - then > self.PAUSE_SECONDS:
            self._every = self.OFTEN
        if self.calls % self._every:
            return False
        seconds = (now - then) / (self.calls - number)
        self._every = self.OFTEN
        while 2 * self._every * seconds <= self.PAUSE_SECONDS and self._every < 2**16:
            self._every *= 2
        self._last = self.calls, now
        return True


def difference(ranks: Mapping[int, Sequence[Sum]]) -> str | None:
    """How sums of the same part of the same tensor differ, beyond rounding, as an error's text; None if they do not."""
    seen: dict[tuple[str, str, str], tuple[int, Sum]] = {}
    for rank, sums in ranks.items():
        for mine in sums:
            other, theirs = seen.setdefault((mine.kind, mine.name, mine.part), (rank, mine))
            bound = mine.tolerance * (mine.absolute + theirs.absolute) + 1e-300
            if any(abs(a - b) > bound for a, b in zip(mine.weighted, theirs.weighted, strict=True)):
                return _text(mine, rank, other)
    return None


def _text(sum_: Sum, rank: int, other: int) -> str:
    which = f"{sum_.kind} {sum_.name}"
    if sum_.part:
        which = f"the part {sum_.part} of {which}"
    if sum_.kind != "input":
        return (
            f"{which} is not the same on rank {rank} as on rank {other}, which have replicas of it\n"
            "  try: on every rank the same gradients, clipping, zero_grad() and changes by hand, with the same seed"
        )
    what = (
        "ranks along axes that do not split it must pass the same"
        if sum_.part
        else "without `in_placements` or batch='per_rank' every rank passes the same global input, and "
        "with them ranks along an axis of stages do"
    )
    return (
        f"{which} is not the same on rank {rank} as on rank {other}: {what}\n"
        "  try: autoshard(..., batch='per_rank') where each rank passes its own part, as from a DistributedSampler; "
        "autoshard.data_loader(dataset, mesh, placements, ...) and in_placements=placements for parts of other dims; "
        "or the same seed on every rank"
    )


@dataclass(frozen=True)
class _Noted:
    """values: [figure, 5] on the CPU, when `ready` says so."""

    turn: int
    figures: Sequence[Figure]
    values: Tensor
    ready: Any
    updated: Updated


class Sums:
    """This rank's sums of the last turns. The main thread notes them, the watch sends and compares."""

    KEPT = 64

    def __init__(self, board: Board) -> None:
        self.pace = Pace()
        self._board = board
        self._new: deque[_Noted] = deque(maxlen=self.KEPT)
        self._sent: deque[int] = deque()

    def note(self, turn: int, figures: Sequence[Figure], values: Tensor, updated: Updated) -> None:
        """values: `Sampler.sums` of the tensors as they are in that turn. Fetched from a GPU when they are there."""
        ready = None
        if values.device.type != "cpu":
            ready = torch.Event(values.device.type)
            values = values.to("cpu", non_blocking=True)
            ready.record()
        self._new.append(_Noted(turn, figures, values, ready, updated))

    def send(self) -> None:
        """Tell the others the sums that are there by now."""
        while self._new and (self._new[0].ready is None or self._new[0].ready.query()):
            new = self._new.popleft()
            self._board.write(f"sums/{new.turn}", (as_sums(new.figures, new.values), new.updated))
            self._sent.append(new.turn)
        while len(self._sent) > self.KEPT:
            self._board.erase(f"sums/{self._sent.popleft()}")

    def compare(self) -> str | None:
        """The first difference between the ranks, of the turns for which all have told."""
        for turn in [t for t in self._sent if self._board.complete(f"sums/{t}")]:
            told = self._board.read(f"sums/{turn}", range(self._board.world))
            found = unlike({rank: updated for rank, (_, updated) in told.items()}) or difference(
                {rank: sums for rank, (sums, _) in told.items()}
            )
            if found is not None:
                return f"in turn {turn}, {found}"
            # Ranks tell in order: an earlier turn that is not complete was not chosen by all.
            while self._sent and self._sent[0] <= turn:
                self._board.erase(f"sums/{self._sent.popleft()}")
        return None


def as_sums(figures: Sequence[Figure], values: Tensor) -> list[Sum]:
    rows: list[list[float]] = values.tolist()
    return [Sum(*figure, tuple(row[:-1]), row[-1]) for figure, row in zip(figures, rows, strict=True)]
