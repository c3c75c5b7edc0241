"""What ranks write down for each other, in the key-value store that the process group was started with."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

__all__ = ["Board"]

_TIMEOUT = timedelta(seconds=10)
_LASTING = ("member", "state")
"""Names that are never erased."""
_OF_GLOO = re.compile(r"(^|//)[a-z]+//\d+/\d+$")
"""Keys of the process group and of those made in it: (group//) device type//number of the device/rank."""


class Board:
    """The notes of the ranks of one mesh. Nothing here waits for a rank; a store that is gone raises RuntimeError.

    It has a connection of its own, so that a main thread that waits in the store does not hold up the watch.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self.rank, self.world = rank, world
        # A second process group in the same processes may have the first one's store, with its old notes.
        generation = self._store.add(f"autoshard/{world}/generation/{rank}", 1)
        self._prefix = f"autoshard/{world}/{generation}"
        if self._store is not store:
            self._store.set_timeout(_TIMEOUT)
        self._written: set[str] = set()
        self._gloo: dict[str, bytes] = {}

    def close(self) -> None:
        """The store is gone: say so at once from now on, without asking it (each time, torch logs a page)."""
        self._store = _Gone()

    def write(self, name: str, value: Any) -> None:
        self._store.set(self._key(name, self.rank), pickle.dumps(value))

    def read(self, name: str, ranks: Iterable[int]) -> dict[int, Any]:
        """Of those of `ranks` that have written."""
        there = [rank for rank in ranks if self._is_written(self._key(name, rank))]
        texts = self._store.multi_get([self._key(name, rank) for rank in there]) if there else []
        return {rank: pickle.loads(text) for rank, text in zip(there, texts, strict=True)}

    def complete(self, name: str) -> bool:
        """Whether every rank has written."""
        return self._store.check([self._key(name, rank) for rank in range(self.world)])

    def absent(self, name: str) -> list[int]:
        return [rank for rank in range(self.world) if not self._store.check([self._key(name, rank)])]

    def erase(self, name: str) -> None:
        """This rank's own."""
        self._store.delete_key(self._key(name, self.rank))

    def told_by_gloo(self) -> bytes:
        """What gloo's ranks have told each other so far: the addresses where they listen are in it.

        Empty where the store does not list its keys.
        """
        with suppress(RuntimeError):
            keys = [key for key in self._store.list_keys() if _OF_GLOO.search(key) and key not in self._gloo]
            self._gloo |= zip(keys, self._store.multi_get(keys) if keys else [], strict=True)
        return b"".join(self._gloo.values())

    def condemn(self, text: str) -> str:
        """Say to all that they have to stop, and why; the first reason stands, and is returned."""
        return self._store.compare_set(f"{self._prefix}/verdict", "", text).decode()

    def verdict(self) -> str | None:
        key = f"{self._prefix}/verdict"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"

    def _is_written(self, key: str) -> bool:
        if key in self._written:
            return True
        there = self._store.check([key])
        if there and key.split("/")[-2] in _LASTING:
            self._written.add(key)
        return there


class _Gone:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the store of the process group is gone")
