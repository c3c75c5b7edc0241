"""The user's pins: patterns of all names that parameters have to layouts, checked before all else happens."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from cost_model.checked_arguments import reject
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.capture import Captured
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout

Constraints = Mapping[str, Sequence[Placement] | Mapping[str, Placement]]
"""Parameter name or shell pattern -> one placement per mesh axis, or {axis name: placement}."""


def resolve_pins(
    constraints: Constraints | None, parameters: Mapping[str, torch.Tensor], mesh: MeshSpec
) -> dict[str, Layout]:
    """Layout by parameter name for every parameter that a pattern of `constraints` matches.

    A tied parameter may be pinned by any of its names; `parameters` maps every name to its tensor.
    Later patterns override earlier ones. Raises ShardingError for a pattern that matches nothing,
    an axis the mesh does not have, a dim that does not exist, or a Partial pin.
    """
    pins: dict[str, Layout] = {}
    if constraints is not None and not isinstance(constraints, Mapping):
        raise reject("constraints", constraints, "{'layers.*.weight': [Shard(0)]}, or None")
    for pattern, placements in (constraints or {}).items():
        if not isinstance(pattern, str):
            raise reject(
                "a name in constraints", pattern, "a parameter's name, or a pattern such as 'layers.*'"
            )
        matched = [name for name in parameters if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise ShardingError(_no_match(pattern, parameters))
        for name in matched:
            pins[name] = _pin(name, pattern, placements, parameters[name], mesh)
    return pins


def _pin(
    name: str,
    pattern: str,
    placements: Sequence[Placement] | Mapping[str, Placement],
    value: torch.Tensor,
    mesh: MeshSpec,
) -> Layout:
    what = f"parameter {name}" + ("" if name == pattern else f" (constraints[{pattern!r}])")
    layout = pinned_layout(placements, tuple(value.shape), mesh, what)
    if layout.partial:
        raise ShardingError(
            f"{what} is pinned Partial; a parameter is split or replicated\n  try: Shard or Replicate()"
        )
    return layout


def pinned_layout(placements: Any, shape: tuple[int, ...], mesh: MeshSpec, what: str) -> Layout:
    """The layout that a pin says of a tensor of this shape, `what` in errors. ShardingError if it says none."""
    ordered = _by_axis(placements, mesh, what) if isinstance(placements, Mapping) else placements
    if not isinstance(ordered, (list, tuple)):
        raise reject(f"the pin of {what}", ordered, "one placement per mesh axis, such as [Shard(0)]")
    return placements_to_layout(ordered, shape, mesh, what=what)


def _by_axis(placements: Mapping[str, Placement], mesh: MeshSpec, what: str) -> list[Placement]:
    from torch.distributed.tensor import Replicate

    for axis in placements:
        if axis not in mesh.names:
            raise ShardingError(
                f"{what} is pinned on mesh axis {axis!r}, which the mesh does not have\n"
                f"  try: one of its axes, {', '.join(map(repr, mesh.names))}"
            )
    return [placements.get(axis, Replicate()) for axis in mesh.names]


def _no_match(pattern: str, parameters: Mapping[str, torch.Tensor]) -> str:
    import difflib

    close = difflib.get_close_matches(pattern, list(parameters), n=3, cutoff=0.3) or list(parameters)[:3]
    return (
        f"constraints[{pattern!r}] matches no parameter of the model\n"
        f"  close names: {', '.join(close)}\n"
        "  try: a name from model.named_parameters(), or a pattern such as 'layers.*.weight'"
    )


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
