"""What a scenario gave, and how it is judged. All of it survives a JSON file."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["EQUAL", "SAME_LOSS", "Entry", "Result"]

EQUAL = 0.03
"""Share of a step under which two plans are equally fast."""
SAME_LOSS = 1e-4
"""Relative difference of a loss under which a contestant trains the same model. Sums in another order differ by some
1e-6 in float32; a wrong program has been seen to differ by 8e-3."""


@dataclass(frozen=True)
class Entry:
    """One contestant. kind: "hand-written", "autoshard" (its own plan), "raced" (what race=3 keeps) or "pinned".

    seconds: of each timed step, of the slowest rank; cpu_seconds: of each, processor time of all ranks.
    losses: of the first steps; state_bytes: parameters, gradients and AdamW's state, per rank.
    predicted: seconds of a step, of planned ones; modelled: before the plan was rehearsed; plan: their parameters'
    layouts. error: why it did not run.
    setting: in which it ran, the fastest of `tried`: setting -> median step, seconds.
    """

    name: str
    kind: str
    seconds: tuple[float, ...] = ()
    cpu_seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    state_bytes: int = 0
    predicted: float | None = None
    modelled: float | None = None
    plan: str = ""
    error: str = ""
    setting: str = ""
    tried: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """With its setting, if there were several."""
        return f"{self.name} ({self.setting})" if self.setting else self.name

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def cpu(self) -> float:
        """Processor time of all ranks in a step, median: what the step costs where nothing waits."""
        return statistics.median(self.cpu_seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return low, high

    def ties(self, other: Entry) -> bool:
        """Whether quartiles overlap: then neither is the faster."""
        low, high = self.quartiles
        return low <= other.quartiles[1] and other.quartiles[0] <= high

    @property
    def prediction_error(self) -> float | None:
        """Signed, as a share of the measured step."""
        return None if self.predicted is None or not self.seconds else self.predicted / self.median - 1.0


@dataclass(frozen=True)
class Result:
    """One scenario. reference: losses of one process without parallelism."""

    scenario: str
    fabric: str
    workload: str
    why: str
    memory_limit: int | None
    reference: tuple[float, ...] = ()
    entries: tuple[Entry, ...] = ()
    error: str = ""
    notes: dict[str, float] = field(default_factory=dict)

    def fits(self, entry: Entry) -> bool:
        return self.memory_limit is None or entry.state_bytes <= self.memory_limit

    def loss_error_of(self, entry: Entry) -> float:
        """The largest relative difference of the entry's losses from the reference's; infinite where one is NaN."""
        pairs = zip(entry.losses, self.reference, strict=False)
        errors = [abs(mine - right) / abs(right) for mine, right in pairs]
        return math.inf if any(map(math.isnan, errors)) else max(errors, default=0.0)

    def trains_alike(self, entry: Entry) -> bool:
        """Whether the entry trains the model that one process without parallelism does."""
        return self.loss_error_of(entry) <= SAME_LOSS

    @property
    def wrong(self) -> list[Entry]:
        """The entries that train another model: each a defect of whoever made it."""
        return [entry for entry in self.entries if not self.trains_alike(entry)]

    def ranked(self, entry: Entry) -> bool:
        """Whether the entry ran, meets the limit and trains the same model. Others are listed and never compared."""
        return bool(entry.seconds) and self.fits(entry) and self.trains_alike(entry)

    def ran(self, kind: str) -> list[Entry]:
        """The ranked entries of `kind`, fastest first."""
        found = [e for e in self.entries if e.kind == kind and self.ranked(e)]
        return sorted(found, key=lambda e: e.median)

    @property
    def ours(self) -> Entry | None:
        return next(iter(self.ran("autoshard")), None)

    @property
    def best_hand_written(self) -> Entry | None:
        return next(iter(self.ran("hand-written")), None)

    @property
    def ratio(self) -> float | None:
        """Step of autoshard's plan over that of the best hand-written way."""
        ours, best = self.ours, self.best_hand_written
        return ours.median / best.median if ours and best else None

    @property
    def tie(self) -> bool:
        """Whether the two cannot be told apart: their quartiles overlap."""
        ours, best = self.ours, self.best_hand_written
        return bool(ours and best and ours.ties(best))

    @property
    def raced_ratio(self) -> float | None:
        """The same of the plan that `race=3` kept."""
        raced, best = next(iter(self.ran("raced")), None), self.best_hand_written
        return raced.median / best.median if raced and best else None

    @property
    def picked_the_best(self) -> bool | None:
        """Whether no pinned plan, priced by the same profile, was more than `EQUAL` faster than autoshard's."""
        ours, others = self.ours, self.ran("pinned")
        return all(ours.median <= (1.0 + EQUAL) * other.median for other in others) if ours else None

    @property
    def loss_error(self) -> float:
        """The largest relative difference of any loss of any contestant from the reference's."""
        return max(map(self.loss_error_of, self.entries), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Result:
        entries = tuple(
            Entry(**{name: tuple(v) if isinstance(v, list) else v for name, v in entry.items()})
            for entry in data["entries"]
        )
        return Result(**{**data, "entries": entries, "reference": tuple(data["reference"])})
