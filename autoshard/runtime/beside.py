"""Work beside the steps of this process, which it does not slow: in a child that runs when a core is idle."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from autoshard.refine.refine import ToTime
from autoshard.refine.time_work import Timing, timing
from autoshard.runtime.executable import Home
from autoshard.runtime.process_groups import local_device
from cost_model.errors import log
from cost_model.timed import TimedPrices
from passes.compile.single_kernel import compile_group
from passes.ir.torch_inductor import compiles_in_child
from passes.predict.step_work import KernelCase


class Talk:
    """The worker's end: it says things, and hears answers."""

    def __init__(self, talk: Connection) -> None:
        self._talk, self.recv = talk, talk.recv

    def send(self, value: Any) -> None:
        self._talk.send(("said", value))


@dataclass(frozen=True)
class Better:
    """News of a search: a plan that takes less than the one that runs. data: its JSON."""

    data: Any


Search = Callable[[Talk], object]
"""Sends `Better`, and cases to time, of which it receives the times."""
TIMING_SHARE = 0.02
"""Of the steps' time, for timing kernels and collectives."""


class Beside:
    """work(talk) runs beside this process: in a child of it, or in a thread where the work is for a device that a child
    cannot use. What it sends is news; what is answered it receives. When it has ended, `ended` is true; error says what
    ended it early. A child sees this process as it is now; what it changes is its own."""

    def __init__(self, work: Search, *, in_child: bool = True) -> None:
        self._talk, theirs = multiprocessing.Pipe()
        self.error: str | None = None
        self.ended = False
        self._pid = 0
        if not in_child:
            threading.Thread(target=_worked, args=(work, theirs), daemon=True).start()
            return
        # Not multiprocessing's: a rank that it started as a daemon may have no children of its kind.
        with warnings.catch_warnings():
            # 3.12 warns of forks where there are threads: the child uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            try:
                _in_child(work, theirs)
            finally:
                os._exit(0)
        theirs.close()

    def news(self) -> Any:
        """What was sent next; None: nothing yet, or no more."""
        try:
            if self.ended or not self._talk.poll():
                return None
            kind, value = self._talk.recv()
        except (EOFError, OSError):
            kind, value = "error", "the process is gone"
        if kind == "said":
            return value
        self.error = value
        self.end()
        return None

    def answer(self, value: Any) -> None:
        with suppress(OSError):  # it is gone, which `news` says
            self._talk.send(value)

    def end(self) -> None:
        """Whatever it does."""
        if self.ended:
            return
        self.ended = True
        self._talk.close()
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _worked(work: Search, talk: Connection) -> None:
    end: tuple[str, str | None] = ("ended", None)
    try:
        work(Talk(talk))
    except BaseException as error:  # whatever it is, the steps go on
        log.debug("beside the steps: %s", error, exc_info=True)
        end = "error", f"{type(error).__name__}: {error}"
    with suppress(OSError):
        talk.send(end)
        talk.close()


def _in_child(work: Search, talk: Connection) -> None:
    # PR_SET_PDEATHSIG of prctl(2).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, and ends the child with it
    _let_go(talk.fileno())
    with suppress(OSError):
        # Of a child: beside a busy process it gets a tenth of a core.
        os.nice(10)
    os.environ["AUTOSHARD_PROGRESS"] = "0"
    gc.freeze()  # a collection would write to every page that is shared with the parent
    with compiles_in_child():
        _worked(work, talk)


def _let_go(own: int) -> None:
    """Connections of the parent end with the parent: here they are exchanged for nothing."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) not in (own, nothing) and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.dup2(nothing, int(name))


def compiling(home: Home, work: Callable[[], object]) -> Beside:
    """Into the compiler's cache on disk. A child of a process that uses a GPU cannot use it."""
    return Beside(lambda talk: work(), in_child=home.mesh.device_type == "cpu")


class Slices:
    """Times some cases, one after the other, in their share of the steps' time. All ranks together."""

    def __init__(self, home: Home, asked: ToTime) -> None:
        self._home, self._left = home, list(asked.cases)
        self._begun, self._used = time.monotonic(), 0.0
        self._open = ExitStack()
        self._timing: Timing | None = None
        groups = [case for case in asked.cases if isinstance(case, KernelCase) and case.fused]
        device, backend = local_device(home.mesh), home.settings.backend
        compiled = lambda: [compile_group(case, device, backend) for case in groups]
        self._compiling = compiling(home, compiled) if groups else None

    def waits(self) -> bool:
        """Whether nothing is to be timed now, as this rank sees it."""
        if self._compiling is not None:
            self._compiling.news()
            if not self._compiling.ended:
                return True
        return self._used > TIMING_SHARE * (time.monotonic() - self._begun)

    def step(self) -> TimedPrices | None:
        """Of one more case; what was found of all when that was the last."""
        begin = time.monotonic()
        if self._timing is None:
            asked = timing(self._home.mesh, backend=self._home.settings.backend)
            self._timing = self._open.enter_context(asked)
        self._timing.one(self._left.pop(0))
        self._used += time.monotonic() - begin
        if self._left:
            return None
        self._open.close()
        return self._timing.prices
