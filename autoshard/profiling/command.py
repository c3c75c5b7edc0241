"""`autoshard profile`: measure the machines that torchrun started it on, or check a profile against them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from autoshard.profiling.attend import attend
from autoshard.profiling.curves import check_drawable, draw_curves
from autoshard.profiling.profile_table import check_table, profile_table
from autoshard.started_mesh import started_mesh
from cost_model.groups import shapes_of
from cost_model.measure.recheck import recheck
from cost_model.measure.sampling import Progress
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile

__all__ = ["ProfileOptions", "check_profile", "measure_profile"]

_MEASURE_SECONDS = 60.0
_CHECK_SECONDS = 15.0


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
            time_budget=_MEASURE_SECONDS if options.budget is None else options.budget,
            name=_name(options),
            command=" ".join(options.argv),
            progress=progress,
            attend=attend,
        )
        _on_first(lambda: _report(profile, mesh, options))
    return 0


def check_profile(profile: Profile, options: ProfileOptions) -> int:
    """Print point by point whether `profile` still holds; status 1 if it does not."""
    with started_mesh(options.mesh, options.device) as mesh, _progress() as progress:
        budget = _CHECK_SECONDS if options.budget is None else options.budget
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


def _name(options: ProfileOptions) -> str:
    return "measured" if options.out is None else options.out.stem


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
