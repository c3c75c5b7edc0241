"""Marks of a training loop, cut into steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.reporting.recorder import Mark, StepTimes, steps_of
from cost_model.measure.clock import Marks

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


def log(*phases: tuple[str, float, float]) -> list[Mark]:
    """Marks of (phase, begin, end)."""
    return [
        mark
        for phase, begin, end in phases
        for mark in (Mark(phase, "begin", begin), Mark(phase, "end", end))
    ]


def step(seconds: float, forward: float, backward: float, optimizer: float) -> StepTimes:
    return StepTimes(seconds, {FORWARD: forward, BACKWARD: backward, OPTIMIZER: optimizer})


def test_a_step_lasts_until_the_next_begins() -> None:
    marks = log((FORWARD, 0, 2), (BACKWARD, 3, 7), (OPTIMIZER, 7, 8), (FORWARD, 10, 13), (BACKWARD, 13, 16))
    marks += log((OPTIMIZER, 17, 18))
    found = steps_of(marks, 20, Marks())
    assert found == [step(10, 2, 4, 1), step(10, 3, 3, 1)]
    assert [s.other for s in found] == [3, 3]


def test_accumulated_gradients_are_one_step() -> None:
    marks = log((FORWARD, 0, 1), (BACKWARD, 1, 3), (FORWARD, 3, 4), (BACKWARD, 4, 6), (OPTIMIZER, 6, 7))
    assert steps_of(marks, 8, Marks()) == [step(8, 2, 4, 1)]


def test_without_an_optimizer_a_step_ends_with_the_backward() -> None:
    marks = log((FORWARD, 0, 1), (FORWARD, 1, 2), (BACKWARD, 2, 4), (FORWARD, 5, 6), (BACKWARD, 6, 8))
    assert steps_of(marks, 9, Marks()) == [step(5, 2, 2, 0), step(4, 1, 2, 0)]


def test_pieces_of_a_batch_are_one_step() -> None:
    marks = log((FORWARD, 0, 1), (BACKWARD, 1, 3), (FORWARD, 3, 4), (BACKWARD, 4, 6))
    marks = [replace(mark, last=False) for mark in marks[:4]] + marks[4:]
    assert steps_of([*marks, *log((FORWARD, 7, 8))], 9, Marks()) == [step(7, 2, 4, 0), step(2, 1, 0, 0)]


def test_forwards_alone_are_steps() -> None:
    assert steps_of(log((FORWARD, 0, 1), (FORWARD, 2, 4)), 4, Marks()) == [
        step(2, 1, 0, 0),
        step(2, 2, 0, 0),
    ]


def test_what_comes_before_the_first_forward_is_no_step() -> None:
    marks = log((OPTIMIZER, 0, 1), (FORWARD, 2, 3), (OPTIMIZER, 3, 4))
    assert steps_of(marks, 5, Marks()) == [step(3, 1, 0, 1)]


@pytest.mark.parametrize("marks", [[], log((BACKWARD, 0, 1))])
def test_no_forward_no_step(marks: list[Mark]) -> None:
    assert steps_of(marks, 5, Marks()) == []
