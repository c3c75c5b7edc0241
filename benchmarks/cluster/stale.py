"""Names of namespaces that tell whose they are, and the removal of those whose owner is gone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

__all__ = ["PREFIX", "Owner", "remove_namespace", "remove_stale", "stale_namespaces"]

PREFIX = "autoshard"
NAMESPACES = Path("/run/netns")


class Owner:
    """A process, as namespaces' names give it: number and start time, as numbers are used again."""

    def __init__(self, pid: int | None = None, start: str | None = None) -> None:
        self.pid = os.getpid() if pid is None else pid
        self.start = start if start is not None else _start_time(self.pid)

    def namespace(self, name: str) -> str:
        return f"{PREFIX}-{self.pid}-{self.start}-{name}"

    def lives(self) -> bool:
        return _start_time(self.pid) == self.start != ""


def owner_of(namespace: str) -> Owner | None:
    """Whose namespace it is; None if the name is none of ours."""
    found = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\w+", namespace)
    return Owner(int(found[1]), found[2]) if found else None


def stale_namespaces(names: list[str]) -> list[str]:
    """Those of `names` that are ours and whose owner is dead."""
    owners = {name: owner_of(name) for name in names}
    return [name for name, owner in owners.items() if owner is not None and not owner.lives()]


def remove_stale() -> list[str]:
    """Remove what runs left behind that were killed; returns the namespaces' names."""
    names = sorted(path.name for path in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []
    stale = stale_namespaces(names)
    for name in stale:
        remove_namespace(name)
    return stale


def remove_namespace(name: str) -> None:
    """Kill what still runs in it, then delete it: a namespace lives on while a process does."""
    said = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
    for pid in said.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _start_time(pid: int) -> str:
    """Clock ticks since boot at which process `pid` started; "" if there is none. [proc(5), field 22 of stat]"""
    try:
        # The second field is a name in brackets, which may hold spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
