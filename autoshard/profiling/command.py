"""`autoshard profile`: measure the machines that torchrun started it on, or check a profile against them."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from autoshard.planning import started_mesh
from autoshard.profiling.startup import attend
from cost_model.errors import ProfileError
from cost_model.groups import GroupShape, shape_text, shapes_of
from cost_model.measure.measure import CheckedPoint, recheck
from cost_model.measure.sampling import Progress
from cost_model.measurements import CollectiveSamples, DeviceRates
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from cost_model.readers.points import busbw_factor


def profile_table(profile: Profile, axes: Mapping[GroupShape, Sequence[str]]) -> str:
    """Per collective and group: size, time, algbw = size / time, busbw = algbw times the factor that makes
    it comparable with the links, spread. Then the device's rates.   [nccl-tests doc/PERFORMANCE.md]

    axes: names for the groups that have them.
    """
    return (
        "\n".join([collective_table(profile, axes), *_device(profile.device), "", profile.summary()]) + "\n"
    )


def collective_table(profile: Profile, axes: Mapping[GroupShape, Sequence[str]]) -> str:
    """The part of `profile_table` about collectives."""
    lines = ["                      size        time     algbw     busbw   spread"]
    lines += ["                     bytes          us      GB/s      GB/s        %"]
    for samples in profile.collectives:
        lines += _collective(samples, axes.get(samples.group, ()))
    return "\n".join(lines)


def _collective(samples: CollectiveSamples, axes: Sequence[str]) -> Iterator[str]:
    over = f"{'+'.join(axes)}: " if axes else ""
    yield f"{samples.kind} over {over}{shape_text(samples.group)}"
    factor = busbw_factor(samples.kind, math.prod(ranks for ranks, _ in samples.group))
    for nbytes, seconds, spread in zip(
        samples.nbytes, samples.seconds, _spreads(samples.spread, len(samples.nbytes)), strict=True
    ):
        algbw = nbytes / seconds / 1e9
        yield f"{nbytes:26d}{seconds * 1e6:12.1f}{algbw:10.3f}{algbw * factor:10.3f}{spread:>9}"


def _device(device: DeviceRates) -> Iterator[str]:
    yield ""
    yield "                operations        time             GFLOP/s   spread"
    for rates in device.matmul:
        yield f"{rates.dtype} products"
        for flops, rate, spread in zip(
            rates.flops, rates.flops_per_second, _spreads(rates.spread, len(rates.flops)), strict=True
        ):
            yield f"{flops:26.0f}{flops / rate * 1e6:12.1f}{rate / 1e9:20.2f}{spread:>9}"


def _spreads(spread: Sequence[float], count: int) -> Sequence[str]:
    """Percent for each of `count` sizes; "-" if unknown."""
    return [f"{100 * share:.0f}" for share in spread] or ["-"] * count


def check_table(points: Sequence[CheckedPoint]) -> str:
    """Predicted against measured, point by point."""
    lines = [f"{'':30}{'size':>12}{'predicted':>12}{'measured':>12}{'ratio':>8}{'may be':>9}"]
    lines += [f"{'':42}{'us':>12}{'us':>12}"]
    for point in points:
        lines.append(
            f"{point.name:30}{point.size:12d}{point.predicted * 1e6:12.1f}{point.measured * 1e6:12.1f}"
            f"{point.measured / point.predicted:8.2f}{f'+-{point.tolerance:.0%}':>9}  "
            f"{'ok' if point.holds else 'OFF'}"
        )
    return "\n".join(lines) + "\n"


def check_drawable(path: str | os.PathLike[str]) -> None:
    """Raises ProfileError if `draw_curves` could not draw to this path: before an hour of measuring."""
    if Path(path).suffix not in (".svg", ".png"):
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


def read_outputs(paths: Sequence[Path], base: str, rank_stride: int | None, out: Path | None) -> int:
    """Print what the files say and where each part of the profile comes from; save it if `out` is given."""
    profile = Profile.from_nccl_tests(*paths, base=base, rank_stride=rank_stride)
    print(collective_table(profile, {}), profile.summary(), "sources", sep="\n\n")
    print("\n".join(f"  {source}" for source in profile.sources))
    if out is not None:
        profile.save(out)
        print(f"saved {out}")
    return 0


@dataclass(frozen=True)
class ProfileOptions:
    """mesh: None is one axis over all ranks. budget: seconds, None the command's default.
    out, plot: files that rank 0 writes. argv: what is recorded as the command."""

    mesh: Mapping[str, int] | None
    device: str
    budget: float | None
    out: Path | None
    plot: Path | None
    argv: tuple[str, ...]


def measure_profile(options: ProfileOptions) -> int:
    """Measure, print the table, write the files. Every rank calls this; rank 0 prints and writes."""
    if options.plot is not None:
        check_drawable(options.plot)
    with started_mesh(options.mesh, options.device) as mesh, _progress() as progress:
        profile = Profile.measure(
            mesh,
            time_budget=60.0 if options.budget is None else options.budget,
            name="measured" if options.out is None else options.out.stem,
            command=" ".join(options.argv),
            progress=progress,
            attend=attend,
        )
        _on_first(lambda: _report(profile, mesh, options))
    return 0


def check_profile(profile: Profile, options: ProfileOptions) -> int:
    """Print point by point whether `profile` still holds; status 1 if it does not."""
    with started_mesh(options.mesh, options.device) as mesh, _progress() as progress:
        budget = 15.0 if options.budget is None else options.budget
        points = recheck(profile, mesh, time_budget=budget, progress=progress)
        off = [point for point in points if not point.holds]
        _on_first(lambda: print(check_table(points)))
        _on_first(lambda: print(_verdict(profile, len(points), len(off))))
        # From one rank only: torchrun ends the others at the first failure, before they have printed.
        return int(bool(off) and dist.get_rank() == 0)


def _verdict(profile: Profile, points: int, off: int) -> str:
    if not off:
        return f"{profile} holds: {points} points within their tolerance"
    return (
        f"{profile} does not hold: {off} of {points} points are off\n"
        "  try: on idle machines once more; if it stays so, measure again: autoshard profile --out FILE"
    )


def _report(profile: Profile, mesh: DeviceMesh, options: ProfileOptions) -> None:
    axes = shapes_of(MeshSpec.of(mesh))
    print(profile_table(profile, axes), end="")
    if options.out is not None:
        profile.save(options.out)
        print(f"saved {options.out}")
    if options.plot is not None:
        print(f"drew {draw_curves(profile, options.plot, axes)}")


def _on_first(action: Callable[[], None]) -> None:
    if dist.get_rank() == 0:
        action()


@contextmanager
def _progress() -> Generator[Progress]:
    """A bar on rank 0's standard error, for people: none where it is no terminal, or on other ranks."""
    hidden = dist.get_rank() != 0 or not sys.stderr.isatty()
    with tqdm(
        total=100, disable=hidden, leave=False, bar_format="{percentage:3.0f}% |{bar:30}| {desc}"
    ) as bar:

        def show(what: str, spent: float) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(100 * spent - bar.n)

        yield show


_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 -m autoshard profile --mesh dp=2,tp=2 --out cluster.json --plot cluster.svg
  torchrun --nproc-per-node 4 -m autoshard profile --mesh dp=2,tp=2 --check cluster.json
  autoshard profile                  # one rank: kernels only
  autoshard profile --read all_reduce.txt all_gather.json --base h100 --out cluster.json   # of nccl-tests
  autoshard profile --list           # the shipped profiles
  autoshard profile cluster.json     # print one
"""


def add_profile(commands: Any, parse_mesh: Callable[[str], Mapping[str, int]]) -> None:
    """Add the command to argparse's subparsers."""
    profile = commands.add_parser(
        "profile",
        help="measure the machines it is started on, check a profile against them, or print one",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    profile.add_argument("name", nargs="?", help="print this profile (a path, or a shipped one's name)")
    profile.add_argument("--list", action="store_true", help="print the shipped profiles")
    profile.add_argument("--check", metavar="PROFILE", help="measure a few points of this profile again")
    profile.add_argument(
        "--read", metavar="FILE", nargs="+", type=Path, help="take the collectives from outputs of nccl-tests"
    )
    profile.add_argument("--base", default="h100", help="with --read: the profile that gives all else")
    profile.add_argument("--rank-stride", type=int, help="with --read: distance of the ranks on your mesh")
    profile.add_argument("--mesh", type=parse_mesh, help="axis=size,...; default: one axis of all ranks")
    profile.add_argument("--device", help="device type (default: cuda if there is a GPU, else cpu)")
    profile.add_argument("--budget", type=float, help="seconds to measure (default 60; 15 to check)")
    profile.add_argument("--out", "-o", type=Path, help="where to save the measured profile (JSON)")
    profile.add_argument("--plot", type=Path, help="draw its curves to .svg or .png (needs matplotlib)")
    profile.set_defaults(command=_profile)


def _profile(arguments: argparse.Namespace) -> int:
    if arguments.list or arguments.name is not None:
        names = Profile.names() if arguments.list else [arguments.name]
        print("\n\n".join(Profile.load(name).summary() for name in names))
        return 0
    if arguments.read is not None:
        return read_outputs(arguments.read, arguments.base, arguments.rank_stride, arguments.out)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = ProfileOptions(
        arguments.mesh, device, arguments.budget, arguments.out, arguments.plot, ("autoshard", *sys.argv[1:])
    )
    if arguments.check is not None:
        return check_profile(Profile.load(arguments.check), options)
    return measure_profile(options)
