"""What this rank tells the others about itself."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from autoshard.watching.board import Board
from autoshard.watching.idling import Idling
from autoshard.watching.turns import Turns
from autoshard.watching.watch_state import State
from autoshard.watching.whereabouts import whereabouts

__all__ = ["PERIOD_SECONDS", "Telling"]

PERIOD_SECONDS = 0.5
BEAT_SECONDS = 2.0
LOOK_SECONDS = 1.0


class Telling:
    """Of the thread that makes it, by another. told: the last state that the others can read."""

    def __init__(self, board: Board, turns: Turns) -> None:
        self._board, self._turns = board, turns
        self.told = State(board.rank)
        self._told_at = self._since = time.monotonic()
        self._main = threading.get_ident()
        self._idling = Idling(threading.get_native_id())

    def tell(self) -> None:
        """What has changed, and now and then that nothing has."""
        state = self.state()
        changed = (state.turns[-1:], state.inside, state.waits) != (
            self.told.turns[-1:],
            self.told.inside,
            self.told.waits,
        )
        now = time.monotonic()
        if changed:
            self._since = now
            state = replace(state, seconds=0.0)
        stuck = state.inside or state.waits
        if changed or now - self._told_at >= (PERIOD_SECONDS if stuck else BEAT_SECONDS):
            self._board.write("state", state)
            self.told, self._told_at = state, now

    def state(self) -> State:
        """As it is now."""
        # In torch.distributed a busy thread works on DTensors; it does not wait there.
        idle = self._idling.is_idle()
        inside, seconds = self._turns.inside, time.monotonic() - self._since
        # To look takes half a millisecond, which a loop that goes on is not to pay.
        looks = idle or seconds >= LOOK_SECONDS
        place, waits = whereabouts(self._main) if looks else ("", "")
        return State(
            self._board.rank,
            self.told.beat + 1,
            self._turns.last(),
            inside,
            seconds,
            place,
            waits if not inside and idle else "",
        )
