"""`autoshard::use`: the identity, standing for all readers of a value in one phase.

A value that several nodes read is redistributed once and then used many times. With one `use`
between the value and its readers of a phase, the search prices that redistribution once. Lowering
drops the node; it is never run in a compiled graph.
"""

from __future__ import annotations

import torch

__all__: list[str] = []


def _use(x: torch.Tensor) -> torch.Tensor:
    return x.clone()  # a custom op may not return its operand


torch.library.define("autoshard::use", "(Tensor x) -> Tensor")
torch.library.impl("autoshard::use", "CompositeExplicitAutograd", _use)
torch.library.register_fake("autoshard::use", torch.empty_like)
