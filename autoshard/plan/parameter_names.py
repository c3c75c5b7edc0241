"""Parameters by all names that they have: tied ones have several."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cost_model.errors import ShardingError
from passes.capture import Captured
from passes.layout.layout import Layout

__all__ = ["by_first_name", "parameter_shapes"]


def parameter_shapes(captured: Captured) -> dict[str, torch.Tensor]:
    """Every parameter name, tied ones included, to a tensor of its shape."""
    joint = captured.joint
    found: dict[str, torch.Tensor] = {}
    for spec, node in zip(joint.inputs, joint.placeholders, strict=True):
        if spec.kind == "param":
            for name in (spec.name, *captured.aliases.get(spec.name, ())):
                found[name] = node.meta["val"]
    return found


def by_first_name(pins: Mapping[str, Layout], captured: Captured) -> dict[str, Layout]:
    """Pins by the name the graph knows; ShardingError if two names of one tied parameter disagree."""
    first = {alias: name for name, aliases in captured.aliases.items() for alias in aliases}
    resolved: dict[str, Layout] = {}
    for name, layout in pins.items():
        known = first.get(name, name)
        if resolved.get(known, layout) != layout:
            raise ShardingError(
                f"{name} and {known} are one tied parameter, pinned in two ways\n  try: pin it by one name"
            )
        resolved[known] = layout
    return resolved
