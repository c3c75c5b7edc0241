"""Plans with head and loss in pieces: found where logits do not fit, written, read, verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import InfeasibleError, MeshSpec, Plan, find_plan, verify
from autoshard.plan.micro_batches import fitting
from autoshard.planning import canonical_capture
from cost_model.deadline import Deadline
from passes.capture import Captured
from passes.micro_batches.cut_batch import Uncut
from tests.micro_batches.test_cut_head import Speaker, mean
from tests.profiles import slow_compute

WORDS = 400
LIMIT = 500_000
"""Of the logits, 8 x 16 x 400 numbers of 8 bytes, a rank of two has 205 KB, and whole three such at once."""


def speaker() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Speaker(mean, words=WORDS).double(), torch.randint(0, WORDS, (8, 16))


def planned(limit: int | None, **options: Any) -> tuple[nn.Module, Tensor, Plan]:
    model, ids = speaker()
    options = {"profile": slow_compute(), "backend": "eager", **options}
    return model, ids, find_plan(model, MeshSpec({"dp": 2}), (ids,), memory_limit=limit, **options)


def test_where_logits_do_not_fit(tmp_path: Path) -> None:
    model, ids, plan = planned(LIMIT)
    assert plan.head_pieces == 4 and plan.micro_batches == 1 and plan.peak_memory <= LIMIT
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == plan and read.head_pieces == 4
    assert "head and loss run in 4 pieces over tokens" in read.explain()
    report = verify(model, read, (ids,))
    assert report.ok and report.max_error < 1e-12


def test_a_plan_whose_logits_fit_says_nothing_of_pieces() -> None:
    _, _, plan = planned(10 * LIMIT)
    assert plan.head_pieces == 1 and "head_pieces" not in plan.to_json()


def test_the_batch_in_pieces_and_in_each_the_head() -> None:
    model, ids, plan = planned(320_000, micro_batches=2)
    assert plan.head_pieces > 1 and plan.micro_batches == 2
    assert verify(model, plan, (ids,)).max_error < 1e-12


def captured() -> Captured:
    model, ids = speaker()
    return canonical_capture(model, (ids,), {})


def test_more_pieces_where_few_do_not_fit() -> None:
    asked: list[int] = []

    def refusing(cut: Captured, _: Deadline) -> int:
        asked.append(cut.joint.head_pieces)
        if cut.joint.head_pieces < 16:
            raise InfeasibleError(f"not in {cut.joint.head_pieces}")
        return cut.joint.head_pieces

    assert fitting(captured(), LIMIT, refusing, Deadline.after(60.0)) == 16 and asked == [1, 4, 16]


def test_where_nothing_fits_the_whole_call_says_why() -> None:
    def refusing(cut: Captured, _: Deadline) -> int:
        raise InfeasibleError(f"not in {cut.joint.head_pieces}")

    with pytest.raises(InfeasibleError, match="not in 1"):
        fitting(captured(), LIMIT, refusing, Deadline.after(60.0))


def test_a_call_whose_head_cannot_be_cut_has_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def refusing(_: Captured, deadline: Deadline) -> int:
        given.append(deadline.left)
        raise InfeasibleError("not at all")

    def uncut(*_: object) -> Captured:
        raise Uncut("in the midst of the model")

    with pytest.raises(InfeasibleError, match="not at all"):
        fitting(captured(), LIMIT, refusing, Deadline.after(6000.0))
    assert 4400.0 < given[0] <= 4500.0 < given[1], "with a head, three fourths of it"
    given.clear()
    monkeypatch.setattr("autoshard.plan.micro_batches.cut_head", uncut)
    with pytest.raises(InfeasibleError, match="not at all"):
        fitting(captured(), LIMIT, refusing, Deadline.after(6000.0))
    assert len(given) == 1, "what is known not to fit is not asked again"
    given.clear()
    with pytest.raises(InfeasibleError, match="not at all"):
        fitting(captured(), LIMIT, refusing, Deadline.after(0.0))
    assert len(given) == 2, "where time ended it, with the rest of it"


def test_without_a_limit_nothing_else_is_asked() -> None:
    def refusing(cut: Captured, _: Deadline) -> int:
        raise InfeasibleError(f"not in {cut.joint.head_pieces}")

    with pytest.raises(InfeasibleError, match="not in 1"):
        fitting(captured(), None, refusing, Deadline.after(60.0))
