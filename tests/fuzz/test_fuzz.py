"""A part of `python -m tests.fuzz`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz.cases import ALONE, FAULT, OK, drawn_case, examined

FEW = 5
"""Cases of a test, about a second each."""


@pytest.mark.parametrize("first", [0, 5, 10, 15])
def test_random_modules(first: int) -> None:
    found = {number: examined(drawn_case(number)) for number in range(first, first + FEW)}
    faults = {number: one.said for number, one in found.items() if one.state == FAULT}
    assert not faults, "\n".join(f"{number}: {said}" for number, said in faults.items())
    states = Counter(one.state for one in found.values())
    assert states[OK] >= 2 and states[OK] + states[ALONE] >= 3, states


@pytest.mark.parametrize("number", [2054, 2127, 3189, 3540, 8220])
def test_what_was_a_fault(number: int) -> None:
    """Pieces that add to zeros; pieces of one operand of a `cat`; gradients of zeros; a ring with empty parts; a way
    that leads over sizes of a third layout."""
    case = drawn_case(number)
    found = examined(case)
    assert found.state in (OK, ALONE), f"{found.said}\n{case}"
