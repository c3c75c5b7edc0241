"""Which optimizer a plan counts: by name, or as one of torch's is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cost_model.checked_arguments import reject
from cost_model.memory import OPTIMIZERS

__all__ = ["OptimizerLike", "optimizer_name"]

OptimizerLike = str | torch.optim.Optimizer


def optimizer_name(optimizer: object) -> str:
    """Its name among `OPTIMIZERS`. An optimizer of torch's that is none of them counts as AdamW, which keeps and moves
    more than most, and a centred RMSprop with momentum, of three states, as AMSGrad; with groups that differ, as the
    one that keeps most. ShardingError for anything else."""
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise reject(
            "optimizer", optimizer, f"one of {', '.join(map(repr, OPTIMIZERS))}, or an optimizer of torch's"
        )
    if isinstance(optimizer, torch.optim.SGD):
        moved = any(group["momentum"] for group in optimizer.param_groups)
        return "momentum" if moved else "sgd"
    name = "adam" if type(optimizer) is torch.optim.Adam else "adamw"
    return f"{name}, amsgrad" if any(map(_of_three_states, optimizer.param_groups)) else name


def _of_three_states(group: Mapping[str, Any]) -> bool:
    return bool(group.get("amsgrad") or (group.get("centered") and group.get("momentum")))
