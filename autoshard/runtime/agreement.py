"""All ranks go on, or all raise: exchanges that come before the first collective.

They use the key-value store that the process group was started with, not collectives: a rank that
never arrives is named after a timeout, and ranks that would run different programs can still talk.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import cost_model.errors
from cost_model.errors import AutoshardError, PlanError
from passes.torch_compat import default_store

__all__ = ["agree", "collectively", "everyones", "from_first"]

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=30)


def agree(
    mesh: DeviceMesh, fingerprint: Mapping[str, str], timeout: timedelta = timedelta(minutes=5)
) -> None:
    """Compare what the ranks are about to run; raise PlanError on all of them if it differs.

    fingerprint: what is compared -> its hash or text ("plan", "graph", "inputs", "torch", ...). The
                 error names the first difference of every rank that differs from rank 0.
    """
    prints = everyones(mesh, dict(fingerprint), timeout)
    lines: list[str] = []
    for rank, other in enumerate(prints):
        names = [n for n in [*prints[0], *other] if prints[0].get(n) != other.get(n)]
        if names:
            name = names[0]
            lines.append(f"  {name}: {other.get(name)!r} on rank {rank}, {prints[0].get(name)!r} on rank 0")
    if lines:
        raise PlanError(
            "the ranks are about to run different programs\n"
            + "\n".join(lines)
            + "\n  try: the same code, inputs and library versions on every rank"
        )


def collectively(mesh: DeviceMesh, fn: Callable[[], T], timeout: timedelta = _TIMEOUT) -> T:
    """fn() on every rank; if it raises on any, then this raises on all, and nobody waits forever.

    A rank where fn raised re-raises that. The others raise an error of the same class if it is one of
    autoshard's, else PlanError, saying which rank failed and how. Raises PlanError for a rank that does
    not arrive within `timeout`.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = fn()
    except Exception as raised:
        error = raised
    replies = _exchange(mesh, pickle.dumps(_described(error)), timeout)
    if error is not None:
        raise error
    for rank, reply in enumerate(replies):
        _raise_for(rank, pickle.loads(reply))
    return result


def everyones(mesh: DeviceMesh, value: T, timeout: timedelta = _TIMEOUT) -> list[T]:
    """Every rank's `value`, by rank. It must pickle. PlanError for a rank that does not arrive in time."""
    return [pickle.loads(text) for text in _exchange(mesh, pickle.dumps(value), timeout)]


def from_first(mesh: DeviceMesh, fn: Callable[[], T], timeout: timedelta = _TIMEOUT) -> T:
    """Rank 0's fn(), on all ranks; if it raises there, all raise. The result must pickle."""
    if mesh.size() == 1:
        return fn()
    if mesh.get_rank() != 0:
        replies = _exchange(mesh, pickle.dumps((None, None)), timeout)
        value, failure = pickle.loads(replies[0])
        _raise_for(0, failure)
        return value
    error: Exception | None = None
    reply = b""
    try:
        result = fn()
        reply = pickle.dumps((result, None))
    except Exception as raised:
        error, reply = raised, pickle.dumps((None, _described(raised)))
    _exchange(mesh, reply, timeout)
    if error is not None:
        raise error
    return pickle.loads(reply)[0]


def _exchange(mesh: DeviceMesh, message: bytes, timeout: timedelta) -> list[bytes]:
    """Everybody's message, by rank."""
    world = mesh.size()
    if world == 1:
        return [message]
    store, rank = default_store(), mesh.get_rank()
    prefix = f"autoshard/{world}"
    # Every rank counts its own exchanges, in the store: no state here, and none shared by two worlds.
    turn = store.add(f"{prefix}/turns/{rank}", 1)
    keys = [f"{prefix}/{turn}/{r}" for r in range(world)]
    store.set(keys[rank], message)
    try:
        store.wait(keys, timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        absent = [r for r, key in enumerate(keys) if not store.check([key])]
        raise PlanError(
            f"rank(s) {', '.join(map(str, absent))} did not arrive within {timeout.total_seconds():.0f} s\n"
            "  try: look there first: they failed earlier, or run something else"
        ) from error
    said = store.multi_get(keys)
    if turn > 2:
        # Whoever reached this turn has read the last one, so nobody needs the one before.
        store.delete_key(f"{prefix}/{turn - 2}/{rank}")
    return said


def _described(error: Exception | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def _raise_for(rank: int, failure: tuple[str, str] | None) -> None:
    if failure is None:
        return
    name, text = failure
    kind = getattr(cost_model.errors, name, None)
    if isinstance(kind, type) and issubclass(kind, AutoshardError):
        raise kind(f"{text}\n  raised on rank {rank}")
    raise PlanError(f"rank {rank} failed: {name}: {text}")
