"""Two streams: examples by hand, and what must hold for any events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.timeline import Event, Timeline

Events = tuple[Event, ...]


def compute(seconds: float, *after: int) -> Event:
    return Event("compute", "compute", seconds, after)


def comm(seconds: float, *after: int) -> Event:
    return Event("comm", "comm", seconds, after)


def wait(*after: int) -> Event:
    return compute(0.0, *after)


BACKWARD = (compute(3), comm(4, 0), compute(2, 0), wait(1), compute(1, 3))
"""A product, the reduction of its result, another product meanwhile, then a reader of the reduction."""

EXAMPLES = {
    # name: events, efficiency, ends, exposed communication
    "nothing": ((), 0.5, (), 0.0),
    "one op": ((compute(2),), 0.5, (2,), 0.0),
    "one collective": ((comm(2),), 0.5, (2,), 2.0),
    "side by side, free": ((compute(2), comm(1)), 1.0, (2, 1), 0.0),
    "side by side, no gain": ((compute(2), comm(1)), 0.0, (3, 2), 1.0),
    "side by side, half": ((compute(2), comm(1)), 0.5, (2.5, 1.5), 0.5),
    "the longer one is the collective": ((compute(1), comm(2)), 0.5, (1.5, 2.5), 1.5),
    "waited for at once": ((compute(1), comm(2, 0), wait(1), compute(3, 2)), 1.0, (1, 3, 3, 6), 2.0),
    "one stream keeps its order": ((comm(1), comm(2), compute(1, 0)), 1.0, (1, 3, 2), 2.0),
    # 2 of the 4 seconds of the reduction pass behind the second product.
    "backward, free": (BACKWARD, 1.0, (3, 7, 5, 7, 8), 2.0),
    "backward, no gain": (BACKWARD, 0.0, (3, 9, 7, 9, 10), 4.0),
    # 2 s each side by side take 3 s; 2 s of the reduction are left.
    "backward, half": (BACKWARD, 0.5, (3, 8, 6, 8, 9), 3.0),
    # The collective queues behind another, which hides it from the computation it could overlap.
    "queued": ((comm(2), comm(1), compute(2), wait(1), compute(1, 3)), 1.0, (2, 3, 2, 3, 4), 1.0),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_by_hand(name: str) -> None:
    events, efficiency, ends, exposed = EXAMPLES[name]
    timeline = Timeline.of(events, efficiency)
    assert timeline.end == pytest.approx(ends)
    assert sum(timeline.exposed) == pytest.approx(exposed)
    assert timeline.seconds == pytest.approx(max(ends, default=0.0))


def test_an_event_starts_when_its_stream_and_its_operands_are_there() -> None:
    timeline = Timeline.of(BACKWARD, 0.5)
    assert timeline.start == pytest.approx((0, 3, 3, 8, 8))
    assert timeline.exposed == pytest.approx((0, 3, 0, 0, 0))


@st.composite
def programs(draw: st.DrawFn, links: int = 1) -> Events:
    events: list[Event] = []
    streams = [("compute", 0), *(("comm", link) for link in range(links))]
    for position in range(draw(st.integers(0, 12))):
        stream, link = draw(st.sampled_from(streams))
        seconds = draw(st.integers(0, 8)) / 2
        after = draw(st.sets(st.integers(0, position - 1), max_size=2)) if position else set()
        events.append(Event(f"e{position}", stream, seconds, tuple(sorted(after)), link=link))
    return tuple(events)


ANY = st.sampled_from((1, 2, 3)).flatmap(lambda links: programs(links))
"""Over one link or several."""


EFFICIENCIES = st.sampled_from((0.0, 0.25, 0.5, 0.9, 1.0))
SLACK = 1e-9


def of_stream(events: Events, stream: str) -> float:
    return sum(e.seconds for e in events if e.stream == stream)


def longest_chain(events: Events) -> float:
    """Through `after` and through each stream's order."""
    ends: list[float] = []
    last: dict[object, float] = {}
    for event in events:
        begin = max([last.get(event.queue, 0.0), *(ends[other] for other in event.after)])
        last[event.queue] = begin + event.seconds
        ends.append(last[event.queue])
    return max(ends, default=0.0)


@given(ANY, EFFICIENCIES)
def test_between_the_longest_chain_and_one_after_the_other(events: Events, efficiency: float) -> None:
    seconds = Timeline.of(events, efficiency).seconds
    total = of_stream(events, "compute") + of_stream(events, "comm")
    assert longest_chain(events) - SLACK <= seconds <= total + SLACK


@given(ANY)
def test_the_ends_of_efficiency(events: Events) -> None:
    total = of_stream(events, "compute") + of_stream(events, "comm")
    assert Timeline.of(events, 0.0).seconds == pytest.approx(total)
    assert Timeline.of(events, 1.0).seconds == pytest.approx(longest_chain(events))


@given(ANY, EFFICIENCIES)
def test_no_step_is_shorter_than_what_hides_of_its_chain_and_the_rest_of_all(
    events: Events, efficiency: float
) -> None:
    total = of_stream(events, "compute") + of_stream(events, "comm")
    least = (1.0 - efficiency) * total + efficiency * longest_chain(events)
    assert Timeline.of(events, efficiency).seconds >= least - SLACK


@given(ANY, EFFICIENCIES)
def test_exposed_time_is_what_computing_alone_does_not_take(events: Events, efficiency: float) -> None:
    timeline = Timeline.of(events, efficiency)
    assert timeline.seconds == pytest.approx(of_stream(events, "compute") + sum(timeline.exposed))
    hidden = of_stream(events, "comm") - sum(timeline.exposed)
    assert hidden >= -SLACK
    if not any(event.link for event in events):
        assert hidden <= min(of_stream(events, "comm"), of_stream(events, "compute")) + SLACK


@given(ANY, EFFICIENCIES)
def test_order_and_dependencies_hold(events: Events, efficiency: float) -> None:
    timeline = Timeline.of(events, efficiency)
    free: dict[object, float] = {}
    for i, event in enumerate(events):
        assert timeline.start[i] >= free.get(event.queue, 0.0) - SLACK
        assert all(timeline.start[i] >= timeline.end[other] - SLACK for other in event.after)
        assert timeline.end[i] - timeline.start[i] >= event.seconds - SLACK
        free[event.queue] = timeline.end[i]


@settings(max_examples=200)
@given(ANY, EFFICIENCIES, st.data())
def test_a_longer_event_never_shortens_the_step(
    events: Events, efficiency: float, data: st.DataObject
) -> None:
    if not events:
        return
    chosen = data.draw(st.integers(0, len(events) - 1))
    longer = list(events)
    longer[chosen] = replace(events[chosen], seconds=events[chosen].seconds + data.draw(st.floats(0, 4)))
    assert Timeline.of(longer, efficiency).seconds >= Timeline.of(events, efficiency).seconds - SLACK


@given(ANY, EFFICIENCIES, EFFICIENCIES)
def test_more_efficiency_never_lengthens_the_step(events: Events, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert Timeline.of(events, high).seconds <= Timeline.of(events, low).seconds + SLACK


def test_a_communication_may_have_an_efficiency_of_its_own() -> None:
    """Two that would hide behind as much computing each: the first is waited for where it starts."""
    events = [
        Event("a", "comm", 1.0, (), 0.0),
        Event("b", "comm", 1.0),
        Event("x", "compute", 2.0),
    ]
    timeline = Timeline.of(events, 1.0)
    assert timeline.end == (2.0, 3.0, 3.0) and timeline.exposed == (1.0, 0.0, 0.0)


def test_links_run_side_by_side() -> None:
    """By hand: at e = 0.5 all three at 1/2 until 2 s, then computing and one link at 2/3 until 3.5 s, then it alone."""
    events = [Event("in", "comm", 1.0), Event("out", "comm", 3.0, link=1), Event("x", "compute", 2.0)]
    timeline = Timeline.of(events, 0.5)
    assert timeline.end == pytest.approx((2.0, 4.5, 3.5))
    assert timeline.exposed == pytest.approx((0.5, 0.5 + 0.5 + 1.0, 0.0))


def test_nonsense_is_refused() -> None:
    with pytest.raises(AssertionError):
        Timeline.of((compute(1),), 1.5)
    with pytest.raises(AssertionError):
        Timeline.of((compute(-1),), 0.5)
    with pytest.raises(AssertionError):
        Timeline.of((compute(1, 0),), 0.5)
