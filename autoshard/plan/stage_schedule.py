"""Which schedule runs planned stages: each on the timeline of all ranks, and what it keeps in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add

from cost_model.errors import InfeasibleError
from passes.predict.predict_stage import StageFigures
from passes.stages.pipeline_orders import ORDERS, PipelineOrder, pipeline_order, rank_peaks
from passes.stages.pipeline_timeline import PipelineTimeline, StageSeconds, pipeline_timeline

__all__ = ["SchedulePrices", "Scheduled", "orders_of"]


@dataclass(frozen=True)
class SchedulePrices:
    """stages: figures of each. sent, returned: seconds of what passes each boundary for a piece, forward and back."""

    stages: tuple[StageFigures, ...]
    sent: tuple[float, ...]
    returned: tuple[float, ...]


@dataclass(frozen=True)
class Scheduled:
    """Stages under one schedule."""

    order: PipelineOrder
    prices: SchedulePrices

    @cached_property
    def timeline(self) -> PipelineTimeline:
        prices = self.prices
        return pipeline_timeline(
            self.order,
            [self._seconds(stage) for stage in prices.stages],
            prices.sent,
            prices.returned,
            before=[sum(stage.before for stage in own) for own in self._by_rank],
            after=[sum(stage.after + stage.update for stage in own) for own in self._by_rank],
        )

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Bytes that each rank holds at most: while a stage runs a piece, what its others hold, and all that is in
        flight then."""
        stages = self.prices.stages
        kept, running = [stage.kept for stage in stages], [stage.running for stage in stages]
        peaks = rank_peaks(self.order, kept, running)
        held = (sum(stage.held for stage in own) for own in self._by_rank)
        return tuple(map(add, peaks, held))

    @property
    def _by_rank(self) -> list[Sequence[StageFigures]]:
        count = len(self.order.ranks)
        return [self.prices.stages[rank::count] for rank in range(count)]

    def _seconds(self, stage: StageFigures) -> StageSeconds:
        """A backward that runs as one program takes less than its halves."""
        halved = any(action.kind == "weight" for row in self.order.ranks for action in row)
        halves = (stage.input, stage.weight) if halved else (stage.backward, 0.0)
        return StageSeconds(stage.forward, *halves)


def orders_of(
    ranks: int, pieces: int, stages_per_rank: int, names: Sequence[str] = tuple(ORDERS)
) -> Iterator[PipelineOrder]:
    """Those of `names` that run so many stages and pieces."""
    for name in names:
        try:
            yield pipeline_order(name, ranks, pieces, stages_per_rank=stages_per_rank)
        except InfeasibleError:
            continue
