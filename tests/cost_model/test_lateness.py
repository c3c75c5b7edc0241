"""Ranks that come late: the curve, its file, and how it follows from what was timed. Values by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cost_model.errors import ProfileError
from cost_model.measure.links import lateness
from cost_model.measurements import Lateness
from cost_model.profile import Profile, profile_text

LATE = Lateness((1.0, 4.0, 16.0), (0.0, 1.5, 2.5))


@pytest.mark.parametrize(
    ("computed", "seconds"),
    [(0.0, 0.0), (1.0, 0.0), (2.0, 0.5), (4.0, 1.5), (10.0, 2.0), (16.0, 2.5), (100.0, 2.5)],
)
def test_linear_between_the_points(computed: float, seconds: float) -> None:
    assert LATE.after(computed, 2) == pytest.approx(seconds)


@pytest.mark.parametrize(("ranks", "seconds"), [(4, 1.5), (2, 1.5 * (1 / 3) / (3 / 5)), (1, 0.0)])
def test_fewer_ranks_are_less_far_apart(ranks: int, seconds: float) -> None:
    """By the expected range of as many uniform values: 1/3 of the width for two, 3/5 for four."""
    assert replace(LATE, ranks=4).after(4.0, ranks) == pytest.approx(seconds)


def test_what_a_collective_takes_longer_behind_more_computing() -> None:
    """2 s behind the first; 2.5, 3 and 2 behind the others, of which the last is noise."""
    found = lateness([1.0, 4.0, 16.0, 48.0], [3.0, 6.5, 19.0, 50.0], 4)
    assert found == Lateness((1.0, 4.0, 16.0, 48.0), (0.0, 0.5, 1.0, 1.0), 4)


def test_computing_that_took_no_longer_is_no_point() -> None:
    assert lateness([1.0, 1.0, 16.0], [3.0, 6.0, 19.0], 2) == Lateness((1.0, 16.0), (0.0, 3.0), 2)
    assert lateness([1.0, 1.0], [3.0, 6.0], 2) is None


def test_a_profile_holds_it(round_profile: Profile) -> None:
    late = replace(round_profile, lateness=Lateness((1e-3, 4e-3), (0.0, 1.5e-3), 8))
    assert Profile.from_json(late.to_json(), "text") == late
    assert late.hash() != round_profile.hash()
    assert "late by 1.5 ms behind 4 ms of computing" in profile_text(late)
    without = json.loads(round_profile.to_json())
    assert "lateness" not in without  # as in older files
    assert "late by" not in profile_text(round_profile)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Lateness((1e-3, 4e-3), (0.0,)), "field lateness needs a time for each time of computing"),
        (Lateness((4e-3, 1e-3), (0.0, 1e-3)), "field lateness needs increasing times of computing"),
        (Lateness((1e-3, 4e-3), (1e-3, 0.0)), "field lateness says that ranks come earlier"),
        (Lateness((1e-3, float("nan")), (0.0, 1e-3)), "field lateness.computing_seconds"),
        (Lateness((1e-3, 4e-3), (0.0, -1e-3)), "field lateness.seconds"),
        (Lateness((1e-3, 4e-3), (0.0, 1e-3), 1), "field lateness needs two ranks"),
    ],
)
def test_what_it_cannot_be(round_profile: Profile, wrong: Lateness, message: str) -> None:
    with pytest.raises(ProfileError, match=message.replace(".", r"\.")):
        replace(round_profile, lateness=wrong)
