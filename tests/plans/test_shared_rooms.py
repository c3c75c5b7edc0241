"""How stages of a rank share its memory, by arithmetic."""

from __future__ import annotations

from autoshard.plan.stage_search import StageNeeds, shared_room
from passes.predict.predict_step import StageFigures


def test_a_stage_alone_has_all() -> None:
    assert shared_room(1000, [StageNeeds(3000, 700)], []) == 1000


def test_what_runs_is_there_once() -> None:
    """As if memory were no matter 300 + 100 stay and 200 more run, of either: 600 bytes, of which there are half."""
    wanted = [StageNeeds(300, 200), StageNeeds(100, 200)]
    first = shared_room(300, wanted, [])
    assert first == 250  # half of 300 + 200
    # It made 140 of the 150 that would stay, and runs in 90. The other one has what is left.
    second = shared_room(300, wanted, [StageNeeds(140, 90)])
    assert second == 160
    # With 60 that stay and 100 that run both fit.
    assert 140 + 60 + 100 <= 300


def test_what_is_planned_runs_beside_the_others() -> None:
    """250 of 1,000 are left beside the first one running: half of what would stay of the other, which has half of its
    300."""
    wanted = [StageNeeds(500, 400), StageNeeds(500, 100)]
    assert shared_room(1000, wanted, [StageNeeds(400, 350)]) == 250 * (500 + 100) // 500


def test_nothing_is_left() -> None:
    assert shared_room(100, [StageNeeds(50, 10), StageNeeds(50, 10)], [StageNeeds(120, 10)]) == 0


def test_needs_are_of_all_pieces_in_flight() -> None:
    figures = StageFigures(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, held=100, kept=10, peak=117)
    assert StageNeeds.of(figures, 3) == StageNeeds(130, 7)
