"""What takes longer than a second says so: its stage, how long it has taken, and how long it took the last times.

Nothing is said of how long it takes where the last two times differ: the first left a cache that the second read, or
ran beside other work."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from tqdm import tqdm

from cost_model.cache_files import cache_folder, write_whole
from cost_model.errors import PlanError, log, read_json

_SILENT_SECONDS = 1.0
_LINES_SECONDS = 10.0
"""Between two lines of a log."""


Say = Callable[[str], None]


Stages = Callable[[str], AbstractContextManager[Say]]
"""`with stages("searching a plan") as say:` around what may take long. say: what is known so far, in words."""


def stages_of(rank: int, subject: str) -> Stages:
    """For one model; of rank 0 alone, and of none if $AUTOSHARD_PROGRESS is 0.

    subject: what tells this work from other in what is kept of the last runs: model, call, and how it is run.
    """
    if rank != 0 or os.environ.get("AUTOSHARD_PROGRESS") == "0":
        return lambda stage: nullcontext(lambda text: None)
    return _Shown(subject, cache_folder() / "stages.json")


def tell(rank: int, text: str) -> None:
    """One line, of rank 0 alone, and none if $AUTOSHARD_PROGRESS is 0; the log has it always."""
    if rank == 0:
        teller()(text)


def teller() -> Say:
    """Tells one line, whatever the environment says by then."""
    shown = os.environ.get("AUTOSHARD_PROGRESS") != "0"

    def say(text: str) -> None:
        log.info("%s", text)
        if shown:
            _write(text)

    return say


def _write(text: str) -> None:
    """A line in one piece: `print` writes its end apart, and other ranks write to the same place in between."""
    sys.stderr.write(f"autoshard: {text}\n")
    sys.stderr.flush()


class _Shown:
    def __init__(self, subject: str, path: Path) -> None:
        self._subject, self._path = subject, path

    @contextmanager
    def __call__(self, stage: str) -> Generator[Say]:
        name = f"{self._subject}: {stage}"
        expected = _expected(_known(self._path).get(name, []))
        done, said = threading.Event(), [""]
        start = time.monotonic()
        shown = threading.Thread(target=_show, args=(stage, expected, start, done, said), daemon=True)
        shown.start()
        try:
            yield lambda text: said.append(f"; {text}")
            seconds = time.monotonic() - start
        finally:
            done.set()
            shown.join()
        if seconds > _SILENT_SECONDS:
            _keep(self._path, name, seconds)


def _show(
    stage: str, expected: float | None, start: float, done: threading.Event, said: Sequence[str]
) -> None:
    if done.wait(_SILENT_SECONDS):
        return
    on_terminal = sys.stderr.isatty()
    tell, tick = _bar(stage, expected) if on_terminal else (_line(stage, expected), _LINES_SECONDS)
    while True:
        tell(time.monotonic() - start, said[-1], False)
        if done.wait(tick):
            tell(time.monotonic() - start, said[-1], True)
            return


Tell = Callable[[float, str, bool], None]
"""(seconds since the stage began, what was said last, whether it has ended)"""


def _bar(stage: str, expected: float | None) -> tuple[Tell, float]:
    plain = "{desc}: {elapsed}"
    known = f"{plain} of about {_seconds(expected)}" if expected else plain
    bar = tqdm(desc=f"autoshard: {stage}", bar_format=known, leave=False)

    def tell(elapsed: float, said: str, ended: bool) -> None:
        late = expected is not None and elapsed >= expected
        bar.bar_format = (plain if late else known) + said.replace("{", "").replace("}", "")
        bar.close() if ended else bar.refresh()

    return tell, 0.5


def _line(stage: str, expected: float | None) -> Tell:
    def tell(elapsed: float, said: str, ended: bool) -> None:
        about = f", of about {_seconds(expected)}" if expected and elapsed < expected else ""
        took = f"took {_seconds(elapsed)}" if ended else f"{_seconds(elapsed)}{about}"
        _write(f"{stage}: {took}{said}")

    return tell


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 100 else f"{value / 60:.1f} min"


def _known(path: Path) -> dict[str, list[float]]:
    """Seconds that stages took, the last two times of each; nothing if the file is missing or damaged."""
    try:
        return msgspec.convert(read_json(path, "list of stages", PlanError), dict[str, _Times])
    except (PlanError, msgspec.ValidationError):
        return {}


_Times = Annotated[list[Annotated[float, Meta(ge=0, lt=1e6)]], Meta(max_length=2)]


def _expected(times: list[float]) -> float | None:
    # The most by which the last two times of a stage differ where a third is expected to be the same.
    return times[-1] if len(times) == 2 and max(times) <= 2.0 * min(times) else None


def _keep(path: Path, name: str, seconds: float) -> None:
    known = _known(path)
    last = known.pop(name, [])[-1:]  # what ran last stands last, and stays longest
    kept = [*known.items(), (name, [*last, round(seconds, 1)])][-500:]
    try:
        write_whole(path, json.dumps(dict(kept), indent=1))
    except OSError as error:
        log.info("progress: times not kept: %s", error)
