"""`autoshard report`: a few steps of any model on the ranks there are."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import Profile, ShardingError
from autoshard.cli import main
from autoshard.reporting.report_steps import ReportOptions, loss_of, train_and_report
from tests.api.programs import device_mesh
from tests.models import TwoLinear
from tests.profiles import slow_compute
from tests.ranks import RankPool


@dataclass(frozen=True)
class Shown:
    text: str
    on_meta: bool


def on_meta(rank: int, folder: str) -> Shown:
    """A model that was never materialised, and inputs without values."""
    profile = Path(folder) / "slow.json"
    if rank == 0:
        slow_compute().save(profile)
    torch.distributed.barrier()
    with torch.device("meta"):
        model, x = TwoLinear(), torch.empty(8, 10)
    options = ReportOptions(
        plan=None,
        mesh={"a": 2},
        device="cpu",
        profile=str(profile),
        backend="eager",
        steps=3,
        warmup=1,
        write_profile=Path(folder) / "corrected.json",
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_and_report(model, (x,), options, device_mesh((("a", 2),)))
    return Shown(printed.getvalue(), any(p.is_meta for p in model.parameters()))


def test_a_model_on_meta(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(on_meta, str(tmp_path), world=2)
    assert first.text.startswith("2 steps after 1 of warm-up, 2 ranks; prices of slow compute")
    assert "corrected.json" in first.text
    assert second.text == "" and not first.on_meta
    assert Profile.load(tmp_path / "corrected.json").name == "slow compute (corrected)"


MODEL = "import torch\ndef small():\n    return torch.nn.Linear(10, 4), (torch.randn(8, 10),)\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "neither a plan nor a mesh\n  try: --plan plan.json, or --mesh dp=2,tp=4"),
        (
            ("--mesh", "x=2"),
            "has 2 devices, and 1 process(es) run\n  try: a mesh of all processes, or torchrun",
        ),
    ],
)
def test_usage(
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "report_usage_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["report", "report_usage_model:small", "--device", "cpu", *options]) == 1
    assert message in capsys.readouterr().err


SCALAR = torch.tensor(2.0, requires_grad=True)
VECTOR = torch.tensor([1.0, 3.0], requires_grad=True)


@pytest.mark.parametrize(
    ("outputs", "loss"),
    [
        (SCALAR, 2.0),
        (VECTOR, 5.0),  # mean square
        ((VECTOR, SCALAR), 2.0),
        ({"logits": VECTOR, "loss": SCALAR}, 2.0),
        (SimpleNamespace(logits=VECTOR, loss=SCALAR), 2.0),
        ([torch.ones(3), VECTOR], 5.0),
    ],
)
def test_what_is_differentiated(outputs: Any, loss: float) -> None:
    assert loss_of(outputs).item() == loss


def test_outputs_without_gradient() -> None:
    with pytest.raises(ShardingError, match="need no gradient"):
        loss_of(nn.Linear(2, 2)(torch.ones(2)).detach())
