"""`autoshard::either`: stands for a value that the backward reads either as the forward kept it or as it computed it
again. In graphs that are searched only; the plan says which.
"""

from __future__ import annotations

import torch

__all__: list[str] = []


def _either(kept: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
    return kept.clone()  # a custom op may not return its operand


torch.library.define("autoshard::either", "(Tensor kept, Tensor again) -> Tensor")
torch.library.impl("autoshard::either", "CompositeExplicitAutograd", _either)
torch.library.register_fake("autoshard::either", lambda kept, again: torch.empty_like(kept))
