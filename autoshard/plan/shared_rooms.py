"""How much of a rank's memory each of its stages may take: several stages of one rank share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.predict.predict_stage import StageFigures


@dataclass(frozen=True)
class StageNeeds:
    """Bytes of one stage. stays: while others run, what it holds and its pieces in flight keep; runs: more, while it
    runs itself."""

    stays: int
    runs: int

    @staticmethod
    def of(figures: StageFigures, flight: int) -> StageNeeds:
        return StageNeeds(figures.held + flight * figures.kept, figures.running)


def shared_room(limit: int, wanted: Sequence[StageNeeds], planned: Sequence[StageNeeds]) -> int:
    """Bytes for the first of a rank's stages that is not planned yet, itself running.

    wanted: of all its stages, as if memory were no matter; planned: of the first of them, as they are. What is left is
    shared as the others would share it if all of them became smaller alike; one stage runs at a time, so the room in
    which stages run is there once. The last one gets all that is left.
    """
    left, rest = limit - sum(one.stays for one in planned), wanted[len(planned) :]
    runs = max(one.runs for one in rest)
    share = lambda room, of: max(room, 0) * (rest[0].stays + rest[0].runs) // max(1, of)
    room = share(left, sum(one.stays for one in rest) + runs)
    if not planned:
        return room
    # Those that are planned run beside what the others hold.
    beside = left - max(one.runs for one in planned)
    return min(room, share(beside, sum(one.stays for one in rest)))
