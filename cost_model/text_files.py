"""Texts from files and into files; where that is not possible, an error of ours names the file."""

from __future__ import annotations

from pathlib import Path

from cost_model.errors import AutoshardError

__all__ = ["read_text", "write_text"]


def read_text(path: Path, what: str, error: type[AutoshardError]) -> str:
    """The file's text. `error`, naming it, if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as cause:
        raise error(
            f"cannot read {what} {str(path)!r}: {cause.strerror}\n  try: a path that exists"
        ) from None
    except UnicodeDecodeError as cause:
        raise error(
            f"{str(path)!r} is no {what}: not UTF-8 ({cause.reason})\n  try: the file as it was written"
        ) from None


def write_text(path: Path, text: str, what: str, error: type[AutoshardError]) -> None:
    """`error`, naming the file, if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as cause:
        raise error(f"cannot write {what} {str(path)!r}: {cause.strerror}\n  try: another path") from None
