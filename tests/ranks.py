"""`RankPool`: rank processes that stay alive across tests.

    def all_reduced(rank: int, value: float) -> float:      # module level, so that it pickles
        x = torch.tensor(value + rank)
        dist.all_reduce(x)
        return x.item()

    def test_all_reduce(ranks: RankPool) -> None:
        assert ranks.run(all_reduced, 1.0, world=3) == [6.0, 6.0, 6.0]

Every run gets a new gloo process group on loopback, of any size up to 16. After a run in which a
rank failed, died or hung, all processes of that run are replaced, so that no test can harm the next.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.rank_worker import Reply, Request, WorkerSettings, serve

__all__ = ["RankFailure", "RankPool"]

MAX_WORLD = 16
LOG_LINES = 20
PRELOADED = [
    "autoshard",
    "torch._inductor.compile_fx",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "tests.rank_worker",
]
"""What ranks would each import anew."""


class RankFailure(AssertionError):
    """Some ranks raised, died or hung. errors: rank -> what happened, first to fail first."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in errors.items()))


@dataclass
class _Worker:
    process: Any
    connection: Connection
    settings: WorkerSettings

    def log_tail(self) -> str:
        lines = Path(self.settings.log_path).read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(["its output ended with:", *lines]) if lines else "it printed nothing"

    def stacks(self) -> str:
        """Where every thread of the process is now, innermost call first."""
        path = Path(self.settings.stacks_path)
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not path.read_text().endswith("\n"):
            time.sleep(0.05)
        return path.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class RankPool:
    """Runs a function on `world` ranks at once and returns the result of each, by rank.

    timeout_seconds: the longest a run may take before its ranks are killed.
    grace_seconds:   after a first failure, how long the other ranks may take to report their own.
    start_method:    of `multiprocessing`. "forkserver" starts at once what takes seconds to import; a process that is
                     to use a GPU is not forked from one that has looked for GPUs, as importing Inductor does.
    """

    def __init__(
        self, timeout_seconds: float = 300.0, grace_seconds: float = 3.0, start_method: str = "forkserver"
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.grace_seconds = grace_seconds
        self._context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(PRELOADED)
        self._workers: dict[int, _Worker] = {}
        self._runs = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world: int = 4,
        timeout_seconds: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """[fn(rank, *args, **kwargs) for rank in range(world)], each in a process of its own.

        `fn` must be importable by name; arguments and results are pickled. Random seeds are 0.
        Raises RankFailure with the traceback of every rank that raised, the exit code of one that
        died, and the stacks of one that hung.
        """
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world is {world}; the pool has 1 to {MAX_WORLD} ranks")
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        task = pickle.dumps((fn, args, kwargs))
        request = Request(next(self._runs), world, task, tuple(sys.path), limit)
        workers = [self._worker(rank) for rank in range(world)]
        replies = self._collect(workers, request)
        failed = [rank for rank in range(world) if replies[rank].error is not None]
        if failed:
            self._discard(range(world))
            failed.sort(key=lambda rank: replies[rank].failed_at)
            raise RankFailure({rank: replies[rank].error or "" for rank in failed})
        return [pickle.loads(replies[rank].value or b"") for rank in range(world)]

    def close(self) -> None:
        self._discard(list(self._workers))
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _worker(self, rank: int) -> _Worker:
        worker = self._workers.get(rank)
        if worker is None or not worker.process.is_alive():
            worker = self._workers[rank] = self._start(rank)
        return worker

    def _start(self, rank: int) -> _Worker:
        base = Path(self._folder.name) / f"rank{rank}-{next(self._runs)}"
        settings = WorkerSettings(rank, self._store.port, f"{base}.log", f"{base}.stacks")
        Path(settings.stacks_path).touch()
        Path(settings.log_path).touch()
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(settings, theirs), daemon=True, name=f"test rank {rank}"
        )
        process.start()
        theirs.close()
        return _Worker(process, ours, settings)

    def _collect(self, workers: list[_Worker], request: Request) -> dict[int, Reply]:
        replies: dict[int, Reply] = {}
        started = time.monotonic()
        deadline = started + request.timeout_seconds
        waiting: dict[Any, _Worker] = {}
        for worker in workers:
            waiting[worker.connection] = worker
            with contextlib.suppress(OSError):  # a dead rank is reported below, as end of file
                worker.connection.send(request)
        while waiting and time.monotonic() < deadline:
            # `wait` returns early for a rank that died: its connection is at end of file.
            for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                worker = waiting.pop(connection)
                reply = replies[worker.settings.rank] = _receive(worker)
                if reply.error is not None:
                    deadline = min(deadline, time.monotonic() + self.grace_seconds)
        for worker in waiting.values():
            replies[worker.settings.rank] = _hung(worker, started)
        return replies

    def _discard(self, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            worker = self._workers.pop(rank, None)
            if worker is not None:
                worker.kill()


def _receive(worker: _Worker) -> Reply:
    try:
        reply: Reply = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(5.0)
        reply = Reply(error=f"the process died with exit code {worker.process.exitcode}\n", failed_at=0.0)
    if reply.error is None:
        return reply
    return replace(reply, error=reply.error + worker.log_tail())


def _hung(worker: _Worker, started: float) -> Reply:
    now = time.monotonic()
    error = f"no answer after {now - started:.1f} s; it is at\n{worker.stacks()}{worker.log_tail()}"
    return Reply(error=error, failed_at=now)
