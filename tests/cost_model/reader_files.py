"""Sample files of the readers' tests, and copies of them with something changed."""

from __future__ import annotations

from pathlib import Path

from cost_model.groups import GroupShape
from cost_model.profile import Profile

__all__ = ["SAMPLES", "altered", "line_of", "points", "sample"]

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> Path:
    return SAMPLES / name


def altered(folder: Path, name: str, old: str, new: str, count: int = 1) -> Path:
    """A copy of a sample, under its name, with the first `count` places of `old` changed."""
    text = sample(name).read_text(encoding="utf-8")
    assert text.count(old) >= count, (name, old)
    path = folder / name
    path.write_text(text.replace(old, new, count), encoding="utf-8")
    return path


def line_of(path: Path, text: str) -> int:
    """Number of the first line that holds `text`."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return next(i for i, line in enumerate(lines, start=1) if text in line)


def points(profile: Profile) -> dict[tuple[str, GroupShape, int], float]:
    """(kind, group, nbytes) -> seconds."""
    return {
        (samples.kind, samples.group, nbytes): seconds
        for samples in profile.collectives
        for nbytes, seconds in zip(samples.nbytes, samples.seconds, strict=True)
    }
