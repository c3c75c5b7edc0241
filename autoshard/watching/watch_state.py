"""A rank's account of itself, and the judgement over those of all."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import lt


@dataclass(frozen=True)
class Turn:
    """key: the same on all ranks. history: a hash of the keys up to and with this one. detail: of this rank alone,
    for people (local shapes, say)."""

    number: int
    key: str
    history: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.key} ({self.detail})" if self.detail else self.key


class Turns:
    """The turns of one rank. Its main thread writes, the watch reads; a turn costs about a microsecond."""

    def __init__(self) -> None:
        self.count = 0
        self.inside = False
        self._history = 0
        self._last: deque[Turn] = deque(maxlen=32)

    def begin(self, key: str, detail: str = "") -> Turn:
        self.count += 1
        self._history = zlib.crc32(key.encode(), self._history)
        turn = Turn(self.count, key, self._history, detail)
        self._last.append(turn)
        self.inside = True
        return turn

    def end(self) -> None:
        self.inside = False

    def last(self) -> tuple[Turn, ...]:
        """The last turns, oldest first."""
        while True:
            try:
                return tuple(self._last)
            except RuntimeError:  # the main thread began a turn meanwhile
                continue


def first_difference(ours: Sequence[Turn], theirs: Sequence[Turn]) -> int | None:
    """The number of the first turn in which two ranks differ, of those that both have had; None if they agree.

    Where they parted before the turns that are still kept, the first of these.
    """
    known = {turn.number: turn.history for turn in ours}
    differing = (turn.number for turn in theirs if known.get(turn.number, turn.history) != turn.history)
    return next(differing, None)


STUCK_SECONDS = 8.0


@dataclass(frozen=True)
class State:
    """One rank at one moment.

    turns:   its last ones, oldest first. inside: whether it is still in the last.
    seconds: for how long it has been so.
    place:   file and line of the user's code where it is; "" while it computes and goes on.
    waits:   the function of torch.distributed in which its main thread sits outside any turn, "" if in none.
    ended:   how it left, "" if it is there.
    """

    rank: int
    beat: int = 0
    turns: tuple[Turn, ...] = ()
    inside: bool = False
    seconds: float = 0.0
    place: str = ""
    waits: str = ""
    ended: str = ""

    @property
    def count(self) -> int:
        return self.turns[-1].number if self.turns else 0


def judge(states: Mapping[int, State], before: Mapping[int, State] | None = None) -> str | None:
    """What is wrong between the ranks, None if nothing is known to be.

    Legal is: any rank late by any time, as long as it is busy. Not: two ranks with another history of turns; a rank in
    a turn that another will not take, since it has left or itself waits for somebody.

    before: the states of an earlier look. What a rank told may be half a second old: it may have waited for one that
    was late, and now be on its way with it. So who waits must have said so again since the other was in its turn.
    """
    return next(_faults(states, before), None)


def _faults(states: Mapping[int, State], before: Mapping[int, State] | None) -> Iterator[str]:
    first = states[min(states)]
    for state in states.values():
        number = first_difference(first.turns, state.turns)
        if number is not None:
            yield _different(states, number)
    inside = [s for s in states.values() if s.inside and not s.ended]
    if not inside:
        return
    ahead = max(inside, key=lambda s: s.count)
    behind = [s for s in states.values() if s.count < ahead.count and s is not ahead]
    gone = [s for s in behind if s.ended]
    if gone and ahead.seconds >= 2.0:  # what it tells of its last turn may be on its way
        yield _report(
            f"{_names(gone)} {gone[0].ended} before turn {ahead.count}, in which others wait",
            states,
            "the same number of calls on every rank: the same number of batches, and evaluation on all",
        )
    if _stuck(ahead, behind) and (before is None or _said_before(before, ahead, behind)):
        yield _report(
            f"the ranks wait for each other: turn {ahead.count} is of all ranks, and {_names(behind)} "
            f"{'waits' if len(behind) == 1 else 'wait'} elsewhere",
            states,
            "a call of the model, as any collective, on every rank; not under `if rank == 0`",
        )


def _stuck(ahead: State, behind: Sequence[State]) -> bool:
    """Whether all wait, one of them in a turn that the others have not begun."""
    waiting = all(s.waits and not s.inside and s.seconds >= STUCK_SECONDS for s in behind)
    return bool(behind) and waiting and ahead.seconds >= STUCK_SECONDS


def _said_before(before: Mapping[int, State], ahead: State, behind: Sequence[State]) -> bool:
    """Whether it was so at the earlier look, and those behind have told something since."""
    earlier = before.get(ahead.rank)
    if earlier is None or earlier.count != ahead.count or any(s.rank not in before for s in behind):
        return False
    then = [before[s.rank] for s in behind]
    return _stuck(earlier, then) and all(map(lt, (s.beat for s in then), (s.beat for s in behind)))


def _different(states: Mapping[int, State], number: int) -> str:
    return _report(
        f"the ranks do different things in turn {number}",
        states,
        "the same calls in the same order on every rank: shapes, train() and eval(), frozen parameters, "
        "backward and skipped steps alike",
        number,
    )


def _report(title: str, states: Mapping[int, State], remedy: str, number: int | None = None) -> str:
    lines: dict[str, list[State]] = {}
    for state in states.values():
        lines.setdefault(_line(state, number), []).append(state)
    told = "\n".join(f"  {_names(who)}: {line}" for line, who in lines.items())
    return f"{title}\n{told}\n  try: {remedy}"


def _line(state: State, number: int | None) -> str:
    turn = next((t for t in state.turns if t.number == number), state.turns[-1] if state.turns else None)
    done = "has made no call yet" if turn is None else f"turn {turn.number}, {turn}"
    if state.ended:
        return f"{done}; it {state.ended} since"
    where = f", at {state.place}" if state.place else ""
    waits = f", waits in {state.waits}" if state.waits and not state.inside else ""
    return f"{done}{waits}{where}"


def _names(states: list[State]) -> str:
    ranks = ", ".join(str(s.rank) for s in states)
    return f"rank {ranks}" if len(states) == 1 else f"ranks {ranks}"
