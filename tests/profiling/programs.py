"""What the ranks of these tests run."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from autoshard.cli import main
from autoshard.planning import load_profile
from autoshard.profiling import startup
from cost_model.measure import measure
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile


def started(rank: int, folder: str, seconds: float) -> tuple[Profile, list[str]]:
    """What `autoshard` uses without a profile, and the files of the cache afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setattr(startup, "STARTUP_SECONDS", seconds)
        patch.setattr(startup, "LARGEST_NBYTES", {"cpu": 2**14})
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        profile = load_profile(None, mesh)
        # A mesh without processes is planned with nominal prices.
        assert load_profile(None, MeshSpec({"x": 2})) == Profile.named("cpu")
    return profile, sorted(path.name for path in (Path(folder) / "autoshard").glob("*"))


def command(rank: int, words: tuple[str, ...]) -> tuple[int, str]:
    """Exit status and what is printed of `autoshard profile`, as torchrun would start it."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(measure, "LARGEST_NBYTES", {"cpu": 2**14})
        code = main(["profile", "--device", "cpu", "--budget", "0.1", *words])
    return code, printed.getvalue()
