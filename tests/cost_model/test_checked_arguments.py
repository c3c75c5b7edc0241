"""Arguments that are whole numbers."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.arguments import checked_micro_batches, checked_race
from cost_model.errors import ShardingError, checked_count


def test_integers_of_numpy_are_taken_as_pythons() -> None:
    for found in (
        checked_count(np.int64(3), "seed"),
        checked_micro_batches(np.int32(3)),
        checked_race(np.int64(3), False),
    ):
        assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [True, np.float64(3.0), "3", np.int64(-1), 2**63, np.array([3])])
def test_what_is_no_count(value: object) -> None:
    with pytest.raises(ShardingError, match=r"seed is .*\n  try: an integer, at least 0"):
        checked_count(value, "seed")
