"""What was asked of `autoshard` for one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.plan.plan import AnyPlan
from cost_model.profile import Profile
from passes.layout.layout import Layout

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What the user asked `autoshard` for; see its docstring. profile: None until it is measured."""

    profile: Profile | None
    memory_limit: int | None
    in_placements: Any
    out_placements: Any
    pins: Mapping[str, Layout]
    plan: AnyPlan | None
    backend: str
    recompute: str
    time_limit: float
    micro_batches: int | str = 1
    stages: str | None = None
    schedule: str | None = None
    optimizer: str | None = None
    race: int = 0
    refine: str = "off"

    def described(self) -> dict[str, str]:
        """By argument, what all ranks must have given alike."""
        return {
            "memory_limit": str(self.memory_limit),
            "in_placements": str(self.in_placements),
            "out_placements": str(self.out_placements),
            "constraints": str(sorted(self.pins.items())),
            "plan": "searched" if self.plan is None else self.plan.fingerprint,
            "backend": self.backend,
            "recompute": self.recompute,
            "optimizer": str(self.optimizer),
            "micro_batches": str(self.micro_batches),
            "stages": str(self.stages),
            "schedule": str(self.schedule),
            "time_limit": str(self.time_limit),
            "race": str(self.race),
            "refine": self.refine,
            "profile": "measured" if self.profile is None else self.profile.hash(),
        }
