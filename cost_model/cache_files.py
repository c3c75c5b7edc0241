"""Files that a later run may use: where they are, and how they are written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from cost_model.errors import log


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/autoshard, or ~/.cache/autoshard."""
    root = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")  # which stays as it is for a user without a home
    return Path(root or f"{tempfile.gettempdir() if home == '~' else home}/.cache") / "autoshard"


def write_whole(path: Path, text: str) -> None:
    """`text` under `path`, with the folders it needs. Whoever reads it finds all of it or what was there before.

    Raises OSError if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def keep_file(path: Path, text: str, what: str) -> bool:
    """Whether it was written. Where not, `what` is a warning: a cache that cannot be written is no reason to fail."""
    try:
        write_whole(path, text)
    except OSError as error:
        log.warning("%s: %s", what, error)
        return False
    return True


@cache
def code_fingerprint() -> str:
    """Of this installation's own code: names, sizes and times of its files. A plan is that of the code that made it."""
    root = Path(__file__).parents[1]
    found: list[str] = []
    for package in ("autoshard", "passes", "cost_model"):
        for path in sorted((root / package).rglob("*.py")):
            state = path.stat()
            found.append(f"{path.relative_to(root)} {state.st_size} {state.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def remember(*what: object, text: str = "") -> None:
    """`remembered` from now on, for this code."""
    with suppress(OSError):
        write_whole(_path_of(what), text)


def remembered(*what: object) -> str | None:
    """The text of `what`; None: there is none."""
    with suppress(OSError):
        return _path_of(what).read_text(encoding="utf-8")
    return None


def _path_of(what: tuple[object, ...]) -> Path:
    text = "\n".join(map(str, (*what, code_fingerprint())))
    return cache_folder() / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.mark"
