"""The modules of situations, by a short name."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from tests.scripts import (
    situations_around,
    situations_calls,
    situations_changes,
    situations_habits,
    situations_hooks,
    situations_left,
    situations_losses,
    situations_models,
    situations_optimizers,
    situations_precision,
    situations_state,
)

__all__ = ["MODULES"]

MODULES: Mapping[str, ModuleType] = {
    "optimizers": situations_optimizers,
    "precision": situations_precision,
    "losses": situations_losses,
    "calls": situations_calls,
    "changes": situations_changes,
    "habits": situations_habits,
    "hooks": situations_hooks,
    "left": situations_left,
    "models": situations_models,
    "state": situations_state,
    "around": situations_around,
}
