"""Whether ranks that should pass the same input do: a few figures of each input, compared behind the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.watching.board import Board

__all__ = ["Figures", "InputSums", "Sum", "as_sums", "difference", "due", "sums_of", "tolerance_of"]

SAMPLED = 4096
OFTEN = 3
LONGEST = 1024
KEPT = 64
SLOPES = (0.6180339887498949, 0.4142135623730951, 0.7320508075688772, 0.2360679774997897)
"""Of the weights. One sum of another batch may be within the tolerance by chance, once in a hundred; all are not."""
TOLERANCE = {torch.float16: 2e-4, torch.bfloat16: 2e-4}
"""How far apart rounding may be, as a part of the absolute sum, in which it cancels; 1e-5 for other floats, exact for
integers. Two batches of random values are about 1 / sqrt(SAMPLED) apart."""

Figures = tuple[tuple[str, str, float], ...]
"""Per tensor: its name, which part of the global tensor it is ("" for all of it), and the tolerance."""


@dataclass(frozen=True)
class Sum:
    """name: of the input. part: which part of it. weighted, absolute: sums of sampled values."""

    name: str
    part: str
    tolerance: float
    weighted: tuple[float, ...]
    absolute: float


def due(count: int) -> bool:
    """Whether the count-th call of a kind (from 1) is compared: the first three, then at growing intervals."""
    return count <= OFTEN or count % LONGEST == 0 or (count < LONGEST and count & (count - 1) == 0)


def sums_of(tensors: Sequence[Tensor]) -> Tensor:
    """[tensor, 5] on the tensors' device, without waiting for it: weighted sums of sampled values, and the absolute."""
    rows = [_sums(tensor.detach()) for tensor in tensors]
    device = next((row.device for row in rows if row.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([row.to(device, non_blocking=True) for row in rows])


def tolerance_of(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, 1e-5) if dtype.is_floating_point or dtype.is_complex else 1e-12


def _sums(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    count = tensor.numel()
    if count == 0:
        return torch.zeros(len(SLOPES) + 1, dtype=torch.float64, device=tensor.device)
    # The same positions and weights on every rank, spread over the tensor without a period.
    steps = torch.arange(min(count, SAMPLED), device=tensor.device)
    positions = steps if count <= SAMPLED else (steps * 2654435761 + 97) % count
    values = torch.take(tensor, positions).double().nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
    places = steps.double() + 1.0
    # One by one: a tensor of the slopes would be copied to a GPU, for which its host waits.
    weights = torch.stack([torch.frac(places * slope) for slope in SLOPES]) + 0.5
    return torch.cat([(values * weights).sum(1), values.abs().sum()[None]])


def difference(ranks: Mapping[int, Sequence[Sum]]) -> str | None:
    """How the ranks' inputs differ where they should be the same, as an error's text; None if they do not.

    Different are: the sums of the same part of the same input, beyond rounding.
    """
    seen: dict[tuple[str, str], tuple[int, Sum]] = {}
    for rank, sums in ranks.items():
        for mine in sums:
            other, theirs = seen.setdefault((mine.name, mine.part), (rank, mine))
            bound = mine.tolerance * (mine.absolute + theirs.absolute) + 1e-300
            if any(abs(a - b) > bound for a, b in zip(mine.weighted, theirs.weighted, strict=True)):
                return _text(mine, rank, other)
    return None


def _text(sum_: Sum, rank: int, other: int) -> str:
    which = f"the part {sum_.part} of input {sum_.name}" if sum_.part else f"input {sum_.name}"
    what = (
        "ranks along axes that do not split it must pass the same"
        if sum_.part
        else "without `in_placements` every rank passes the same global input"
    )
    return (
        f"{which} is not the same on rank {rank} as on rank {other}: {what}\n"
        "  try: autoshard.data_loader(dataset, mesh, placements, ...) and autoshard(..., in_placements=placements), so "
        "that each rank passes its part of the batch (instead of a DistributedSampler); or the same seed on every rank"
    )


class InputSums:
    """The sums of this rank that wait to be compared. The main thread notes them, the watch sends and compares."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._new: deque[tuple[int, Figures, Tensor, Any]] = deque(maxlen=KEPT)
        self._sent: deque[int] = deque()

    def note(self, turn: int, figures: Figures, values: Tensor) -> None:
        """values: `sums_of` the inputs of that turn. On a GPU they are fetched when they are there."""
        ready = None
        if values.device.type != "cpu":
            ready = torch.Event(values.device.type)
            values = values.to("cpu", non_blocking=True)
            ready.record()
        self._new.append((turn, figures, values, ready))

    def send(self) -> None:
        """Tell the others the sums that are there by now."""
        while self._new and (self._new[0][3] is None or self._new[0][3].query()):
            turn, figures, values, _ = self._new.popleft()
            self._board.write(f"sums/{turn}", as_sums(figures, values))
            self._sent.append(turn)
        while len(self._sent) > KEPT:
            self._board.erase(f"sums/{self._sent.popleft()}")

    def compare(self) -> str | None:
        """The first difference between the ranks, of the turns for which all have told."""
        for turn in [t for t in self._sent if self._board.complete(f"sums/{t}")]:
            found = difference(self._board.read(f"sums/{turn}", range(self._board.world)))
            if found is not None:
                return f"in turn {turn}, {found}"
            self._sent.remove(turn)
            self._board.erase(f"sums/{turn}")
        return None


def as_sums(figures: Figures, values: Tensor) -> list[Sum]:
    rows: list[list[float]] = values.tolist()
    return [Sum(*figure, tuple(row[:-1]), row[-1]) for figure, row in zip(figures, rows, strict=True)]
