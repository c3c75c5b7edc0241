"""The profile that `autoshard(model, mesh)` uses when it is given none: cached, else measured at start-up."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.watching.agreement import everyones, from_first
from cost_model.cache_files import cache_folder, keep_file
from cost_model.errors import ProfileError, log
from cost_model.measure.peers import collective_backend, device_name, host_name
from cost_model.measure.sampling import by_device
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from cost_model.profile_record import SCHEMA_VERSION
from passes.ops.attention_op import attention


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v by `autoshard::attention`; q [b,h,s,d], k, v [b,h,t,d]. Differentiable."""
    return attention(q, k, v, None, False, q.shape[-1] ** -0.5)[0]


STARTUP_SECONDS = 4.0
LARGEST_NBYTES = {"cpu": 2**24, "cuda": 2**28}
_TIMEOUT = timedelta(minutes=5)


def nominal_profile(device_type: str) -> Profile:
    """The shipped profile that stands for a device type."""
    return Profile.named("h100" if device_type == "cuda" else "cpu")


def startup_profile(mesh: DeviceMesh) -> Profile:
    """The cached profile of these machines and this mesh shape, else one measured now in a few seconds.

    Every rank of the mesh must call it; rank 0 reads and writes the cache, and all get the same. The
    nominal profile where nothing can be measured: the mesh leaves out some of the processes, which would
    have to help, or its collectives run on neither gloo nor NCCL.
    """
    spec = MeshSpec.of(mesh)
    if not _measurable(mesh, spec):
        return nominal_profile(spec.device_type)
    machines = everyones(mesh, (host_name(), device_name(spec.device_type)), _TIMEOUT)
    path = cache_path(machine_key(machines, spec, collective_backend(mesh)))
    cached = from_first(mesh, lambda: _read(path), _TIMEOUT)
    if cached is not None:
        return cached
    profile = Profile.measure(
        mesh,
        time_budget=STARTUP_SECONDS,
        largest_nbytes=by_device(LARGEST_NBYTES, spec.device_type),
        name=path.stem,
        command="measured at start-up",
        attend=attend,
    )
    if mesh.get_rank() == 0 and keep_file(path, profile.to_json(), "profile: measured, but not cached"):
        log.info("profile: %s, measured at start-up and cached in %s", profile, path)
    return profile


def _measurable(mesh: DeviceMesh, spec: MeshSpec) -> bool:
    whole = dist.is_initialized() and dist.get_world_size() == spec.device_count
    return whole and collective_backend(mesh) in ("gloo", "nccl")


def machine_key(machines: list[tuple[str, str]], spec: MeshSpec, backend: str) -> Mapping[str, object]:
    """All that decides whether two runs may share a profile. machines: by rank, host and device (which
    on CPUs names cores and threads)."""
    return {
        "schema": SCHEMA_VERSION,
        "attention": "of plans",  # before, torch's own was timed
        "overlap": "by processor time where cores are shared",  # before, by the clock
        "collectives": "of a host through memory",  # before, through gloo
        "torch": torch.__version__,
        "backend": backend,
        "device_type": spec.device_type,
        "sizes": list(spec.sizes),
        "machines": [list(machine) for machine in machines],
    }


def cache_path(key: Mapping[str, object], kind: str = "profile") -> Path:
    """The file of a key: nothing else is ever in it."""
    text = json.dumps(key, sort_keys=True)
    return cache_folder() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> Profile | None:
    """The cached profile; None if there is none, or an older version or a crash left something else."""
    if not os.path.exists(path):
        return None
    try:
        profile = Profile.load(path)
    except ProfileError as error:
        log.warning("measuring again: the cached profile cannot be used: %s", error)
        return None
    log.info("profile: %s, cached in %s", profile, path)
    return profile
