"""Read what every process of a job logged of its NCCL calls.

One file a process, one JSON object a line, in the order of the calls; tests/mock_cuda writes them:

    {"call": "init", "comm": id, "size": 4, "rank": 0, ...}          a communicator made by all its ranks
    {"call": "split", "parent": id, "turn": 0, "parent_rank": 1, "comm": id or "", "color": 0, "key": 1}
    {"call": "group_start", "thread": 1}, {"call": "group_end", "thread": 1}
    {"call": "all_reduce", "comm": id, "rank": 0, "count": 8, "dtype": "f32", "op": "sum", "root": -1, "thread": 1}

A rooted collective has its root in "root"; "send" and "recv" have the peer there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Call", "Init", "Process", "Split", "parse_log", "read_logs"]

_MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Call:
    """count: elements, as NCCL counts them for this call. root: of a rooted collective, or the peer, else -1."""

    kind: str
    comm: str
    rank: int
    count: int
    dtype: str
    op: str
    root: int

    @property
    def is_message(self) -> bool:
        return self.kind in _MESSAGES

    def __str__(self) -> str:
        where = {"send": f" to {self.root}", "recv": f" from {self.root}"}.get(self.kind, "")
        root = f" root {self.root}" if self.root >= 0 and not self.is_message else ""
        return f"{self.kind}{where} {self.dtype}[{self.count}]{' ' + self.op if self.op else ''}{root}"


@dataclass(frozen=True)
class Init:
    comm: str
    size: int
    rank: int


@dataclass(frozen=True)
class Split:
    """One rank's part in ncclCommSplit. comm: "" for a rank that is in no part. turn: of the parent's splits, which."""

    parent: str
    turn: int
    parent_rank: int
    comm: str
    key: int


@dataclass(frozen=True)
class Process:
    """steps: calls that start together, in the order issued: those of a group, or one alone."""

    name: str
    inits: tuple[Init, ...]
    splits: tuple[Split, ...]
    steps: tuple[tuple[Call, ...], ...]

    @property
    def calls(self) -> list[Call]:
        return [call for step in self.steps for call in step]


def read_logs(prefix: Path) -> list[Process]:
    """All files PREFIX.PID, by name."""
    files = sorted(f for f in prefix.parent.glob(prefix.name + ".*") if f.suffix[1:].isdigit())
    return [parse_log(file.name, file.read_text().splitlines()) for file in files]


def parse_log(name: str, lines: Iterable[str]) -> Process:
    """One process's log. ValueError, with the file, the line and its text, for a line that is none."""
    inits: list[Init] = []
    splits: list[Split] = []
    steps: list[tuple[Call, ...]] = []
    open_groups: dict[int, list[Call]] = {}  # by thread: two threads' groups may interleave
    for number, line in enumerate(lines, 1):
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name}, line {number} is no call ({error}): {line[:400]!r}") from None
        kind = entry["call"]
        if kind == "init":
            inits.append(Init(entry["comm"], entry["size"], entry["rank"]))
        elif kind == "split":
            parent = entry["parent"], entry["turn"], entry["parent_rank"]
            splits.append(Split(*parent, entry["comm"], entry["key"]))
        elif kind == "group_start":
            open_groups[entry["thread"]] = []
        elif kind == "group_end":
            _append(steps, open_groups.pop(entry["thread"]))
        else:
            group = open_groups.get(entry["thread"])
            call = _call(entry)
            if group is None:
                _append(steps, [call])
            else:
                group.append(call)
    for group in open_groups.values():
        _append(steps, group)  # a process that ended inside a group
    return Process(name, tuple(inits), tuple(splits), tuple(steps))


def _append(steps: list[tuple[Call, ...]], group: Sequence[Call]) -> None:
    if group:
        steps.append(tuple(group))


def _call(entry: dict[str, Any]) -> Call:
    names = ("comm", "rank", "count", "dtype", "op", "root")
    return Call(entry["call"], *(entry[name] for name in names))
