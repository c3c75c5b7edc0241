"""Streams side by side, one of computing and one of communicating for each link: how long a step takes with overlap.

Each stream runs its events in the order they were issued. An event starts when its stream is free and
all events it comes `after` have ended; waiting for a collective is a computing event, of no length, that
comes after it. Groups within a host and groups between hosts use other wires, and communication libraries run them in
streams of their own.

Streams that are busy at once slow each other down. With an overlap efficiency e, a computation of a
seconds and a communication of b seconds that start together take

    a + b - e * min(a, b)

so e = 1 is free overlap and e = 0 gains nothing over one after the other. A communication may have an e of its own,
such as 0 where it is waited for as it starts. As a fluid: while k streams are
busy, each proceeds at the rate 1 / (k - (k - 1) e); alone, at 1.

    e = 0.5, compute 2 s, communication 1 s:  both at 2/3 until 1.5 s, then compute alone for the
                                              last 1 s: 2.5 s

*Invariants*, with S the seconds of all events together

- max(seconds of a stream, longest chain of events) <= seconds <= S;
- seconds = S where e = 0: one of the streams always has something to do;
- seconds >= (1 - e) S + e (longest chain of events): at any time the share (1 - e) of what all streams get done and the
  share e of what the fastest does are 1 together;
- seconds never falls when an event gets longer or e gets smaller. (No way to let a stream idle on
  purpose overlaps more: the schedule that never waits without need is the shortest.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stream = Literal["compute", "comm"]
Queue = tuple[Stream, int]


@dataclass(frozen=True)
class Event:
    """seconds: its length when nothing else runs. after: positions of earlier events it waits for. efficiency: of a
    communication, the overlap efficiency beside it; None: the timeline's. link: that it is over; 0 of computing."""

    name: str
    stream: Stream
    seconds: float
    after: tuple[int, ...] = ()
    efficiency: float | None = None
    link: int = 0

    @property
    def queue(self) -> Queue:
        return self.stream, self.link


@dataclass(frozen=True)
class Timeline:
    """When each event runs.

    start, end: seconds from the beginning, per event.
    exposed:    per event, how much longer the step takes for it. For a communication it is the time in which
                the compute stream stood still plus the time by which it was slowed down, in equal parts where several
                run; for a computing event it is 0. The sum is what the step would save if communication took no time.
    """

    events: tuple[Event, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
    exposed: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The end of the last event."""
        return max(self.end, default=0.0)

    @staticmethod
    def of(events: Sequence[Event], overlap_efficiency: float) -> Timeline:
        """Run `events`. overlap_efficiency: in [0, 1], as a profile states it."""
        assert 0.0 <= overlap_efficiency <= 1.0, overlap_efficiency
        for position, event in enumerate(events):
            assert event.seconds >= 0.0 and 0.0 <= (event.efficiency or 0.0) <= 1.0, event
            assert all(0 <= other < position for other in event.after), (position, event)
        return _Run(tuple(events), overlap_efficiency).finish()


class _Run:
    """All streams, advanced from one end of an event to the next."""

    def __init__(self, events: tuple[Event, ...], efficiency: float) -> None:
        self.events = events
        self.efficiency = efficiency
        self.now = 0.0
        self.left = [event.seconds for event in events]
        self.start = [0.0] * len(events)
        self.end: list[float | None] = [None] * len(events)
        self.exposed = [0.0] * len(events)
        self.queues: dict[Queue, list[int]] = {("compute", 0): []}
        """Events that are not finished, the next one last; computing first."""
        for i in reversed(range(len(events))):
            self.queues.setdefault(events[i].queue, []).append(i)

    def finish(self) -> Timeline:
        started: dict[Queue, int | None] = dict.fromkeys(self.queues)
        while any(self.queues.values()):
            for queue, waiting in self.queues.items():
                started[queue] = self._running(waiting, started[queue])
            compute, *comms = started.values()
            self._advance(compute, [comm for comm in comms if comm is not None])
        ends = tuple(end for end in self.end if end is not None)
        return Timeline(self.events, tuple(self.start), ends, tuple(self.exposed))

    def _running(self, queue: list[int], before: int | None) -> int | None:
        """The event that the stream is at, if it can run. Records when it began."""
        if not queue:
            return None
        head = queue[-1]
        if head == before:
            return head
        if any(self.end[other] is None for other in self.events[head].after):
            return None
        self.start[head] = self.now
        return head

    def _advance(self, compute: int | None, comms: list[int]) -> None:
        """Advance until the first of the running events ends."""
        # The first event not finished has all it waits for, so one of the streams always runs.
        assert compute is not None or comms
        running = comms if compute is None else [*comms, compute]
        own = (self.events[comm].efficiency for comm in comms)
        # Of a second of each beside another stream, the share that hides nothing.
        lost = [1.0 - (self.efficiency if one is None else one) for one in own]
        stretch = 1.0 + sum(lost) - (max(lost) if compute is None else 0.0)
        work = min(self.left[i] for i in running)
        elapsed = work * stretch
        self.now += elapsed
        for i in running:
            self.left[i] -= work
            if self.left[i] <= 0.0:
                self.end[i] = self.now
                self.queues[self.events[i].queue].pop()
        for comm in comms:
            self.exposed[comm] += (elapsed - (0.0 if compute is None else work)) / len(comms)
