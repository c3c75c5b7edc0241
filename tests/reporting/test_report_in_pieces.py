"""Real steps whose batch is run in pieces, reported."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.reporting.measured import PeakMemory, StepFigures
from tests.api.programs import parallel
from tests.ranks import RankPool

WIDTH, ROWS, PIECES = 64, 90, 4
"""Rows of pieces: 23, 23, 22, 22."""


class Mlp(nn.Module):
    """loss: whether the model returns its loss, or outputs of which the loss is computed later."""

    def __init__(self, loss: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(x, y) if self.loss else x


@dataclass(frozen=True)
class Reported:
    losses: list[float]
    text: str
    figures: StepFigures
    planned: Counter[str]
    """Bytes by kind of collective."""


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, loss: bool) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    losses: list[float] = []
    for _ in range(4):
        found = model(x, y) if loss else F.mse_loss(model(x, y), y)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    return losses


def reported(rank: int, loss: bool, backend: str) -> Reported:
    model = parallel(Mlp(loss), (("a", 2),), backend=backend, micro_batches=PIECES)
    optimizer = torch.optim.AdamW(model.parameters())
    with autoshard.report(model, warmup=1, repeats=2) as report:
        losses = steps(model, optimizer, loss)
    planned: Counter[str] = Counter()
    for one in model.autoshard_plan.collectives:  # type: ignore[union-attr]
        planned[one.kind] += one.nbytes
    report.corrected()
    return Reported(losses, report.text(), report.figures, planned)


@pytest.mark.parametrize(("loss", "backend"), [(True, "eager"), (True, "inductor"), (False, "eager")])
def test_what_is_measured_is_of_all_pieces(ranks: RankPool, loss: bool, backend: str) -> None:
    first, other = ranks.run(reported, loss, backend, world=2)
    plain = Mlp(loss)
    right = steps(plain, torch.optim.AdamW(plain.parameters()), loss)
    assert first.losses == pytest.approx(right, rel=1e-5)
    assert first.text == other.text
    figures = first.figures
    assert figures.steps == 3
    assert [phase.name for phase in figures.phases] == ["forward", "backward", "optimizer", "other"]
    assert all(phase.seconds > 0.0 for phase in figures.phases)
    assert all(phase.compute is not None and phase.compute > 0.0 for phase in figures.phases[:2])
    moved: Counter[str] = Counter()
    for one in figures.collectives:
        assert one.seconds > 0.0
        # Activations of a piece's 23 rows move for every piece, gradients of the layers once.
        assert one.predicted.times == (PIECES if one.predicted.nbytes % (23 * WIDTH * 4) == 0 else 1)
        moved[one.predicted.kind] += one.predicted.nbytes
    assert moved == first.planned and moved
    # Three between the layers, alike, in each of 4 pieces.
    assert f" {23 * WIDTH * 4 / 1000:.3f}KB x12 " in first.text
    # The peak beside the predicted.
    assert [one.phase for one in figures.memory] == ["forward", "backward"]
    peak = figures.peak_memory
    assert isinstance(peak, PeakMemory) and peak.predicted is not None
    assert 0.97 * peak.measured <= peak.predicted <= 1.03 * peak.measured
