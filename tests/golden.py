"""Golden files: expected text kept beside the tests, rewritten with `pytest --update-golden`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Golden"]


@dataclass(frozen=True)
class Golden:
    """folder: the `golden` folder beside the test module. Use through the `golden` fixture."""

    folder: Path
    update: bool

    def check(self, text: str, name: str) -> None:
        """Assert that `text` equals the file `name`; with `update`, make it so."""
        path = self.folder / name
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"no golden file {path}; run pytest --update-golden and read what it wrote"
        assert text == path.read_text(), f"differs from {path}; if that is right, run pytest --update-golden"
