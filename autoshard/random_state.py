"""`random_state`: the stream of seeds of a parallel model, to be saved with it."""

from __future__ import annotations

from torch import nn

from autoshard.runtime.executable import SeedStream
from autoshard.runtime.session import Session
from cost_model.errors import ShardingError


def random_state(model: nn.Module) -> SeedStream:
    """What dropout and other random ops of a parallel model draw next: `state_dict()`, `load_state_dict(state)`.

    The same on every rank: each loads the same state, before the first call or after it.
    Raises ShardingError for a model that `autoshard` did not make parallel.
    """
    session = Session.of(model) if isinstance(model, nn.Module) else None
    if session is None:
        raise ShardingError(
            "model is not parallel, and its random numbers are torch's own\n"
            "  try: model = autoshard(model, mesh) before, or torch.get_rng_state()"
        )
    return session.seeds
