"""The families of docs/patterns.md as pins: a layout for every parameter, the rest is left to the search.

Sequence parallelism has the pins of tensor parallelism: what lies between the products is the search's to split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.rivals.cases import Network
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout

__all__ = ["families"]

Axes = tuple[str, ...]
Shapes = Mapping[str, Sequence[int]]
Pins = dict[str, Layout]


def families(network: Network, shapes: Shapes, mesh: MeshSpec) -> dict[str, Pins]:
    """Name -> a layout per parameter. shapes: of the parameters, by name."""

    def pinned(rows: Axes, columns: Axes = (), dims: Mapping[str, int] | None = None) -> Pins:
        return {n: _layout(n, tuple(shape), mesh, rows, columns, dims or {}) for n, shape in shapes.items()}

    every = mesh.names
    found = {"replicated": pinned(()), f"ZeRO over {_text(every)}": pinned(every)}
    splits = {"tensor": network.tensor, "tensor and vocabulary": {**network.tensor, **network.vocabulary}}
    if not network.vocabulary:
        del splits["tensor and vocabulary"]
    for name, dims in splits.items():
        if network.tensor:
            found[f"{name} over {_text(every)}"] = pinned((), every, dims)
    if len(every) > 1:
        outer, inner = every[:-1], every[-1:]
        found |= {
            f"ZeRO over {_text(axes)}, replicated over the others": pinned(axes) for axes in (outer, inner)
        }
        for name, dims in splits.items():
            if network.tensor:
                text = f"{name} over {_text(inner)}"
                found[f"{text}, replicated over {_text(outer)}"] = pinned((), inner, dims)
                found[f"{text}, ZeRO over {_text(outer)}"] = pinned(outer, inner, dims)
    return found


def _layout(
    name: str, shape: tuple[int, ...], mesh: MeshSpec, zero: Axes, tensor: Axes, dims: Mapping[str, int]
) -> Layout:
    """zero: axes of data parallelism that keep a part each; tensor: axes that split the dim which `dims` names."""
    split = next((dim for end, dim in dims.items() if name.endswith(end)), None)
    axes: list[Axes] = [()] * len(shape)
    if split is not None:
        axes[split] = tensor
    # Of dim 0, as FSDP does, inside of what tensor parallelism has of it; of another where that is too short.
    for dim in range(len(shape)):
        if shape[dim] >= mesh.size(*axes[dim], *zero):
            axes[dim] = (*axes[dim], *zero)
            break
    return Layout(tuple(axes))


def _text(axes: Axes) -> str:
    return " x ".join(axes)
