"""Folders of checkpoints of which the last is always whole, whenever a rank is killed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from autoshard.data.rank_sampler import member
from autoshard.watching.agreement import agree, collectively, from_first
from cost_model.errors import RankError, ShardingError, checked_count, checked_path, error_line

_NAME = re.compile(r"step-([0-9]+)")
_PARTIAL = ".partial"
_LOCK = ".saving"
"""A file in a folder that is not whole yet: locked by the process that writes it, for as long as that lives."""


@contextmanager
def new_checkpoint(
    root: str | os.PathLike[str], step: int, mesh: DeviceMesh, *, keep: int | None = None
) -> Generator[Path]:
    """A new folder for all ranks to write into; it becomes `root/step-<step>` when all are done.

        with autoshard.new_checkpoint("runs/a", step, mesh, keep=2) as folder:
            dcp.save(state, checkpoint_id=folder)

    Until then it is `root/step-<step>.partial`, which `last_checkpoint` does not see; the renaming is one step of the
    file system. What an earlier run left unfinished is removed, and what a running one is saving is left alone. A rank
    that fails, or is killed, leaves the checkpoints that there are as they were.

    keep: how many to keep, this one included; None: all.

    Raises, on all ranks, what a rank raised inside (RankError where others wait for it in a collective), and
    ShardingError for a step that is saved already, or is being saved by another run.
    """
    member(mesh)
    final, most = collectively(mesh, lambda: _checked(root, step, keep), what="new_checkpoint(...)")
    agree(mesh, {"folder": str(final), "keep": str(most)}, what="arguments of new_checkpoint(...)")
    partial = final.with_name(final.name + _PARTIAL)
    with ExitStack() as held:
        from_first(mesh, lambda: _prepare(final, partial, held))
        error: Exception | None = None
        try:
            yield partial
        except Exception as raised:
            error = raised
        _end_together(mesh, error)
        from_first(mesh, lambda: _finish(partial, final, most))


def last_checkpoint(root: str | os.PathLike[str], mesh: DeviceMesh) -> Path | None:
    """The whole checkpoint of the highest step that `new_checkpoint` made in `root`, as rank 0 finds it; None: none."""
    member(mesh)
    folder = collectively(mesh, lambda: checked_path(root, "root"), what="last_checkpoint(...)")
    found = from_first(mesh, lambda: [str(path) for path in _whole(folder)])
    return Path(found[-1]) if found else None


def _checked(root: object, step: object, keep: object) -> tuple[Path, int | None]:
    name = f"step-{checked_count(step, 'step')}"
    return checked_path(root, "root").absolute() / name, keep if keep is None else checked_count(
        keep, "keep", 1
    )


def _end_together(mesh: DeviceMesh, error: Exception | None) -> None:
    """Raise, on all ranks, what one has raised. Others may wait for it in a collective that it never comes to."""

    def own() -> None:
        if error is not None:
            raise error

    said = "" if error is None else f"it raised {error_line(error)}"
    try:
        collectively(mesh, own, what="the end of new_checkpoint", detail=said)
    except RankError as stopped:
        raise stopped from error


@contextmanager
def _on_disk(folder: Path) -> Generator[None]:
    """ShardingError, naming `folder`, for what the file system refuses."""
    try:
        yield
    except OSError as error:
        raise ShardingError(
            f"cannot keep checkpoints in {str(folder)[:200]!r}: {error.strerror}"
            f"{'' if error.filename is None else f' ({str(error.filename)[-200:]!r})'}\n"
            "  try: a folder that can be written, with room in it"
        ) from error


def _prepare(final: Path, partial: Path, held: ExitStack) -> None:
    """Make `partial`, which is this process's until `held` is closed."""
    if os.path.lexists(final):
        raise ShardingError(
            f"{final.name} is saved already: {final} exists\n  try: another root, or the next step"
        )
    with _on_disk(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in _folders(final.parent, _PARTIAL):
            with ExitStack() as ours:
                if not left.is_symlink() and _locked(left, ours):
                    shutil.rmtree(left)
        if partial.is_symlink():
            partial.unlink()
        with suppress(FileExistsError):
            partial.mkdir()
            if _locked(partial, held):
                return
    raise ShardingError(
        f"{final.name} is being saved by another run: {partial} is not ours\n"
        "  try: another root for each run; nothing else may have that name"
    )


def _locked(partial: Path, held: ExitStack) -> bool:
    """Whether it is this process's now, until `held` is closed: no other has it."""
    file = os.open(partial / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    held.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks cannot say
    return True


def _finish(partial: Path, final: Path, keep: int | None) -> None:
    with _on_disk(final.parent):
        os.rename(partial, final)
        (final / _LOCK).unlink(missing_ok=True)
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        others = [path for path in _whole(final.parent) if path != final]
        for old in others[: max(0, len(others) + 1 - keep)] if keep else ():
            # First the name, so that one half removed is not taken for a whole one.
            gone = old.with_name(old.name + _PARTIAL)
            os.rename(old, gone)
            gone.unlink() if gone.is_symlink() else shutil.rmtree(gone)


def _whole(root: Path) -> list[Path]:
    with _on_disk(root):
        return _folders(root, "")


def _folders(root: Path, ending: str) -> list[Path]:
    """Those named as a step's with `ending`, by step. Nothing else in `root` is ours."""
    if not root.exists():
        return []
    found = {
        path: _NAME.fullmatch(path.name.removesuffix(ending))
        for path in root.iterdir()
        if path.name.endswith(ending)
    }
    steps = {path: int(name[1]) for path, name in found.items() if name and path.is_dir()}
    return sorted(steps, key=steps.__getitem__)
