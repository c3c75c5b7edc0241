"""What runs calls of several sizes, as they are verified."""

from __future__ import annotations

from typing import Any

import pytest

import autoshard.verification.simulated_step as simulated
import autoshard.verification.verify_plan as verification
from autoshard.verification.simulated_step import Runs


def noted_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of each call from now on whether a program of its own ran it, or one for all sizes."""
    by: list[str] = []
    real = simulated.SimulatedSizes.runs

    def noted(*given: Any) -> Runs:
        found = real(*given)
        by.append(found.by)
        return found

    monkeypatch.setattr(verification.SimulatedSizes, "runs", noted)
    return by
