"""Folders of checkpoints of which the last is always whole, whenever a rank is killed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.agreement import collectively, from_first
from cost_model.errors import ShardingError

__all__ = ["last_checkpoint", "new_checkpoint"]

_NAME = re.compile(r"step-(\d+)")
_PARTIAL = ".partial"


@contextmanager
def new_checkpoint(
    root: str | os.PathLike[str], step: int, mesh: DeviceMesh, *, keep: int | None = None
) -> Generator[Path]:
    """A new folder for all ranks to write into; it becomes `root/step-<step>` when all are done.

        with autoshard.new_checkpoint("runs/a", step, mesh, keep=2) as folder:
            dcp.save(state, checkpoint_id=folder)

    Until then it is `root/step-<step>.partial`, which `last_checkpoint` does not see; the renaming is one step of the
    file system. What an earlier run left unfinished is removed. A rank that fails, or is killed, leaves the
    checkpoints that there are as they were.

    keep: how many to keep, this one included; None: all.

    Raises, on all ranks, what a rank raised inside, and ShardingError for a step that is saved already.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise ShardingError(f"step is {step} and keep is {keep}\n  try: step from 0, keep from 1 or None")
    final = Path(root) / f"step-{step}"
    partial = final.with_name(final.name + _PARTIAL)
    from_first(mesh, lambda: _prepare(final, partial))
    error: Exception | None = None
    try:
        yield partial
    except Exception as raised:
        error = raised
    collectively(mesh, lambda: _raise(error))
    from_first(mesh, lambda: _finish(partial, final, keep))


def last_checkpoint(root: str | os.PathLike[str], mesh: DeviceMesh) -> Path | None:
    """The whole checkpoint of the highest step that `new_checkpoint` made in `root`, as rank 0 finds it; None: none."""
    found = from_first(mesh, lambda: [str(path) for path in _whole(Path(root))])
    return Path(found[-1]) if found else None


def _prepare(final: Path, partial: Path) -> None:
    if final.exists():
        raise ShardingError(
            f"{final.name} is saved already: {final} exists\n  try: another root, or the next step"
        )
    for left in final.parent.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(left)
    partial.mkdir(parents=True)


def _finish(partial: Path, final: Path, keep: int | None) -> None:
    os.rename(partial, final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    for old in _whole(final.parent)[: -keep if keep else 0]:
        # First the name, so that one half removed is not taken for a whole one.
        gone = old.with_name(old.name + _PARTIAL)
        os.rename(old, gone)
        shutil.rmtree(gone)


def _whole(root: Path) -> list[Path]:
    """By step."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
