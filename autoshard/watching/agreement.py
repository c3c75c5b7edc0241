"""All ranks go on, or all raise: exchanges that come before the first collective.

They use the key-value store that the process group was started with, not collectives: ranks that would run different
programs can still talk. Nobody waits for a rank that is gone or elsewhere (`autoshard.watching`); one that is busy may
take its time.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

import cost_model.errors
from autoshard.watching.crew import Stopped
from autoshard.watching.watch import Watch, watch_of
from cost_model.errors import AutoshardError, PlanError, RankError, error_line, log

T = TypeVar("T")


def agree(mesh: DeviceMesh, fingerprint: Mapping[str, str], *, what: str = "a comparison") -> None:
    """Compare what the ranks are about to run; raise PlanError on all of them if it differs.

    fingerprint: what is compared -> its hash or text ("plan", "graph", "inputs", "torch", ...). The
                 error names the first difference of every rank that differs from rank 0.
    """
    first, *others = everyones(mesh, dict(fingerprint), what=what)
    lines = ["the ranks are about to run different programs"]
    for rank, other in enumerate(others, 1):
        name = next((n for n in [*first, *other] if first.get(n) != other.get(n)), None)
        if name is not None:
            lines.append(f"  {name}: {other.get(name)!r} on rank {rank}, {first.get(name)!r} on rank 0")
    if len(lines) > 1:
        lines.append("  try: the same code, inputs and library versions on every rank")
        raise PlanError("\n".join(lines))


def collectively(
    mesh: DeviceMesh,
    fn: Callable[[], T],
    timeout: timedelta | None = None,
    *,
    what: str = "a check",
    detail: str = "",
) -> T:
    """fn() on every rank; if it raises on any, then this raises on all, and nobody waits forever.

    A rank where fn raised re-raises that. The others raise an error of the same class if it is one of
    autoshard's, else PlanError, saying which rank failed and how. fn must not talk to other ranks.

    what:    the name of this exchange, the same on all ranks; detail: of this rank alone, for messages.
    timeout: the longest to wait for the others after fn; without it as long as they live and are busy.

    Raises RankError if a rank is gone or does something else. Ctrl-C on one rank ends it on all.
    """
    with _exchange(mesh, what, detail, timeout) as exchange:
        result, error = _tried(exchange, fn)
        replies = exchange.swap(pickle.dumps(_described(error)))
        if error is not None:
            raise error  # in the turn: what another rank's end has caused is explained by it
    for rank, reply in enumerate(replies):
        _raise_for(rank, pickle.loads(reply))
    return result  # type: ignore[return-value]


def everyones(
    mesh: DeviceMesh, value: T, timeout: timedelta | None = None, *, what: str = "an exchange"
) -> list[T]:
    """Every rank's `value`, by rank. It must pickle. RankError as in `collectively`."""
    with _exchange(mesh, what, "", timeout) as exchange:
        return [pickle.loads(text) for text in exchange.swap(pickle.dumps(value))]


def from_first(
    mesh: DeviceMesh,
    fn: Callable[[], T],
    timeout: timedelta | None = None,
    *,
    what: str = "a result of rank 0",
    meanwhile: Callable[[], object] | None = None,
) -> T:
    """Rank 0's fn(), on all ranks; if it raises there, all raise. The result must pickle.

    meanwhile: what the other ranks do before they wait. It does not raise, nor talk to other ranks.
    """
    if mesh.size() == 1:
        return fn()
    with _exchange(mesh, what, "", timeout) as exchange:
        if mesh.get_rank() != 0:
            if meanwhile is not None:
                exchange.run(meanwhile)
            value, failure = pickle.loads(exchange.swap(pickle.dumps((None, None)))[0])
            _raise_for(0, failure)
            return value
        reply, error = _tried(exchange, lambda: pickle.dumps((fn(), None)))
        exchange.swap(reply or pickle.dumps((None, _described(error))))
        if error is not None:
            raise error
        return pickle.loads(reply or b"")[0]


@contextmanager
def in_company(mesh: DeviceMesh, what: str) -> Generator[None]:
    """A block in which ranks wait for each other in collectives: a rank that raises in it ends the work of all.

    It re-raises its own error; the others get RankError, which names it and `what`.
    """
    if (watch := watch_of(mesh)) is None:
        yield
        return
    try:
        with watch.turn(what):
            yield
    except RankError:
        raise
    except BaseException as error:
        watch.fail(
            f"rank {watch.rank} failed in {what}: {error_line(error)}\n  try: its own output says where"
        )
        raise


class _Alone:
    """An exchange of one rank."""

    def run(self, fn: Callable[[], T]) -> T:
        return fn()

    def swap(self, message: bytes) -> list[bytes]:
        return [message]


class _Exchange:
    """One exchange of all ranks, and this rank's part in it."""

    def __init__(self, watch: Watch, what: str, timeout: timedelta | None) -> None:
        self._watch, self._what = watch, what
        self._timeout = None if timeout is None else timeout.total_seconds()
        self._number = watch.turns.count

    def run(self, fn: Callable[[], T]) -> T:
        """fn(), ended with RankError when another rank fails meanwhile."""
        try:
            with self._watch.stoppable.block():
                return fn()
        except Stopped:
            self._watch.check()
            raise

    def swap(self, message: bytes) -> list[bytes]:
        """Everybody's message, by rank."""
        board, name = self._watch.board, f"exchange{self._number}"
        board.write(name, (self._what, message))
        self._wait(name)
        said = board.read(name, range(board.world))
        if (before := self._watch.erasable(name)) is not None:
            board.erase(before)
        other = next((rank for rank, (what, _) in said.items() if what != said[0][0]), None)
        if other is not None:
            self._watch.fail(
                f"the ranks do different things in turn {self._number}\n"
                f"  rank 0: {said[0][0]}\n  rank {other}: {said[other][0]}\n"
                "  try: the same calls of autoshard in the same order on every rank"
            )
            self._watch.check()
        return [text for _, text in said.values()]

    def _wait(self, name: str) -> None:
        board, pause, begun = self._watch.board, 0.0005, time.monotonic()
        notice = begun + 30.0  # seconds of silence that people bear
        while not board.complete(name):
            self._watch.check()
            now = time.monotonic()
            if self._timeout is not None and now - begun > self._timeout:
                raise RankError(
                    f"ranks {_listed(board.absent(name))} did not come within {self._timeout:.0f} s for {self._what}\n"
                    "  try: look there first: they failed earlier, or run something else"
                )
            if now > notice:
                absent = _listed(board.absent(name))
                log.warning("waiting since %.0f s for rank(s) %s: %s", now - begun, absent, self._what)
                notice = now + 2 * (now - begun)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


@contextmanager
def _exchange(
    mesh: DeviceMesh, what: str, detail: str, timeout: timedelta | None
) -> Generator[_Alone | _Exchange]:
    if (watch := watch_of(mesh)) is None:
        yield _Alone()
        return
    try:
        with watch.turn(what, detail):
            yield _Exchange(watch, what, timeout)
    except Exception:
        raise
    except BaseException as error:
        watch.fail(
            f"rank {watch.rank} was interrupted ({type(error).__name__}) during {what}\n  try: start again"
        )
        raise


def _tried(exchange: _Alone | _Exchange, fn: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """(what it returns, what it raises): an end of all ranks is raised."""
    try:
        return exchange.run(fn), None
    except RankError:
        raise
    except Exception as raised:
        return None, raised


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _described(error: Exception | None) -> tuple[str, str] | None:
    """Name and text; of a kind that only one module knows, the name of the public kind that it is one of."""
    if error is None:
        return None
    names = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == cost_model.errors.__name__)
    return next(names, type(error).__name__), str(error)


def _raise_for(rank: int, failure: tuple[str, str] | None) -> None:
    if failure is None:
        return
    name, text = failure
    kind = getattr(cost_model.errors, name, None)
    if isinstance(kind, type) and issubclass(kind, AutoshardError):
        raise kind(f"{text}\n  raised on rank {rank}")
    raise PlanError(f"rank {rank} failed: {name}: {text}")
