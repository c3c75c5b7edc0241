"""One rank of the test pool: a process that runs functions in fresh gloo process groups.

Started by `tests.ranks`. It answers every request with one reply and never gives up on its own: a
rank that hangs or dies is the business of the parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.garbage import collect_seldom

__all__ = ["Reply", "Request", "WorkerSettings", "serve"]


@dataclass(frozen=True)
class WorkerSettings:
    """What a rank is told once. stacks_path: where a thread dump goes on SIGUSR1."""

    rank: int
    store_port: int
    log_path: str
    stacks_path: str


@dataclass(frozen=True)
class Request:
    """One run. task: pickled (fn, args, kwargs). run: a number no other run has."""

    run: int
    world: int
    task: bytes
    sys_path: tuple[str, ...]
    timeout_seconds: float


@dataclass(frozen=True)
class Reply:
    """value: the pickled result, or None with `error` a formatted traceback and when it was raised
    (`time.monotonic()`, one clock for all processes)."""

    value: bytes | None = None
    error: str | None = None
    failed_at: float = 0.0


def serve(settings: WorkerSettings, connection: Connection) -> None:
    """Answer requests until the parent closes the connection."""
    _claim_process(settings)
    while True:
        try:
            request: Request = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(_answer(settings, request))


def _claim_process(settings: WorkerSettings) -> None:
    """Own log file, stack dumps on request, one thread, loopback only, little garbage collection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(settings.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # faulthandler keeps the file open for the life of the process.
    faulthandler.register(signal.SIGUSR1, open(settings.stacks_path, "w"), all_threads=True)  # noqa: SIM115
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    # Compile in this process: a daemon may not have children of its own.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    collect_seldom()


def _answer(settings: WorkerSettings, request: Request) -> Reply:
    os.truncate(settings.log_path, 0)
    try:
        sys.path[:] = list(request.sys_path)
        fn, args, kwargs = pickle.loads(request.task)
        with _process_group(settings, request):
            return _call(lambda: fn(settings.rank, *args, **kwargs))
    except BaseException:
        return Reply(error=traceback.format_exc(), failed_at=time.monotonic())
    finally:
        _forget_meshes()


def _forget_meshes() -> None:
    """Meshes of parallel models end with the group. A later one that is equal would be taken for one of them, on those
    ranks of the pool alone that have run as many tests."""
    whole_ops = sys.modules.get("autoshard.runtime.whole_ops")
    if whole_ops is not None:
        whole_ops._OURS.clear()


def _call(body: Callable[[], Any]) -> Reply:
    """Timed here, while the group still stands: its end makes the other ranks fail in turn."""
    try:
        value = pickle.dumps(body())
        # A rank that leaves early closes sockets that a slower one may still be reading.
        dist.barrier()
        return Reply(value=value)
    except BaseException:
        return Reply(error=traceback.format_exc(), failed_at=time.monotonic())


@contextlib.contextmanager
def _process_group(settings: WorkerSettings, request: Request) -> Generator[None]:
    random.seed(0)
    torch.manual_seed(0)
    limit = timedelta(seconds=request.timeout_seconds)
    # A client of its own per run, and a prefix of its own: nothing of an earlier run can be read.
    store = dist.TCPStore("127.0.0.1", settings.store_port, is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"run{request.run}", store),
        rank=settings.rank,
        world_size=request.world,
        timeout=limit,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()
