"""The watch of one rank: a thread that tells the others where it is, learns where they are, and ends what cannot end.

Collectives in flight know nothing of why a partner does not come. The watch does, within a second or two: then every
rank has the same reason, its connections are cut, and what waits in them raises.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.watching.crew import Crew, Stoppable, cut_waits
from autoshard.watching.sums import Sums, Updates
from autoshard.watching.telling import PERIOD_SECONDS, Board, Telling
from autoshard.watching.watch_state import State, Turns, judge
from cost_model.errors import RankError, log
from passes.ir.torch_compat import abort_process_groups, default_store

STAY_SECONDS = 60.0

_OF_COMMUNICATION = ("gloo", "NCCL", "onnection", "Socket")


class Watch:
    """The watch of one rank over the ranks 0, 1, ... of a mesh (`watch_of`). Its thread ends with the process group.

    turns: what this rank does in turn with the others. failure: why everything has to stop, None while all is well.
    """

    def __init__(self, store: Any, rank: int, world: int, group: Any, device_type: str) -> None:
        self.rank, self.world = rank, world
        self.turns = Turns()
        self.failure: str | None = None
        self.stoppable = Stoppable()
        self.board = Board(store, rank, world)
        self.sums = Sums(self.board)
        self.updates = Updates()
        self._crew = Crew(self.board)
        self._device_type = device_type
        self._group = weakref.ref(group)
        self._telling = Telling(self.board, self.turns)
        self._pid = os.getpid()
        self._before: dict[int, State] = {}
        self._cut_until = 0.0
        self._exchanges: deque[str] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="autoshard watch")

    def start(self) -> None:
        self._crew.join()
        self.board.write("state", self._telling.told)
        self.updates.watch()
        self._thread.start()
        # A daemon thread inside the store when the interpreter goes would abort the process.
        atexit.register(self._leave)
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, self._leave, exitpriority=100)

    def check(self) -> None:
        """Raise what ended the work of all ranks, if anything did."""
        if self.failure is not None:
            raise RankError(self.failure)

    def fail(self, reason: str) -> None:
        """End the work of all ranks."""
        with suppress(RuntimeError):
            reason = self.board.condemn(reason) or reason
        self._stop(reason)

    def erasable(self, name: str) -> str | None:
        """The exchange before the last, which nobody needs: whoever is in `name` has read the last."""
        self._exchanges.append(name)
        return self._exchanges.popleft() if len(self._exchanges) > 2 else None

    @contextmanager
    def turn(self, key: str, detail: str = "") -> Generator[None]:
        """A turn that every rank takes: what other ranks have to have in the same place. RankError if they failed."""
        self.check()
        self.turns.begin(key, detail)
        try:
            yield
        except RuntimeError as error:
            self._explain(error)
            raise
        finally:
            self.turns.end()

    def _explain(self, error: RuntimeError) -> None:
        """Raise RankError if what failed in between ranks did so because of another rank."""
        if not isinstance(error, dist.DistError) and not any(
            word in str(error) for word in _OF_COMMUNICATION
        ):
            return
        deadline = time.monotonic() + 5.0  # the watches of all ranks look twice a second
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.failure is not None:
            raise RankError(self.failure) from error

    def _run(self) -> None:
        while not self._over.wait(PERIOD_SECONDS):
            if self._group() is None or dist.group.WORLD is not self._group():
                self._leave()
                return
            try:
                self._round()
            except RuntimeError as error:
                if self._store_is_lost(error):
                    return

    def _round(self) -> None:
        self._telling.tell()
        self.sums.send()
        if self.failure is not None:
            self._insist()
            return
        verdict = self.board.verdict() or self._fault()
        if verdict is not None:
            self._stop(self.board.condemn(verdict) or verdict)

    def _fault(self) -> str | None:
        """The first thing that is wrong: a process that died, and, if no lower rank is there to look, all else."""
        self._crew.look()
        if not self._crew.complete:
            absent = self._crew.lost_before()
            if absent is not None:
                return absent
        lower: dict[int, State] = {}
        for rank in range(self.rank):
            lower |= self.board.read("state", [rank])
            if rank in lower and not lower[rank].ended:
                break
        lost = self._crew.lost(lower)
        if lost is not None:
            return lost
        if any(not state.ended for state in lower.values()):
            return None
        states = self.board.read("state", range(self.world))
        states[self.rank] = self._telling.told
        states, before = dict(sorted(states.items())), self._before
        self._before = states
        return self._crew.lost(states) or judge(states, before) or self.sums.compare()

    def _stop(self, reason: str) -> None:
        """Let this rank's main thread out of wherever it waits or plans."""
        if self.failure is not None:
            return
        self.failure = reason
        log.error("rank %d stops: %s", self.rank, reason)
        with suppress(RuntimeError):
            self.board.write("stopped", reason)
        self.stoppable.stop()
        self._cut_until = time.monotonic() + 10.0  # connections come up while others go
        if self._device_type != "cpu":
            abort_process_groups()
        self._cut()

    def _cut(self) -> None:
        with suppress(RuntimeError):
            self._crew.look(now=True)
        cut_waits(self._crew.told)

    def _store_is_lost(self, error: RuntimeError) -> bool:
        """The store is in rank 0's process, or in the launcher's. True when this rank has been stopped."""
        if self._over.is_set():
            return True
        if "imed out" in str(error) or "imeout" in str(error):
            return False
        self.board.close()
        needing = 0
        while not self._over.wait(PERIOD_SECONDS):
            state = self._telling.state()
            needing = needing + 1 if state.inside or state.waits else 0
            if self.failure is None and needing < 3:  # it may end by itself, as the others do
                continue
            self._stop(self._crew.lost_store(error))
            self._insist()
        return True

    def _insist(self) -> None:
        """Cut again, since connections come up while others go; a main thread that sits still after that gets no error
        from gloo any more (it loses some, torch 2.13), and its process ends."""
        left = self._cut_until - time.monotonic()
        if left > 0.0:
            self._cut()
        state = self._telling.state()
        if not (state.inside or state.waits):
            self._cut_until = max(self._cut_until, time.monotonic() + 5.0)  # it may wait again
        elif left < 0.0:
            log.critical(
                "rank %d is stuck in a collective, and its process is ended: %s", self.rank, self.failure
            )
            faulthandler.dump_traceback()
            os._exit(os.EX_SOFTWARE)

    def _leave(self) -> None:
        """Say that this rank is gone: with the process group, or at the end of the process."""
        if os.getpid() != self._pid:
            return
        leaving = self._over.is_set()
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(STAY_SECONDS + 12.0)  # it may be on its way out itself, and in the store
        if leaving:
            return
        error = getattr(sys, "last_value", None)
        with suppress(RuntimeError):
            said = "has ended" if error is None else f"has ended with {_first_line(error)}"
            self.board.write("state", State(self.rank, -1, self.turns.last(), ended=said))
            if error is not None and self.failure is None:
                where = f" after turn {self.turns.count}" if self.turns.count else ""
                self.failure = f"rank {self.rank} {said}{where}\n  try: its own output says where"
                self.board.condemn(self.failure)
                self.board.write("stopped", self.failure)
            if self.rank == 0:
                self._linger()
        self._crew.close()

    def _linger(self) -> None:
        """The store may go with this process: first let the others read why they stop, or end the turns of all."""
        # Reading why they stop takes the others a round or two; ending their turns may take them a while.
        deadline = time.monotonic() + (STAY_SECONDS if self.failure is None else 4.0)
        self._crew.look(now=True)
        while self._needing() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _needing(self) -> bool:
        """Whether some rank has still to read what is in the store. One that waits elsewhere may wait for this one."""
        if self.failure is not None:
            return bool(self._crew.living - set(self.board.read("stopped", range(self.world))))
        mine = self.turns.count, True
        states = self.board.read("state", self._crew.living).values()
        return any((s.count, not s.inside) < mine and not s.waits and not s.ended for s in states)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# Turns are counted over all models and meshes of a process: the process group is the one thing that they share. A watch
# goes when its group does.
_WATCHES: weakref.WeakKeyDictionary[Any, dict[int, Watch]] = weakref.WeakKeyDictionary()


def watch_of(mesh: DeviceMesh) -> Watch | None:
    """The watch over the ranks of `mesh`, which starts when it is first asked for; None for a mesh of one rank."""
    if mesh.size() == 1:
        return None
    group = dist.group.WORLD
    watches = _WATCHES.setdefault(group, {})
    if mesh.size() not in watches:
        watch = Watch(default_store(), mesh.get_rank(), mesh.size(), group, mesh.device_type)
        watches[mesh.size()] = watch
        watch.start()
    return watches[mesh.size()]
