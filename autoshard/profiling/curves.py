"""The curves of a profile: bus bandwidth by size, one panel per group, one line per collective."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cost_model.errors import ProfileError
from cost_model.groups import GroupShape, shape_text
from cost_model.profile import Profile
from cost_model.readers.points import busbw_factor

__all__ = ["check_drawable", "draw_curves"]

_SUFFIXES = (".svg", ".png")


def check_drawable(path: str | os.PathLike[str]) -> None:
    """Raises ProfileError if `draw_curves` could not draw to this path: before an hour of measuring."""
    suffix = Path(path).suffix
    if suffix not in _SUFFIXES:
        raise ProfileError(f"cannot draw curves to {str(path)!r}\n  try: a name that ends in .svg or .png")
    if find_spec("matplotlib") is None:
        raise ProfileError(
            "drawing curves needs matplotlib, which is not installed\n  try: pip install 'autoshard[plot]'"
        )


def draw_curves(
    profile: Profile, path: str | os.PathLike[str], axes: Mapping[GroupShape, Sequence[str]]
) -> Path:
    """Draw to .svg or .png; products' rates are in the last panel. Raises ProfileError as above."""
    check_drawable(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(samples.group for samples in profile.collectives))
    figure = Figure(figsize=(4.2 * (len(shapes) + 1), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shapes) + 1, squeeze=False)[0]
    for panel, shape in zip(panels, shapes, strict=False):
        _collectives(panel, profile, shape, axes.get(shape, ()))
    _products(panels[-1], profile)
    figure.suptitle(f"{profile.name}: {profile.hardware}", fontsize=8)
    figure.savefig(path)
    return Path(path)


def _collectives(panel: Any, profile: Profile, shape: GroupShape, axes: Sequence[str]) -> None:
    ranks = math.prod(count for count, _ in shape)
    for samples in profile.collectives:
        if samples.group == shape:
            factor = busbw_factor(samples.kind, ranks) / 1e9
            pairs = zip(samples.nbytes, samples.seconds, strict=True)
            _line(panel, samples.nbytes, [factor * nbytes / s for nbytes, s in pairs], samples.kind)
    title = f"{'+'.join(axes) or 'groups'}: {shape_text(shape)}"
    _label(panel, title, "bytes", "bus bandwidth, GB/s")


def _products(panel: Any, profile: Profile) -> None:
    for rates in profile.device.matmul:
        _line(panel, rates.flops, [rate / 1e9 for rate in rates.flops_per_second], rates.dtype)
    _label(panel, "matrix products", "operations", "GFLOP/s")


def _line(panel: Any, x: Sequence[float], y: Sequence[float], label: str) -> None:
    panel.plot(x, y, marker="o", markersize=3, linewidth=1, label=label)


def _label(panel: Any, title: str, x: str, y: str) -> None:
    panel.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize=7)
