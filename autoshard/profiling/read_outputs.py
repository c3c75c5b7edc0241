"""`autoshard profile --read`: a profile from the outputs of other benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoshard.profiling.profile_table import collective_table
from cost_model.profile import Profile

__all__ = ["read_outputs"]


def read_outputs(paths: Sequence[Path], base: str, rank_stride: int | None, out: Path | None) -> int:
    """Print what the files say and where each part of the profile comes from; save it if `out` is given."""
    profile = Profile.from_nccl_tests(*paths, base=base, rank_stride=rank_stride)
    print(collective_table(profile, {}), profile.summary(), "sources", sep="\n\n")
    print("\n".join(f"  {source}" for source in profile.sources))
    if out is not None:
        profile.save(out)
        print(f"saved {out}")
    return 0
