"""Real steps on gloo ranks, reported."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import autoshard
from autoshard import PlanError, Profile
from autoshard.reporting.measured import PeakMemory
from autoshard.runtime.session import Session
from tests.api.programs import Axes, data, parallel, trained, two_linear
from tests.ranks import RankPool


@dataclass(frozen=True)
class Reported:
    losses: list[float]
    text: str
    planned: list[tuple[str, int]]
    measured: list[tuple[str, int, float]]
    phases: dict[str, float]
    steps: int
    corrected: str
    spans: list[tuple[float, float]]
    exposed: float
    drawn: str
    memory: list[PeakMemory]


def reported(rank: int, axes: Axes, backend: str) -> Reported:
    model = parallel(two_linear(), axes, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with autoshard.report(model, warmup=1, repeats=2) as report:
        losses = trained(model, optimizer, steps=3)
        other.step()  # of another model: no step of this one
    session = Session.of(model)
    assert session is not None and session.observers == []
    losses += trained(model, optimizer, steps=1)
    figures = report.figures
    plan = model.autoshard_plan
    return Reported(
        losses,
        report.text(),
        sorted((c.kind, c.nbytes) for c in plan.collectives),  # type: ignore[union-attr]
        [(c.predicted.kind, c.predicted.nbytes, c.seconds) for c in figures.collectives],
        {p.name: p.seconds for p in figures.phases},
        figures.steps,
        report.corrected().to_json(),
        [(t.start, t.end) for t in figures.tracks],
        0.0 if figures.exposed is None else figures.exposed.measured,
        report.draw(Path(tempfile.mkdtemp()) / "order.svg").read_text(),
        [*figures.memory, *([figures.peak_memory] if figures.peak_memory else [])],
    )


def moved(collectives: Iterable[tuple[str, int]]) -> Counter[str]:
    """Bytes by kind."""
    total: Counter[str] = Counter()
    for kind, nbytes in collectives:
        total[kind] += nbytes
    return total


@pytest.mark.parametrize(
    ("axes", "backend"),
    [((("a", 2), ("b", 2)), "eager"), ((("a", 2),), "inductor")],
    ids=["eager", "inductor"],
)
def test_steps_are_measured_and_not_changed(ranks: RankPool, axes: Axes, backend: str) -> None:
    world = 2 ** len(axes)
    found = ranks.run(reported, axes, backend, world=world)
    plain = two_linear()
    assert found[0].losses == pytest.approx(
        trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps=4), rel=1e-4
    )
    first = found[0]
    assert all(other.text == first.text for other in found)
    assert first.steps == 2
    assert list(first.phases) == ["forward", "backward", "optimizer", "other"]
    assert all(seconds > 0.0 for seconds in first.phases.values())
    # Some may be merged into one; they move the same bytes.
    assert moved((kind, nbytes) for kind, nbytes, _ in first.measured) == moved(first.planned)
    assert len(first.planned) > 0
    assert all(seconds > 0.0 for _, _, seconds in first.measured)
    # Each ran at some time within its step, after the one before it was issued, as the picture has it.
    assert len(first.spans) == len(first.measured)
    starts = [start for start, _ in first.spans]
    assert starts == sorted(starts) and all(0.0 <= start < end for start, end in first.spans)
    assert first.exposed > 0.0
    assert first.drawn.count("<title>") == 2 * len(first.measured)
    assert [one.phase for one in first.memory] == ["forward", "backward", "step"]
    for one in first.memory:
        assert one.predicted is not None
        # Of a few KB: a bucket more or less shows.
        assert 0.8 * one.measured <= one.predicted <= 1.1 * one.measured, first.memory
    assert "\npeak memory " in first.text
    profile = Profile.from_json(first.corrected, "corrected")
    assert profile.name == "slow compute (corrected)"
    assert f"on {world} ranks" in profile.sources[-1]
    assert {samples.kind for samples in profile.collectives} == {kind for kind, _ in first.planned}


def reported_forwards(rank: int) -> str:
    model = parallel(two_linear(), (("a", 2),))
    with autoshard.report(model) as report, torch.no_grad():
        for _ in range(3):
            model(data()[0])
    return report.text()


def test_forwards_alone(ranks: RankPool) -> None:
    text = ranks.run(reported_forwards, world=2)[0]
    assert "forward" in text and "optimizer" not in text and "backward" not in text


def misused(rank: int) -> list[str]:
    model = parallel(two_linear(), (("a", 2),))
    messages: list[str] = []
    with autoshard.report(model) as report:
        with pytest.raises(PlanError) as early:
            report.text()
        messages.append(str(early.value))
        F.mse_loss(model(data()[0]), data()[1]).backward()
    idle = autoshard.report(model)
    with pytest.raises(PlanError) as nothing, idle:
        pass
    messages.append(str(nothing.value))
    with pytest.raises(ZeroDivisionError), autoshard.report(model):
        raise ZeroDivisionError  # the block's own error reaches the user, and nobody waits for anyone
    session = Session.of(model)
    assert session is not None and session.observers == []
    return messages


def test_misuse(ranks: RankPool) -> None:
    early, nothing = ranks.run(misused, world=2)[0]
    assert early == "the report is not there yet\n  try: read it after its `with` block has ended"
    assert nothing.startswith("report: the model was not called in the block")


def test_a_plain_model_has_no_report() -> None:
    with pytest.raises(PlanError, match="the model is not parallel"):
        autoshard.report(torch.nn.Linear(2, 2))
