"""The stream of seeds of a parallel model: one for each call that draws random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cost_model.errors import ShardingError

__all__ = ["SeedStream"]


class SeedStream:
    """Where the seeds of a model's calls come from; `torch.distributed.checkpoint` saves and loads it as it is.

    A stream starts at the first plan, with rank 0's `torch.initial_seed()`. One that was loaded before goes on where
    it was saved. It is the same on every rank.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._started = False

    def start(self, seed: int) -> None:
        """Begin at `seed`, unless the stream has begun."""
        if not self._started:
            self._generator.manual_seed(seed)
            self._started = True

    def next(self) -> Tensor:
        """The seed of one call's random ops, on the CPU."""
        return torch.randint(0, 2**62, (), generator=self._generator, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """generator: its state, uint8 on the CPU. started: False before the first plan."""
        return {"generator": self._generator.get_state(), "started": self._started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of this model's stream or another's. ShardingError for anything else."""
        generator = torch.Generator()
        try:
            generator.set_state(state["generator"])
            started = bool(state["started"])
        except (TypeError, KeyError, RuntimeError) as error:
            raise ShardingError(
                f"state is no state of a model's random numbers: {type(error).__name__}: {error}\n"
                "  try: what autoshard.random_state(model).state_dict() returned"
            ) from error
        self._generator, self._started = generator, started

    def copied(self) -> SeedStream:
        """A stream of its own that goes on from here."""
        twin = SeedStream()
        twin.load_state_dict(self.state_dict())
        return twin
