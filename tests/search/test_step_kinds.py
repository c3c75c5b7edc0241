"""What the objective lets hide, against hand arithmetic and against two streams run one event at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from cost_model.timeline import Event, Timeline
from passes.canonicalize import canonicalize
from passes.capture import capture
from passes.ir.joint import JointGraph, ops_by_phase, result_index, tensor_operands
from passes.plan.transfers import HiddenReads, hidden_reads
from passes.search.search_space import overlapped_seconds
from passes.search.step_kinds import (
    EXPOSED,
    KINDS,
    MOVING,
    SEGMENTS,
    PhaseOverlap,
    StepKinds,
    corrected,
    kind_of,
    on_link,
    phase_paths,
    phase_seconds,
    step_kinds,
)

Seconds = dict[str, float]
Read = tuple[str, int]
ALL = (PhaseOverlap(1.0), PhaseOverlap(1.0, 0.0))


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.GELU())]
    captured = capture(nn.Sequential(*layers, nn.Linear(8, 8)), (torch.randn(4, 8),), {})
    return canonicalize(captured.joint)


def weight_reads(joint: JointGraph) -> list[Read]:
    """Of the products of the forward, in the order in which they run."""
    forward, _ = ops_by_phase(joint)
    at_hand = hidden_reads(joint).hides
    return [
        (node.name, i)
        for node in forward
        if "contract" in str(node.target)
        for i in range(len(tensor_operands(node)))
        if (node.name, i) in at_hand
    ]


def counted(
    kinds: StepKinds,
    ops: Seconds,
    reads: dict[Read, float],
    overlaps: tuple[PhaseOverlap, ...],
    links: dict[Read, int] | None = None,
) -> float:
    """The objective of a forward whose ops and transfers take these seconds. links: that they are over."""
    totals = np.zeros(KINDS)
    for name, seconds in ops.items():
        totals[kinds.nodes[name]] += seconds
    for read, seconds in reads.items():
        totals[on_link(kinds.reads[read], (links or {}).get(read, 0))] += seconds
    return phase_seconds(totals, overlaps)[0]


def one_second_each(joint: JointGraph) -> Seconds:
    forward, _ = ops_by_phase(joint)
    return {node.name: 1.0 for node in forward if result_index(node)[0] is node}


def test_the_first_gather_has_nothing_to_hide_behind_and_the_last_has_all(joint: JointGraph) -> None:
    ops = one_second_each(joint)
    kinds = step_kinds(joint, hidden_reads(joint), ops)
    first, *_, last = weight_reads(joint)
    computing = sum(ops.values())
    before = list(ops).index(first[0])
    assert before <= 0.02 * computing or first[0] == next(iter(ops))
    assert counted(kinds, ops, {first: 5.0}, ALL) == pytest.approx(computing + 5.0)
    assert counted(kinds, ops, {last: 5.0}, ALL) == pytest.approx(computing)
    assert counted(kinds, ops, {first: 5.0, last: 5.0}, ALL) == pytest.approx(computing + 5.0)


def test_what_is_awaited_counts_in_full_in_the_forward(joint: JointGraph) -> None:
    ops = one_second_each(joint)
    hidden = hidden_reads(joint)
    none = HiddenReads(frozenset(), frozenset())
    reads = weight_reads(joint)
    awaited = step_kinds(joint, none, ops)
    at_hand = step_kinds(joint, hidden, ops)
    seconds = {reads[-1]: 3.0, reads[-2]: 2.0}
    assert counted(awaited, ops, seconds, ALL) == pytest.approx(sum(ops.values()) + 5.0)
    assert counted(at_hand, ops, seconds, ALL) == pytest.approx(sum(ops.values()))
    assert counted(at_hand, ops, seconds, (PhaseOverlap(0.0), ALL[1])) == pytest.approx(
        sum(ops.values()) + 5.0
    )


@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_of_gathers_is_faster(joint: JointGraph, seed: int, links: int) -> None:
    """Gathers that are all issued at once, in the order in which they are read: no prefetch is deeper."""
    rng = random.Random(seed)
    ops = {name: rng.random() ** 3 for name in one_second_each(joint)}
    scale = rng.choice([0.2, 1.0, 4.0])
    reads = {read: scale * rng.random() ** 2 for read in weight_reads(joint)}
    over = {read: rng.randrange(links) for read in reads}
    efficiency = rng.choice([0.0, 0.5, 0.8, 1.0])
    events = [Event(f"gather {read}", "comm", s, link=over[read]) for read, s in reads.items()]
    arrival = {name: i for i, (name, _) in enumerate(reads)}
    for name, seconds in ops.items():
        after = (arrival[name],) if name in arrival else ()
        events.append(Event(name, "compute", seconds, after))
    timeline = Timeline.of(events, efficiency).seconds
    kinds = step_kinds(joint, hidden_reads(joint), ops)
    overlaps = PhaseOverlap(efficiency), ALL[1]
    assert counted(kinds, ops, reads, overlaps, over) <= timeline * (1 + 1e-9)


def test_gathers_over_two_links_hide_side_by_side(joint: JointGraph) -> None:
    """By hand: over either link 0.6 of what is computed, which hides. Over one link 0.2 would stick out."""
    ops = one_second_each(joint)
    kinds, last = step_kinds(joint, hidden_reads(joint), ops), weight_reads(joint)[-2:]
    whole = sum(ops.values())
    reads = dict.fromkeys(last, 0.6 * whole)
    assert counted(kinds, ops, reads, ALL) >= 1.2 * whole
    assert counted(kinds, ops, reads, ALL, {last[0]: 1}) == pytest.approx(whole)
    half = (PhaseOverlap(0.5), ALL[1])
    assert counted(kinds, ops, reads, half, {last[0]: 1}) == pytest.approx(0.5 * 2.2 * whole + 0.5 * whole)


@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_the_groups_of_paths_say_the_same(seed: int, links: int) -> None:
    rng = np.random.default_rng(seed)
    totals = rng.random(KINDS)
    totals[EXPOSED] = 0.0
    if links == 1:
        for phase in range(2):
            first = on_link(kind_of(phase, MOVING[0], 0), 1)
            totals[first : first + len(MOVING) * SEGMENTS] = 0.0
    overlaps = PhaseOverlap(0.7), PhaseOverlap(0.8, 0.3)
    wanted = sum(phase_seconds(totals, overlaps))
    assert overlapped_seconds(totals, phase_paths(overlaps, links)) == pytest.approx(wanted)


def test_products_of_weights_gradients_are_what_awaited_collectives_hide_behind(joint: JointGraph) -> None:
    """Of a backward all of whose ops but one take nothing: an awaited transfer hides behind a weight's gradient, by the
    share that may, and behind the gradient of a layer's input not at all."""
    _, backward = ops_by_phase(joint)
    hidden = hidden_reads(joint)
    kinds = step_kinds(joint, hidden, {node.name: 1.0 for node in backward})
    bulk = {node: kinds.nodes[node.name] % 6 == 3 for node in backward}
    shapes = {n.name: tuple(n.meta["val"].shape) for n in backward if "contract" in str(n.target) and bulk[n]}
    weights = next(name for name, shape in shapes.items() if shape == (8, 8))
    inputs = next(name for name, shape in shapes.items() if shape == (4, 8))
    awaited = next(
        read
        for read, kind in kinds.reads.items()
        if read not in hidden.hides and kind > KINDS // 2 and kind % 6 == 3
    )
    for name, share, expected in ((weights, 1.0, 6.0), (weights, 0.5, 8.0), (inputs, 1.0, 10.0)):
        totals = np.zeros(KINDS)
        totals[kinds.nodes[name]] = 6.0
        totals[kinds.reads[awaited]] = 4.0
        assert phase_seconds(totals, (PhaseOverlap(1.0), PhaseOverlap(1.0, share)))[1] == pytest.approx(
            expected
        ), name


@pytest.mark.parametrize("seed", range(20))
def test_corrected_overlap_takes_what_the_timeline_took(seed: int) -> None:
    rng = np.random.default_rng(seed)
    totals = rng.random(KINDS)
    totals[EXPOSED] = 0.0
    wanted = [float(rng.uniform(1.0, 40.0)) for _ in range(2)]
    overlaps = corrected(totals, (PhaseOverlap(0.8), PhaseOverlap(0.8, 0.25)), wanted)
    assert phase_seconds(totals, overlaps) == pytest.approx(wanted)
    assert all(0.0 <= o.efficiency <= 1.0 and 0.0 <= o.awaited <= 1.0 for o in overlaps)
